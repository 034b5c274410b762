"""Evaluation: whole responses of the current weights to evaluation prompts, and their metrics.

Inside a run it happens between a weight push and the next step, so all tokens have one version, in every mode; with
overlap, sampling for training goes on beside it. It does not touch the ledger. The caller judges the responses
afterwards: judging has its own deadlines and says nothing about the engines.
"""

import math
import statistics
from collections.abc import Sequence

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rollout.dispatch import Dispatcher, RolloutStats
from bapo_megatron.types import Prompt, Trajectory

_MAX_ROUNDS = 8


class Evaluator:
    """Sampler of `eval.samples_per_prompt` responses to each prompt, with the same prompts and seeds every time."""

    def __init__(
        self, config: Config, pool: EnginePool, prompts: Sequence[Prompt], stop_token_ids: tuple[int, ...]
    ) -> None:
        self._pool = pool
        self._responses: dict[str, Trajectory] = {}  # by sample, of the evaluation in progress
        self._unfinished_version: int | None = None  # version of its weights
        self._num_answers = 0
        sampling = {name: getattr(config.eval, name) for name in ("temperature", "top_p", "top_k")}
        whole = config.rollout.model_copy(update={**sampling, "tokens_per_round": None})
        self._dispatcher = Dispatcher(whole, pool, stop_token_ids=stop_token_ids, run_seed=config.run.seed)
        self._empty = [
            Trajectory(f"eval-{prompt.prompt_id}.{i}", prompt)
            for prompt in prompts
            for i in range(config.eval.samples_per_prompt)
        ]

        rollout = config.rollout
        self.deadline_s = rollout.request_timeout_s * (rollout.max_retries + 2)
        """Longest time without `progress` in `sample`; after it, something hangs."""
        self.what = (
            f"the engines' {len(self._empty)} responses to {len(prompts)} problems (deadline: {self.deadline_s:g} s, "
            f"rollout.request_timeout_s = {rollout.request_timeout_s:g} for each of rollout.max_retries + 2 tries)"
        )
        """Description used in timeout errors."""

    def progress(self) -> tuple[int, ...]:
        """Return counts that grow meanwhile: answers, and fenced engines."""
        return self._num_answers, self._pool.num_fenced

    async def sample(self, version: int) -> list[Trajectory]:
        """Return whole responses of the weights of `version`, which every live engine holds; -1: its first weights.

        Raises:
            NoEngineLeftError: no engine is left. The next call for this version keeps the answers so far.
            EngineError: responses are aborted again and again.
        """
        self._dispatcher.version = version
        self._pool.expect(version)
        self._dispatcher.stats = RolloutStats()
        if version != self._unfinished_version:
            self._responses = {t.sample_id: t for t in self._empty}
        self._unfinished_version, responses = version, self._responses

        def accept(trajectory: Trajectory) -> None:
            responses[trajectory.sample_id] = trajectory
            self._num_answers += 1

        for _ in range(_MAX_ROUNDS):  # one, unless requests are aborted or engines fail
            unfinished = [t for t in responses.values() if t.finish_reason is None]
            if not unfinished:
                break
            if not self._pool.live():
                raise NoEngineLeftError(f"no rollout engine is left for the evaluation: {self._pool.describe()}")
            await self._dispatcher.grow_together(unfinished, 0, accept)
        else:
            raise EngineError(
                f"responses of the evaluation were aborted {_MAX_ROUNDS} times in a row; something may be aborting "
                "requests"
            )
        self._unfinished_version = None
        return list(responses.values())


def eval_metrics(samples: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float]:
    """Return the mean reward, its standard error over prompts, and the lengths of the responses."""
    by_prompt: dict[int, list[float]] = {}
    for trajectory, reward in zip(samples, rewards, strict=True):
        by_prompt.setdefault(trajectory.prompt.prompt_id, []).append(reward)
    means = [statistics.fmean(rewards) for rewards in by_prompt.values()]
    return {
        "eval/reward": statistics.fmean(means),
        "eval/reward_stderr": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        "eval/best_of_group": statistics.fmean(max(rewards) for rewards in by_prompt.values()),
        "eval/response_tokens_mean": statistics.fmean(t.num_response_tokens for t in samples),
        "eval/truncated_share": sum(t.finish_reason == "length" for t in samples) / len(samples),
        "eval/num_samples": float(len(samples)),
    }
