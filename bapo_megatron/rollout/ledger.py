"""The ledger: the state of every sample, and proof that no token was lost or counted twice.

    queued -> running -> partial -> running -> ... -> finished -> trained
                            ^--- its environment's answer ---'
                                                   (any of them) -> dropped(reason)

A sample is *finished* while it needs no token: it waits for its environment, its judge or its step. One that an agent
program begins is finished first; its program cannot survive a killed run, so it is *restarted*, and its tokens are
dropped. The conservation law is checked against the buffers at every step, for each sample that has changed:

    tokens generated = tokens trained + tokens buffered + tokens dropped

and the same for the tokens that environments gave: given = trained + buffered + dropped.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from bapo_megatron.errors import plural
from bapo_megatron.types import Natural, NeedsTokens, Sample

SampleState = Literal["queued", "running", "partial", "finished"]

_ALLOWED: dict[SampleState, tuple[SampleState, ...]] = {
    "queued": ("running",),
    "running": ("queued", "partial", "finished"),
    "partial": ("running",),
    "finished": ("partial", "queued"),
}


class LedgerError(RuntimeError):
    """A ledger that does not balance: a bug of this package. The run stops rather than train on a wrong batch."""


class LedgerState(TypedDict):
    """A `Ledger` in a checkpoint."""

    states: dict[str, SampleState]
    tokens: dict[str, Natural]
    num_samples: dict[str, Natural]
    num_tokens: dict[str, Natural]
    given: dict[str, Natural]
    num_given: dict[str, Natural]
    dropped: dict[str, Natural]


@dataclass(slots=True)
class Held:
    """The sums of the samples that the scheduler holds."""

    num_samples: int = 0
    num_tokens: int = 0  # sampled tokens
    num_given: int = 0

    def count(self, sample: Sample, num: int = 1) -> None:
        """Count a sample that arrives; with num = -1, one that leaves."""
        self.num_samples += num
        self.num_tokens += num * sample.num_sampled_tokens
        self.num_given += num * sample.num_given_tokens


class Ledger:
    """Accounts of one run. Not thread-safe: it belongs to the scheduler.

    A sample that is trained over several epochs counts as trained once.
    """

    def __init__(self) -> None:
        self._states: dict[str, SampleState] = {}
        self._num_in: Counter[SampleState] = Counter()
        self._tokens: dict[str, int] = {}  # generated so far, by sample still here
        self._given: dict[str, int] = {}  # given by environments so far, by sample still here that has any
        self.num_samples: Counter[str] = Counter()  # admitted, trained, dropped
        self.num_tokens: Counter[str] = Counter()  # generated, trained, dropped
        self.num_given: Counter[str] = Counter()  # given, trained, dropped
        self.dropped: Counter[str] = Counter()  # samples by reason

    def admit(self, sample_id: str, state: Literal["queued", "finished"] = "queued") -> None:
        """Book a new sample, which waits for its first round, or as finished for its environment."""
        if sample_id in self._states:
            raise LedgerError(f"sample {sample_id} was admitted twice")
        self._states[sample_id] = state
        self._num_in[state] += 1
        self._tokens[sample_id] = 0
        self.num_samples["admitted"] += 1

    def start(self, sample_id: str) -> None:
        """Book the beginning of a request for this sample."""
        self._move(sample_id, "running")

    def stop(self, sample: Sample) -> None:
        """Book the end of a request: the sample is finished, partial, or queued again if it has no token."""
        sample_id, num_tokens = sample.sample_id, sample.num_sampled_tokens
        grown = num_tokens - self._tokens.get(sample_id, 0)
        if grown < 0:
            raise LedgerError(f"sample {sample_id} shrank by {plural(-grown, 'token')}")
        if not isinstance(sample.need, NeedsTokens):
            self._move(sample_id, "finished")
        else:
            self._move(sample_id, "partial" if num_tokens else "queued")
        self._tokens[sample_id] = num_tokens
        self.num_tokens["generated"] += grown
        self._count_given(sample)

    def answer(self, sample: Sample) -> None:
        """Book an answer of the sample's environment: the sample may need tokens again, after the ones it was given."""
        if sample.num_sampled_tokens != self._tokens.get(sample.sample_id):
            raise LedgerError(f"sample {sample.sample_id} was answered, but its earlier tokens have changed")
        if isinstance(sample.need, NeedsTokens):
            self._move(sample.sample_id, "partial" if sample.num_sampled_tokens else "queued")
        self._count_given(sample)

    def restart(self, sample_id: str) -> None:
        """Book an unfinished sample as one that has just been admitted; its tokens are dropped."""
        self.num_tokens["dropped"] += self._tokens[sample_id]
        self.num_given["dropped"] += self._given.pop(sample_id, 0)
        self.num_samples["restarted"] += 1
        self._tokens[sample_id] = 0
        self._num_in[self._states[sample_id]] -= 1
        self._states[sample_id] = "finished"
        self._num_in["finished"] += 1

    def is_running(self, sample_id: str) -> bool:
        """Return whether a request for this sample is in progress."""
        return self._states.get(sample_id) == "running"

    def train(self, sample_id: str) -> None:
        """Book a finished sample as trained; it leaves the buffer."""
        if self._states.get(sample_id) != "finished":
            raise LedgerError(f"sample {sample_id} is {self._states.get(sample_id, 'not here')}, not finished")
        self._leave(sample_id, "trained")

    def drop(self, sample_id: str, reason: str) -> None:
        """Book a sample that leaves untrained, and count the reason."""
        if sample_id not in self._states:
            raise LedgerError(f"sample {sample_id} cannot be dropped ({reason}): it is not here")
        self._leave(sample_id, "dropped")
        self.dropped[reason] += 1

    def counts(self) -> dict[str, int]:
        """Return the number of samples by state; `trained` and `dropped` count since the run began."""
        return {
            **{state: self._num_in[state] for state in _ALLOWED},
            "trained": self.num_samples["trained"],
            "dropped": self.num_samples["dropped"],
        }

    def check(self, buffered: Iterable[Sample]) -> None:
        """Check the accounts against the scheduler's samples and the conservation laws.

        Raises:
            LedgerError: names the first disagreement.
        """
        samples, held = list(buffered), Held()
        ids = {s.sample_id for s in samples}
        if len(ids) != len(samples):
            raise LedgerError("a sample is buffered twice")
        if ids != self._states.keys():
            lost, unknown = sorted(self._states.keys() - ids)[:3], sorted(ids - self._states.keys())[:3]
            raise LedgerError(f"samples lost: {lost}; samples without an entry: {unknown}")
        for sample in samples:
            held.count(sample)
        self.check_changes(samples, held)

    def check_changes(self, changed: Iterable[Sample], held: Held) -> None:
        """Check what has changed since the last check, whose samples and accounts agreed. Only changes cost time.

        Args:
            changed: samples that came or changed, and are still here.
            held: the sums of all samples here.

        Raises:
            LedgerError: names the first disagreement.
        """
        changed = list(changed)
        for sample in changed:
            state = self._states.get(sample.sample_id)
            if state is None or (state == "finished") == isinstance(sample.need, NeedsTokens):
                raise LedgerError(f"sample {sample.sample_id} is {state or 'not here'}, but {sample.need}")
        n = self.num_tokens
        if n["generated"] != n["trained"] + n["dropped"] + held.num_tokens:
            raise LedgerError(
                f"{plural(n['generated'], 'token')} generated, but {n['trained']} trained + {held.num_tokens} buffered "
                f"+ {n['dropped']} dropped"
            )
        g = self.num_given
        if g["given"] != g["trained"] + g["dropped"] + held.num_given:
            raise LedgerError(
                f"{plural(g['given'], 'token')} given by environments, but {g['trained']} trained + "
                f"{held.num_given} buffered + {g['dropped']} dropped"
            )
        s = self.num_samples
        if s["dropped"] != self.dropped.total():
            raise LedgerError(f"{plural(s['dropped'], 'sample')} dropped, but {self.dropped.total()} by reason")
        if self._num_in.total() != len(self._states):
            raise LedgerError(f"{self._num_in.total()} samples have a state, but {len(self._states)} have an entry")
        if s["admitted"] != s["trained"] + s["dropped"] + held.num_samples or held.num_samples != len(self._states):
            raise LedgerError(
                f"{plural(s['admitted'], 'sample')} admitted, but {s['trained']} trained + {held.num_samples} "
                f"buffered + {s['dropped']} dropped; {len(self._states)} have an entry"
            )
        for sample in changed:
            booked = self._tokens.get(sample.sample_id)
            if not self.is_running(sample.sample_id) and booked != sample.num_sampled_tokens:
                raise LedgerError(
                    f"sample {sample.sample_id} has {plural(sample.num_sampled_tokens, 'token')}, not {booked}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value. A running sample is saved as it was before its request, which is sent again."""
        states = {
            i: (state if state != "running" else "partial" if self._tokens[i] else "queued")
            for i, state in self._states.items()
        }
        return {
            "states": states,
            "tokens": dict(self._tokens),
            "num_samples": dict(self.num_samples),
            "num_tokens": dict(self.num_tokens),
            "given": dict(self._given),
            "num_given": dict(self.num_given),
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = dict(state["states"])
        self._num_in = Counter(self._states.values())
        self._tokens = dict(state["tokens"])
        self.num_samples = Counter(state["num_samples"])
        self.num_tokens = Counter(state["num_tokens"])
        self._given = dict(state["given"])
        self.num_given = Counter(state["num_given"])
        self.dropped = Counter(state["dropped"])

    def _count_given(self, sample: Sample) -> None:
        num_given, num_before = sample.num_given_tokens, self._given.get(sample.sample_id, 0)
        if num_given < num_before:
            raise LedgerError(f"sample {sample.sample_id} lost {plural(num_before - num_given, 'given token')}")
        if num_given:
            self._given[sample.sample_id] = num_given
            self.num_given["given"] += num_given - num_before

    def _move(self, sample_id: str, to: SampleState) -> None:
        state = self._states.get(sample_id)
        if state is None or to not in _ALLOWED[state]:
            raise LedgerError(f"sample {sample_id} cannot go from {state or 'nowhere'} to {to}")
        self._states[sample_id] = to
        self._num_in[state] -= 1
        self._num_in[to] += 1

    def _leave(self, sample_id: str, to: Literal["trained", "dropped"]) -> None:
        self._num_in[self._states.pop(sample_id)] -= 1
        self.num_tokens[to] += self._tokens.pop(sample_id)
        if num_given := self._given.pop(sample_id, 0):
            self.num_given[to] += num_given
        self.num_samples[to] += 1
