"""Scoring of responses under a deadline, with the judge that the configuration names."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.judges import build_judge
from bapo_megatron.rewards.verdicts import EXACT, JudgeSpec, Verdict, fields_of
from bapo_megatron.rewards.worker_pool import WorkerPool

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.types import Prompt

log = logging.getLogger(__name__)

_MAX_CALLS_NAMED = 64  # in the log: a hostile program can try every number
_NUM_FIRST = 32  # the first verdicts of an attempt (at most one step's) show whether the judge works at all


class RewardScorer:
    """Thread-safe scorer of responses; a response without a verdict within reward.timeout_s scores 0 and is counted.

    Judges that may hang or crash run in processes of their own; a failure costs only the response that caused it.

    Raises:
        UserError: the judge cannot be found or called, or its data set is missing.
    """

    def __init__(self, config: Config) -> None:
        self.deadline_s = 2 * config.reward.timeout_s  # a response is judged twice if its process is lost
        self.num_judged = 0
        self.num_timeouts = 0
        self.num_errors = 0
        self.num_refused = 0  # responses whose program failed after a refused system call
        self.recent_failure: Verdict | None = None
        """The first failure among the verdicts that the latest `metrics` are about."""
        self._first_failure: Verdict | None = None
        self._first_recent_failure: Verdict | None = None  # since the last `metrics`
        self._num_recent_failures = 0
        self._num_first = min(_NUM_FIRST, config.rollout.prompts_per_step * config.rollout.samples_per_prompt)
        self._num_pending = 0
        self._waited_s = 0.0
        self._num_waited = 0
        self._refused_calls: set[str] = set()  # all names so far
        self._lock = threading.Lock()  # guards the counts
        spec = JudgeSpec.of(config)
        self._kind = spec.kind
        is_exact = spec.kind in EXACT
        self._judge = build_judge(spec) if is_exact else None
        self._pool = None if is_exact else WorkerPool(spec, config.reward.concurrency)

    def score(self, items: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """Return the rewards of (prompt, response text without special tokens), in order. Raises like `verdicts`."""
        return [verdict.end.reward for verdict in self.verdicts(items)]

    def verdicts(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
        """Return verdicts, which also say what went wrong while judging.

        Args:
            in_thought: whether each response begins in a thought that the chat template has opened; empty means none.

        Raises:
            UserError: the judge blames the data or the settings rather than the response, or it has failed on every
                response so far.
            WorkersError: no judge process stays alive, or the scorer was closed.
        """
        with self._pending(len(items)):
            fields = _fields(items, in_thought)
            verdicts = self._exact(fields) if self._pool is None else self._pool.judge(fields)
        return self._counted(items, verdicts)

    async def ask(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
        """Return `verdicts` in any event loop."""
        with self._pending(len(items)):
            fields = _fields(items, in_thought)
            verdicts = self._exact(fields) if self._pool is None else await self._pool.verdicts(fields)
        return self._counted(items, verdicts)

    def metrics(self) -> dict[str, float]:
        """Return metrics about judging (`bapo help metrics`); wait_s and failed_share are means since the last call."""
        with self._lock:
            wait_s = self._waited_s / self._num_waited if self._num_waited else 0.0
            failed_share = self._num_recent_failures / self._num_waited if self._num_waited else 0.0
            self._waited_s, self._num_waited, self._num_recent_failures = 0.0, 0, 0
            self.recent_failure, self._first_recent_failure = self._first_recent_failure, None
            return {
                "reward/judged": float(self.num_judged),
                "reward/pending": float(self._num_pending),
                "reward/timeouts": float(self.num_timeouts),
                "reward/errors": float(self.num_errors),
                "reward/failed_share": failed_share,
                "reward/refused_calls": float(self.num_refused),
                "reward/wait_s": wait_s,
            }

    def close(self) -> None:
        """End the judge processes. Safe to call twice."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _pending(self, num_items: int) -> Iterator[None]:
        with self._lock:
            self._num_pending += num_items
        try:
            yield
        finally:
            with self._lock:
                self._num_pending -= num_items

    def _exact(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        assert self._judge is not None
        return [Verdict.of(self._judge.reply(self._judge(one))) for one in fields]

    def _counted(self, items: Sequence[tuple[Prompt, str]], verdicts: list[Verdict]) -> list[Verdict]:
        for (prompt, _), verdict in zip(items, verdicts, strict=True):
            self._count(prompt, verdict)
        self._refuse_a_judge_that_only_fails()
        return verdicts

    def _count(self, prompt: Prompt, verdict: Verdict) -> None:
        problem, message = verdict.end.problem, verdict.end.message
        with self._lock:
            self.num_judged += 1
            self.num_timeouts += problem == "timeout"
            self.num_errors += problem == "error"
            self.num_refused += bool(verdict.refused_calls)
            new_calls = [name for name in verdict.refused_calls if name not in self._refused_calls]
            new_calls = new_calls[: _MAX_CALLS_NAMED - len(self._refused_calls)]
            self._refused_calls.update(new_calls)
            self._waited_s += verdict.waited_s
            self._num_waited += 1
            is_first = problem is not None and self._first_failure is None
            if problem is not None:
                self._num_recent_failures += 1
                self._first_recent_failure = self._first_recent_failure or verdict
                self._first_failure = self._first_failure or verdict
        if new_calls:
            log.warning(
                "reward: the sandbox refused %s to the program of a response to prompt %d, which failed; if honest "
                "programs need a call, add it to reward.allowed_calls (each call is named once)",
                ", ".join(new_calls),
                prompt.prompt_id,
            )
        if problem is None:
            return
        log.warning("reward: %s on a response to prompt %d: %s", problem, prompt.prompt_id, message)
        if is_first and verdict.traceback:
            log.warning("%s", verdict.traceback)

    def _refuse_a_judge_that_only_fails(self) -> None:
        with self._lock:
            first, num_judged = self._first_failure, self.num_judged
            num_failed = self.num_timeouts + self.num_errors
        if first is not None and num_failed == num_judged >= self._num_first:
            raise UserError(
                f"the judge (reward.kind = {self._kind!r}) failed on all of the first {num_judged} responses, so "
                f"nothing can be learned. The first failure:\n{(first.traceback or first.end.message).rstrip()}"
            )


def _fields(items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool]) -> list[dict[str, Any]]:
    begins = in_thought or [False] * len(items)
    return [fields_of(*item, in_thought=inside) for item, inside in zip(items, begins, strict=True)]
