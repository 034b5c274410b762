"""Evaluation inside a run: the current weights on prompts of their own, judged like training samples.

It happens between a weight push and the next step, so all tokens are of one version, in every mode: with overlap,
sampling for training goes on beside it. Nothing of it enters the ledger.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rollout.dispatch import Dispatcher
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.rollout.scheduler import Score
from bapo_megatron.types import Prompt, Trajectory

_MAX_ROUNDS = 8


class Evaluator:
    """Samples `eval.samples_per_prompt` responses to each prompt, the same prompts and seeds every time."""

    def __init__(
        self, config: Config, pool: EnginePool, prompts: Sequence[Prompt], score: Score, stop_token_ids: tuple[int, ...]
    ) -> None:
        """`score` may block: it is called in a thread."""
        self._pool = pool
        self._score = score
        self.num_answers = 0  # a sign of progress
        self._responses: dict[str, Trajectory] = {}  # by sample, of the evaluation under way
        self._unfinished_version: int | None = None  # its weights
        self._startup_timeout_s = config.rollout.startup_timeout_s
        whole = config.rollout.model_copy(update={"temperature": config.eval.temperature, "tokens_per_round": None})
        self._dispatcher = Dispatcher(whole, pool, stop_token_ids=stop_token_ids, run_seed=config.run.seed)
        self._empty = [
            Trajectory(f"eval-{prompt.prompt_id}.{i}", prompt)
            for prompt in prompts
            for i in range(config.eval.samples_per_prompt)
        ]

    @property
    def num_samples(self) -> int:
        """Responses that are judged, at once."""
        return len(self._empty)

    async def run(self, version: int) -> dict[str, float] | None:
        """Metrics of the weights of `version`, which every live engine holds.

        None where all live engines are gone but one is back: push these weights again, and the evaluation goes on.

        Raises:
            EngineError: no engine comes back in time, or responses are aborted time and again.
        """
        try:
            return eval_metrics(await self.sample(version))
        except NoEngineLeftError:
            await self._pool.until_one_is_back(self._startup_timeout_s)
            return None

    async def sample(self, version: int) -> list[Trajectory]:
        """Judged responses of the weights of `version`; -1 for those that the engines started with.

        Raises:
            NoEngineLeftError: nobody is left to ask. The next call for this version keeps what was answered.
            EngineError: responses are aborted time and again.
        """
        self._dispatcher.version = self._dispatcher.newest_version = version
        self._dispatcher.take_stats()
        if version != self._unfinished_version:
            self._responses = {t.sample_id: t for t in self._empty}
        self._unfinished_version = version
        responses = self._responses

        def accept(trajectory: Trajectory) -> None:
            responses[trajectory.sample_id] = trajectory
            self.num_answers += 1

        for _ in range(_MAX_ROUNDS):  # one, unless requests are aborted or engines fail
            unfinished = [t for t in responses.values() if t.finish_reason is None]
            if not unfinished:
                break
            if not self._pool.live():
                raise NoEngineLeftError(f"no rollout engine is left for the evaluation: {self._pool.describe()}")
            await self._dispatcher.grow_together(unfinished, 0, accept)
        else:
            raise EngineError(f"responses of the evaluation were aborted {_MAX_ROUNDS} times in a row; by whom?")
        samples, self._unfinished_version = list(responses.values()), None
        rewards = await asyncio.to_thread(self._score, samples)
        return [replace(t, reward=float(r)) for t, r in zip(samples, rewards, strict=True)]


def eval_metrics(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward with its standard error over prompts, and what the responses look like."""
    by_prompt: dict[int, list[float]] = {}
    for trajectory in samples:
        assert trajectory.reward is not None, "judged"
        by_prompt.setdefault(trajectory.prompt.prompt_id, []).append(trajectory.reward)
    means = [statistics.fmean(rewards) for rewards in by_prompt.values()]
    return {
        "eval/reward": statistics.fmean(means),
        "eval/reward_stderr": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        "eval/best_of_group": statistics.fmean(max(rewards) for rewards in by_prompt.values()),
        "eval/response_tokens_mean": statistics.fmean(t.num_response_tokens for t in samples),
        "eval/truncated_share": sum(t.finish_reason == "length" for t in samples) / len(samples),
        "eval/num_samples": float(len(samples)),
    }
