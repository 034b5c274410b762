"""The ledger: the state of every sample, and proof that no token was lost or counted twice.

    queued -> running -> partial -> running -> ... -> finished -> trained
                                                   (any of them) -> dropped(reason)

The conservation law, checked against the buffers at every step:

    tokens generated = tokens trained + tokens buffered + tokens dropped
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from typing_extensions import TypedDict

from bapo_megatron.types import Count, Trajectory

State = Literal["queued", "running", "partial", "finished"]

_ALLOWED: dict[State, tuple[State, ...]] = {
    "queued": ("running",),
    "running": ("queued", "partial", "finished"),
    "partial": ("running",),
    "finished": (),
}


class LedgerError(RuntimeError):
    """A ledger that does not balance: a bug of this package. The run stops rather than train on a wrong batch."""


class LedgerState(TypedDict):
    """A `Ledger` in a checkpoint."""

    states: dict[str, State]
    tokens: dict[str, Count]
    num_samples: dict[str, Count]
    num_tokens: dict[str, Count]
    dropped: dict[str, Count]


class Ledger:
    """Accounts of one run. Not thread-safe: it belongs to the scheduler.

    A sample that is trained over several epochs counts as trained once.
    """

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._tokens: dict[str, int] = {}  # generated so far, by sample still here
        self.num_samples: Counter[str] = Counter()  # admitted, trained, dropped
        self.num_tokens: Counter[str] = Counter()  # generated, trained, dropped
        self.dropped: Counter[str] = Counter()  # samples by reason

    def admit(self, sample_id: str) -> None:
        """Book a new sample, which waits for its first round."""
        if sample_id in self._states:
            raise LedgerError(f"sample {sample_id} was admitted twice")
        self._states[sample_id] = "queued"
        self._tokens[sample_id] = 0
        self.num_samples["admitted"] += 1

    def start(self, sample_id: str) -> None:
        """Book the beginning of a request for this sample."""
        self._move(sample_id, "running")

    def stop(self, trajectory: Trajectory) -> None:
        """Book the end of a request: the sample is finished, partial, or queued again if it has no token."""
        sample_id, num_tokens = trajectory.sample_id, trajectory.num_sampled_tokens
        grown = num_tokens - self._tokens.get(sample_id, 0)
        if grown < 0:
            raise LedgerError(f"sample {sample_id} shrank by {-grown} tokens")
        if trajectory.finish_reason is not None:
            self._move(sample_id, "finished")
        else:
            self._move(sample_id, "partial" if num_tokens else "queued")
        self._tokens[sample_id] = num_tokens
        self.num_tokens["generated"] += grown

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
        """Return the number of samples by state; `trained` and `dropped` since the run began."""
        now = Counter(self._states.values())
        return {
            **{state: now[state] for state in _ALLOWED},
            "trained": self.num_samples["trained"],
            "dropped": self.num_samples["dropped"],
        }

    def check(self, buffered: Iterable[Trajectory]) -> None:
        """Check the accounts against the scheduler's trajectories and the conservation law.

        Raises:
            LedgerError: with the first disagreement.
        """
        held = list(buffered)
        ids = {t.sample_id for t in held}
        if len(ids) != len(held):
            raise LedgerError("a sample is buffered twice")
        if ids != self._states.keys():
            lost, unknown = sorted(self._states.keys() - ids)[:3], sorted(ids - self._states.keys())[:3]
            raise LedgerError(f"samples lost: {lost}; samples without an entry: {unknown}")
        for t in held:
            if (self._states[t.sample_id] == "finished") != (t.finish_reason is not None):
                raise LedgerError(f"sample {t.sample_id} is {self._states[t.sample_id]}, but ended: {t.finish_reason}")
        num_buffered = sum(t.num_sampled_tokens for t in held)
        n = self.num_tokens
        if n["generated"] != n["trained"] + n["dropped"] + num_buffered:
            raise LedgerError(
                f"{n['generated']} tokens generated, but {n['trained']} trained + {num_buffered} buffered + "
                f"{n['dropped']} dropped"
            )
        s = self.num_samples
        if s["dropped"] != self.dropped.total():
            raise LedgerError(f"{s['dropped']} samples dropped, but {self.dropped.total()} by the reasons")
        if s["admitted"] != s["trained"] + s["dropped"] + len(held):
            raise LedgerError(
                f"{s['admitted']} samples admitted, but {s['trained']} trained + {len(held)} buffered + "
                f"{s['dropped']} dropped"
            )
        for t in held:
            if not self.is_running(t.sample_id) and self._tokens.get(t.sample_id) != t.num_sampled_tokens:
                booked = self._tokens.get(t.sample_id)
                raise LedgerError(f"sample {t.sample_id} has {t.num_sampled_tokens} tokens, not {booked}")

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value. Running samples are saved as before their request, which is sent again."""
        states = {
            i: (state if state != "running" else "partial" if self._tokens[i] else "queued")
            for i, state in self._states.items()
        }
        return {
            "states": states,
            "tokens": dict(self._tokens),
            "num_samples": dict(self.num_samples),
            "num_tokens": dict(self.num_tokens),
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = dict(state["states"])
        self._tokens = dict(state["tokens"])
        self.num_samples = Counter(state["num_samples"])
        self.num_tokens = Counter(state["num_tokens"])
        self.dropped = Counter(state["dropped"])

    def _move(self, sample_id: str, to: State) -> None:
        state = self._states.get(sample_id)
        if state is None or to not in _ALLOWED[state]:
            raise LedgerError(f"sample {sample_id} cannot go from {state or 'nowhere'} to {to}")
        self._states[sample_id] = to

    def _leave(self, sample_id: str, to: Literal["trained", "dropped"]) -> None:
        del self._states[sample_id]
        self.num_tokens[to] += self._tokens.pop(sample_id)
        self.num_samples[to] += 1
