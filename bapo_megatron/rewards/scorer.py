"""Scores responses under a deadline with the judge that the configuration names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bapo_megatron.rewards.judges import EXACT, JudgeSpec, as_reward, build_judge, fields_of
from bapo_megatron.rewards.pool import Verdict, WorkerPool

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.types import Prompt

log = logging.getLogger(__name__)


class RewardScorer:
    """Thread-safe scorer of responses; a response without a verdict within reward.timeout_s scores 0 and is counted.

    Judges that may hang or crash run in processes of their own, at the cost of the response to blame only.

    Raises:
        UserError: the judge cannot be found or called, or its data set is missing.
    """

    def __init__(self, config: Config) -> None:
        self.num_judged = 0
        self.num_timeouts = 0
        self.num_errors = 0
        self._num_pending = 0
        self._waited_s = 0.0
        self._num_waited = 0
        self._lock = threading.Lock()  # guards the counts
        spec = JudgeSpec.of(config)
        is_exact = spec.kind in EXACT
        self._judge = build_judge(spec) if is_exact else None
        self._pool = None if is_exact else WorkerPool(spec, config.reward.concurrency)

    def score(self, items: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Return rewards of (prompt, response text without special tokens), in order. Raises like `verdicts`."""
        return [verdict.reward for verdict in self.verdicts(items)]

    def verdicts(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Return verdicts, which also say what went wrong in judging.

        Raises:
            UserError: the judge says that the data or the settings are wrong, not the response.
            RuntimeError: no judge process stays alive, or the scorer was closed.
        """
        fields = [fields_of(prompt, response) for prompt, response in items]
        with self._lock:
            self._num_pending += len(items)
        try:
            if self._judge is not None:
                verdicts = [Verdict(as_reward(self._judge(f)), None, "", 0.0) for f in fields]
            else:
                assert self._pool is not None
                verdicts = self._pool.judge(fields)
        finally:
            with self._lock:
                self._num_pending -= len(items)
        for (prompt, _), verdict in zip(items, verdicts, strict=True):
            self._count(prompt, verdict)
        return verdicts

    def metrics(self) -> dict[str, float]:
        """Return metrics of judging (docs/metrics.md); `reward/wait_s` is a mean since the last call."""
        with self._lock:
            wait_s = self._waited_s / self._num_waited if self._num_waited else 0.0
            self._waited_s, self._num_waited = 0.0, 0
            return {
                "reward/judged": float(self.num_judged),
                "reward/pending": float(self._num_pending),
                "reward/timeouts": float(self.num_timeouts),
                "reward/errors": float(self.num_errors),
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

    def _count(self, prompt: Prompt, verdict: Verdict) -> None:
        with self._lock:
            self.num_judged += 1
            self.num_timeouts += verdict.problem == "timeout"
            self.num_errors += verdict.problem == "error"
            self._waited_s += verdict.waited_s
            self._num_waited += 1
        if verdict.problem is not None:
            log.warning("reward: %s on a response to prompt %d: %s", verdict.problem, prompt.prompt_id, verdict.message)
