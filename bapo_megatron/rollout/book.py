"""The samples between prompt and batch: admitted, growing, complete, judged, chosen. No engine, no clock.

prompts --admit--> active groups --grow--> complete --settle (judged)--> finished --choose--> one step's groups
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import InstanceOf, ValidationInfo
from typing_extensions import TypedDict

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.prompts.mixture import PromptsState
from bapo_megatron.rollout.ledger import Ledger, LedgerError, LedgerState
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.tokens import Array, JoinedRows, TokenStream
from bapo_megatron.types import Group, GroupJson, Prompt, Trajectory, with_values

Keep = Callable[[Group], bool]
"""Tells whether a judged group is worth training."""


class Prompts(Protocol):
    """An endless stream of prompts with a cursor."""

    def next(self) -> Prompt: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BookState(TypedDict):
    """A `RolloutBook` in a checkpoint."""

    prompts: PromptsState
    ledger: LedgerState
    active: list[GroupJson]  # whose values are numbers of rows
    finished: list[GroupJson]
    rows: dict[str, InstanceOf[Array]]  # of all groups, joined: by the name of their stream


def samples_fit(state: Any, info: ValidationInfo) -> Any:
    """Check the values of a `BookState`'s tokens, as a validator; "streams" and "vocab_size" may be in the context."""
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
        return Group.from_json(value, streams, vocab_size)

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
    ) -> None:
        """`streams`: of models and plugins, that the engines return."""
        self.ledger = Ledger()
        self.bound = bound
        self.num_dropped: Counter[str] = Counter()  # groups by reason, since this attempt began
        self._prompts = prompts
        self._keep = keep
        self._streams = streams
        self._samples_per_prompt = config.samples_per_prompt
        self._samples_in_flight = (config.groups_in_flight or config.prompts_per_step) * config.samples_per_prompt
        self._active: dict[int, Group] = {}  # by prompt id, oldest first
        self._finished: list[Group] = []  # judged, in the order of the verdicts
        self._num_unfinished = 0
        self._begun: dict[str, int] = {}  # weight version at the start of each request in progress, by sample id

    def admit(self, version: int, next_version: int) -> list[Trajectory]:
        """Draw prompts until as many responses are unfinished as the configuration asks for; return the new ones.

        A sample is replaced when it ends, not when its group does: a slow response holds back no other group.
        """
        admitted: list[Trajectory] = []
        capacity = self.bound.capacity(version, next_version)
        while self._num_unfinished < self._samples_in_flight and len(self._active) + len(self._finished) < capacity:
            prompt = self._prompts.next()
            group = Group.begun(prompt, self._samples_per_prompt)
            for trajectory in group.trajectories:
                self.ledger.admit(trajectory.sample_id)
            self._active[prompt.prompt_id] = group
            self._num_unfinished += len(group.trajectories)
            admitted += group.trajectories
        return admitted

    def unfinished(self) -> list[Trajectory]:
        """Return responses that need more tokens, those of older prompts first."""
        return [t for group in self._active.values() for t in group.trajectories if t.finish_reason is None]

    def start(self, trajectory: Trajectory, version: int) -> None:
        """Record that a request for this response is in progress, with tokens of weight `version` or newer."""
        self.ledger.start(trajectory.sample_id)
        self._begun[trajectory.sample_id] = version

    def grow(self, trajectory: Trajectory) -> None:
        """Record the response that a request returned."""
        prompt_id = trajectory.prompt.prompt_id
        self._active[prompt_id] = self._active[prompt_id].grown(trajectory)
        self._num_unfinished -= trajectory.finish_reason is not None
        self._stop(trajectory)

    def release(self, sample_id: str) -> None:
        """Record that the request has ended; a response that did not come back stays as it was."""
        if self.ledger.is_running(sample_id):
            self._stop(self.get(sample_id))

    def get(self, sample_id: str) -> Trajectory:
        """Return an active response."""
        group = self.group(int(sample_id.split(".")[0]))
        return next(t for t in group.trajectories if t.sample_id == sample_id)

    def group(self, prompt_id: int) -> Group:
        """Return an active group."""
        return self._active[prompt_id]

    def complete(self) -> list[Group]:
        """Return groups whose responses have all ended, and that wait to be judged."""
        return [group for group in self._active.values() if group.is_complete]

    def settle(self, group: Group, rewards: Sequence[float], version: int) -> bool:
        """Give a complete group one reward per response; it then waits to be trained, or is dropped.

        Returns whether it is worth training. A group too old at `version` is dropped all the same, as "stale".
        """
        trajectories = zip(group.trajectories, rewards, strict=True)
        judged = replace(group, trajectories=tuple(replace(t, reward=float(r)) for t, r in trajectories))
        del self._active[group.prompt.prompt_id]
        is_kept = self._keep(judged)
        if self.bound.is_stale(judged, version):
            self._drop(judged, "stale")
        elif not is_kept:
            self._drop(judged, "keep_group")
        else:
            self._finished.append(judged)
        return is_kept

    def choose(self, version: int) -> list[Group] | None:
        """Return one step's groups and book them as trained; None if the step has to wait for others to finish."""
        chosen = self.bound.choose(self._finished, [self._slack(g, version) for g in self._active.values()], version)
        if chosen is None:
            return None
        taken = {group.prompt.prompt_id for group in chosen}
        self._finished = [group for group in self._finished if group.prompt.prompt_id not in taken]
        for trajectory in (t for group in chosen for t in group.trajectories):
            self.ledger.train(trajectory.sample_id)
        self.ledger.check(self.buffered())
        return chosen

    def drop_stale(self, version: int) -> None:
        """Drop groups that can no longer be trained within the bound: none, unless it was lowered between runs.

        Groups with a request in progress, and complete ones, whose verdict may be, are left to `settle`.
        """
        for group in [g for g in self._finished if self.bound.is_stale(g, version)]:
            self._finished.remove(group)
            self._drop(group, "stale")
        for group in [g for g in self._active.values() if self.bound.is_stale(g, version)]:
            if not (group.is_complete or any(self.ledger.is_running(t.sample_id) for t in group.trajectories)):
                del self._active[group.prompt.prompt_id]
                self._num_unfinished -= sum(t.finish_reason is None for t in group.trajectories)
                self._drop(group, "stale")

    def is_urgent(self, trajectory: Trajectory, version: int) -> bool:
        """Return whether its group must be trained in the step that begins at `version`, or never."""
        return self._slack(self._active[trajectory.prompt.prompt_id], version) == 0

    def buffered(self) -> Iterator[Trajectory]:
        """Yield every response here: partial, waiting, or finished and not yet taken."""
        for group in (*self._active.values(), *self._finished):
            yield from group.trajectories

    def state_dict(self) -> dict[str, Any]:
        """Return JSON, with arrays, that a resumed run loses nothing with; running requests are sent again."""
        rows = JoinedRows()
        groups = {"active": self._active.values(), "finished": self._finished}
        samples = {name: [with_values(g.to_json(), rows.put) for g in some] for name, some in groups.items()}
        return {
            "prompts": self._prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
            **samples,
            "rows": rows.arrays(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken. Raises CheckpointError if it contradicts itself, or the configuration."""
        self._prompts.load_state_dict(state["prompts"])
        self.ledger.load_state_dict(state["ledger"])
        try:
            active, self._finished = groups_of(state, self._streams)
        except ValueError as problem:
            raise CheckpointError(f"the checkpoint's samples cannot be used: {problem}") from problem
        self._active = {group.prompt.prompt_id: group for group in active}
        self._num_unfinished = len(self.unfinished())
        try:
            self.ledger.check(self.buffered())
        except LedgerError as error:
            raise CheckpointError(f"the checkpoint's samples contradict its ledger: {error}") from error
        if any(t.reward is None for group in self._finished for t in group.trajectories):
            raise CheckpointError("the checkpoint holds a finished group without rewards")

    def _slack(self, group: Group, version: int) -> float:
        """Return the slack of an active group: tokens on their way may be as old as their request."""
        begun = [self._begun[t.sample_id] for t in group.trajectories if t.sample_id in self._begun]
        return min([self.bound.slack_of(group, version), *(self.bound.slack(v, version) for v in begun)])

    def _stop(self, trajectory: Trajectory) -> None:
        self.ledger.stop(trajectory)
        del self._begun[trajectory.sample_id]

    def _drop(self, group: Group, reason: str) -> None:
        self.num_dropped[reason] += 1
        for trajectory in group.trajectories:
            self.ledger.drop(trajectory.sample_id, reason)
