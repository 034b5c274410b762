"""The samples between prompt and batch: admitted, growing, answered, ended, chosen. It knows nothing
of engines, drivers or time.

prompts --admit--> active groups --grow, answer--> complete --settle--> finished --choose--> one step's groups

What many groups decide together (who is trained, who is urgent, whether the books balance) is updated with each change,
so that no question costs more as the number of groups grows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pydantic import InstanceOf, ValidationInfo
from typing_extensions import TypedDict

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.prompts.mixture import PromptsState
from bapo_megatron.rollout.group_files import GroupJson, group_from_json, group_to_json, with_values
from bapo_megatron.rollout.ledger import Held, Ledger, LedgerError, LedgerState
from bapo_megatron.rollout.staleness import Ages, StalenessBound
from bapo_megatron.tokens import Array, JoinedRows, TokenStream
from bapo_megatron.types import (
    Ended,
    Group,
    Need,
    NeedsEnvironment,
    NeedsTokens,
    Prompt,
    Sample,
)

_TOKENS = NeedsTokens()

Keep = Callable[[Group], bool]
"""Returns whether a judged group is worth training."""


class Prompts(Protocol):
    """An endless stream of prompts with a cursor."""

    def next(self) -> Prompt: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BookState(TypedDict):
    """A `RolloutBook` in a checkpoint."""

    prompts: PromptsState
    ledger: LedgerState
    active: list[GroupJson]  # with numbers of rows in place of the rows
    finished: list[GroupJson]
    rows: dict[str, InstanceOf[Array]]  # rows of all groups, joined, by stream name


def samples_fit(state: Any, info: ValidationInfo) -> Any:
    """Check the values of a `BookState`'s tokens, as a validator; the context may hold "streams" and "vocab_size"."""
    context = info.context or {}
    groups_of(state, context.get("streams", ()), context.get("vocab_size"))
    return state


def groups_of(state: Any, streams: Iterable[TokenStream], vocab_size: int | None = None) -> tuple[list[Group], ...]:
    """Return the active and the finished groups of a state. Raises ValueError naming prompt and stream."""
    rows, streams = JoinedRows(state["rows"]), tuple(streams)

    def group(value: Any) -> Group:
        try:
            value = with_values(value, rows.take)
        except ValueError as problem:
            raise ValueError(f"prompt {value['prompt']['prompt_id']}: {problem}") from problem
        return group_from_json(value, streams, vocab_size)

    found = tuple([group(value) for value in state[name]] for name in ("active", "finished"))
    rows.check_empty()
    return found


class RolloutBook:
    """Owner of the groups that are not trained yet, and of the ledger that proves it. Not thread-safe."""

    def __init__(
        self,
        config: RolloutConfig,
        prompts: Prompts,
        bound: StalenessBound,
        keep: Keep = lambda judged: True,
        streams: Sequence[TokenStream] = (),
        *,
        by_group: bool = True,
        first_need: Need = _TOKENS,
    ) -> None:
        """`streams`: streams that samples have. `by_group`, `first_need`: see `Driver`."""
        self.ledger = Ledger()
        self.bound = bound
        self.num_dropped: Counter[str] = Counter()  # groups by reason, since this attempt began
        self.prompts = prompts
        self.keep = keep
        self._streams = streams
        self.by_group = by_group
        self._first_need = first_need
        self._samples_per_prompt = config.samples_per_prompt
        self._samples_in_flight = (config.groups_in_flight or config.prompts_per_step) * config.samples_per_prompt
        self._active: dict[int, Group] = {}  # by prompt id, oldest first
        self._finished: dict[int, Group] = {}  # judged, by prompt id, in the order of the verdicts
        self.num_growing = 0  # samples that need tokens
        self.num_beginning = 0  # samples before their first turn that wait for their environment
        # Example: the oldest tokens of samples 7.0 and 7.1 have versions 3 and 5. Then _oldest is {"7.0": 3, "7.1": 5},
        # and _ages[7] is 3. Once group 7 is judged, _finished_ages[7] is 3, and the others have no entry of it.
        self._oldest: dict[str, int] = {}  # version of an active sample's oldest token, here or requested, by sample id
        self._ages, self._finished_ages = Ages(), Ages()  # active groups, finished groups
        self._held = Held()  # all samples here
        self._changed: set[str] = set()  # ids of samples that came or changed since the last check of the ledger

    def admit(self, version: int, next_version: int) -> list[Sample]:
        """Draw prompts until as many samples need tokens, or begin, as the configuration asks for. Return new samples.

        A sample is replaced once it needs no more tokens, not when its group ends, so that a slow sample, or one that
        waits for its environment, holds back no other group. All of them count towards the staleness bound.
        """
        admitted: list[Sample] = []
        capacity = self.bound.capacity(version, next_version)
        begins = isinstance(self._first_need, NeedsEnvironment)
        while (
            self.num_growing + self.num_beginning < self._samples_in_flight
            and len(self._active) + len(self._finished) < capacity
        ):
            prompt = self.prompts.next()
            group = Group.begun(prompt, self._samples_per_prompt, self._first_need)
            for sample in group.samples:
                self.ledger.admit(sample.sample_id, "finished" if begins else "queued")
                self._held.count(sample)
                self._changed.add(sample.sample_id)
            self._active[prompt.prompt_id] = group
            self._ages.put(prompt.prompt_id, None)
            self.num_growing += len(_growing_in(group))
            self.num_beginning += _num_beginning(group.samples)
            admitted += group.samples
        return admitted

    def growing(self) -> list[Sample]:
        """Return samples that need more tokens, older prompts first."""
        return [s for group in self._active.values() for s in _growing_in(group)]

    def urgent(self, version: int) -> list[Sample]:
        """Return samples that need more tokens and whose group must be trained in the step that begins at `version`, or
        never."""
        prompt_ids = self.bound.urgent(self._ages, version)
        return [s for prompt_id in prompt_ids for s in _growing_in(self._active[prompt_id])]

    def waiting(self) -> list[list[Sample]]:
        """Return the samples to ask a driver about, one list per joint question, older prompts first."""
        return [samples for group in self._active.values() for samples in self.waiting_in(group)]

    def waiting_in(self, group: Group) -> list[list[Sample]]:
        """Return the samples of an active group as `waiting` does."""
        waiting = [s for s in group.samples if isinstance(s.need, NeedsEnvironment)]
        if not self.by_group:
            return [[sample] for sample in waiting]
        is_due = waiting and not any(isinstance(s.need, NeedsTokens) for s in group.samples)
        return [waiting] if is_due else []

    def start(self, sample: Sample, version: int) -> None:
        """Record that a request for this sample is in progress, with tokens of weight `version` or newer."""
        self.ledger.start(sample.sample_id)
        self._changed.add(sample.sample_id)
        self._note_oldest(sample, version)

    def grow(self, sample: Sample) -> None:
        """Record the sample that a request returned."""
        self.num_growing -= not isinstance(sample.need, NeedsTokens)
        self._put(sample)
        self._stop(sample)

    def answer(self, sample: Sample) -> None:
        """Record the sample that a driver returned."""
        self.ledger.answer(sample)
        self.num_beginning -= _num_beginning([self.get(sample.sample_id)])
        self.num_growing += isinstance(sample.need, NeedsTokens)
        self._put(sample)
        self._note_oldest(sample)

    def release(self, sample_id: str) -> None:
        """Record that the request has ended; a sample that did not come back stays as it was."""
        if self.ledger.is_running(sample_id):
            self._stop(self.get(sample_id))

    def get(self, sample_id: str) -> Sample:
        """Return an active sample."""
        return _sample(self.group(_prompt_id(sample_id)), sample_id)

    def group(self, prompt_id: int) -> Group:
        """Return an active group."""
        return self._active[prompt_id]

    def settle(self, group: Group, version: int) -> bool:
        """Let a complete group wait to be trained, or drop it, as "failed" if too few samples have a reward.

        A group that is too old at `version` is dropped even so, as "stale".
        """
        oldest = self._end(group)
        is_kept = group.has_baseline and self.keep(group)
        if self.bound.slack(oldest, version) < 0:
            self._drop(group, "stale")
        elif not is_kept:
            self._drop(group, "keep_group" if group.has_baseline else "failed")
        else:
            self._finished[group.prompt.prompt_id] = group
            self._finished_ages.put(group.prompt.prompt_id, oldest)
        return is_kept

    def choose(self, version: int) -> list[Group] | None:
        """Return one step's groups and book them as trained, or None if the step must wait for others to finish.

        Their invalid samples are booked as dropped, as "failed".
        """
        prompt_ids = self.bound.choose(self._finished_ages, self._ages, version)
        if prompt_ids is None:
            return None
        chosen = [self._take(prompt_id) for prompt_id in prompt_ids]
        for sample in (s for group in chosen for s in group.samples):
            self._leave(sample)
            if sample.reward is None:
                self.ledger.drop(sample.sample_id, "failed")
            else:
                self.ledger.train(sample.sample_id)
        self.check_changes()
        self._changed.clear()
        return chosen

    def drop_stale(self, version: int) -> None:
        """Drop groups that can no longer be trained within the bound: none, unless it was lowered between runs.

        Groups with a request in progress, and groups that a driver may have been asked about, are left to `settle`.
        """
        for prompt_id in self.bound.stale(self._finished_ages, version):
            self._drop(self._take(prompt_id), "stale")
        for group in [self._active[prompt_id] for prompt_id in self.bound.stale(self._ages, version)]:
            is_running = any(self.ledger.is_running(s.sample_id) for s in group.samples)
            if not (is_running or self.waiting_in(group)):
                self._end(group)
                self.num_growing -= len(_growing_in(group))
                self._drop(group, "stale")

    def is_urgent(self, sample: Sample, version: int) -> bool:
        """Return whether its group must be trained in the step that begins at `version`, or never."""
        return self.bound.slack(self._ages[sample.prompt.prompt_id], version) == 0

    def check_changes(self) -> None:
        """Compare the ledger with the samples that changed since the last `choose`. Raises LedgerError."""
        self.ledger.check_changes(map(self._any, self._changed), self._held)

    def buffered(self) -> Iterator[Sample]:
        """Yield every sample here: growing, waiting, or finished and not yet taken."""
        for group in (*self._active.values(), *self._finished.values()):
            yield from group.samples

    def state_dict(self) -> dict[str, Any]:
        """Return JSON, with arrays, from which a run resumes without losing anything.

        Requests in progress are sent again, and drivers are asked again.
        """
        rows = JoinedRows()
        groups = {"active": self._active.values(), "finished": self._finished.values()}
        samples = {name: [with_values(group_to_json(g), rows.put) for g in some] for name, some in groups.items()}
        return {
            "prompts": self.prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
            **samples,
            "rows": rows.arrays(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises CheckpointError if it contradicts itself or the configuration.

        Unfinished samples of agent programs begin anew.
        """
        self.prompts.load_state_dict(state["prompts"])
        self.ledger.load_state_dict(state["ledger"])
        try:
            active, finished = groups_of(state, self._streams)
        except ValueError as problem:
            raise CheckpointError(f"the checkpoint's samples cannot be used: {problem}") from problem
        try:
            self.ledger.check(sample for group in (*active, *finished) for sample in group.samples)
        except LedgerError as error:
            raise CheckpointError(f"the checkpoint's samples contradict its ledger: {error}") from error
        if any(group.is_complete for group in active):
            raise CheckpointError("the checkpoint holds a group whose samples have all ended among the active ones")
        if not all(group.is_complete and group.has_baseline for group in finished):
            raise CheckpointError("the checkpoint holds a finished group without rewards")
        if isinstance(self._first_need, NeedsEnvironment):
            active = [self._restarted(group, self._first_need) for group in active]
        self._active = {group.prompt.prompt_id: group for group in active}
        self._finished = {group.prompt.prompt_id: group for group in finished}
        self.num_growing = len(self.growing())
        self.num_beginning = sum(_num_beginning(group.samples) for group in active)
        self._oldest, self._held, self._changed = {}, Held(), set()
        self._ages, self._finished_ages = Ages(), Ages()
        for sample in self.buffered():
            self._held.count(sample)
        for sample in (s for group in active for s in group.samples):
            self._note_oldest(sample)
        for group in finished:
            versions = [v for s in group.samples if (v := s.oldest_version) is not None]
            self._finished_ages.put(group.prompt.prompt_id, min(versions, default=None))

    def _restarted(self, group: Group, first_need: NeedsEnvironment) -> Group:
        """Return a group whose unfinished samples begin anew, and book their tokens as dropped."""
        begun = Group.begun(group.prompt, len(group.samples), first_need)
        samples = []
        for old, new in zip(group.samples, begun.samples, strict=True):
            if not isinstance(old.need, Ended):
                self.ledger.restart(old.sample_id)
            samples.append(old if isinstance(old.need, Ended) else new)
        return Group(group.prompt, tuple(samples))

    def _note_oldest(self, sample: Sample, begun: int | None = None) -> None:
        """Note how old an active sample's tokens are; tokens still on their way may be as old as their request."""
        versions = [v for v in (sample.oldest_version, begun) if v is not None]
        if versions:
            self._oldest[sample.sample_id] = min(versions)
        else:
            self._oldest.pop(sample.sample_id, None)
        group = self._active[sample.prompt.prompt_id]
        of_group = [self._oldest[s.sample_id] for s in group.samples if s.sample_id in self._oldest]
        self._ages.put(group.prompt.prompt_id, min(of_group, default=None))

    def _put(self, sample: Sample) -> None:
        group = self._active[sample.prompt.prompt_id]
        self._held.count(_sample(group, sample.sample_id), -1)
        self._held.count(sample)
        self._changed.add(sample.sample_id)
        self._active[group.prompt.prompt_id] = group.grown(sample)

    def _stop(self, sample: Sample) -> None:
        self.ledger.stop(sample)
        self._note_oldest(sample)

    def _end(self, group: Group) -> int | None:
        """Remove an active group; return the version of its oldest token."""
        prompt_id = group.prompt.prompt_id
        oldest = self._ages[prompt_id]
        self._ages.remove(prompt_id)
        del self._active[prompt_id]
        for sample in group.samples:
            self._oldest.pop(sample.sample_id, None)
        return oldest

    def _take(self, prompt_id: int) -> Group:
        """Remove a finished group and return it."""
        self._finished_ages.remove(prompt_id)
        return self._finished.pop(prompt_id)

    def _drop(self, group: Group, reason: str) -> None:
        self.num_dropped[reason] += 1
        for sample in group.samples:
            self._leave(sample)
            self.ledger.drop(sample.sample_id, reason)

    def _leave(self, sample: Sample) -> None:
        self._held.count(sample, -1)
        self._changed.discard(sample.sample_id)

    def _any(self, sample_id: str) -> Sample:
        """Return an active or a finished sample."""
        prompt_id = _prompt_id(sample_id)
        return _sample(self._active.get(prompt_id) or self._finished[prompt_id], sample_id)


def _growing_in(group: Group) -> list[Sample]:
    return [s for s in group.samples if isinstance(s.need, NeedsTokens)]


def _num_beginning(samples: Iterable[Sample]) -> int:
    return sum(isinstance(s.need, NeedsEnvironment) and s.need.turn_end is None for s in samples)


def _prompt_id(sample_id: str) -> int:
    return int(sample_id.split(".")[0])


def _sample(group: Group, sample_id: str) -> Sample:
    return next(s for s in group.samples if s.sample_id == sample_id)
