"""Evaluation: whole responses of the current weights to evaluation prompts, and their metrics.

Inside a run it happens between a weight push and the next step, so all tokens have one version, in every mode; with
overlap, sampling for training goes on beside it. It does not touch the ledger. The caller judges the responses
afterwards: judging has its own deadlines and says nothing about the engines.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence

from bapo_megatron.config.schema import Config, EvalSet
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rollout.dispatch import Dispatcher, RolloutStats
from bapo_megatron.types import Prompt, Trajectory

_MAX_ROUNDS = 8


class _SetEvaluator:
    """Sampler of the responses to one set's prompts, within an evaluation of several."""

    def __init__(
        self, config: Config, pool: EnginePool, of: EvalSet, prompts: Sequence[Prompt], stop_token_ids: tuple[int, ...]
    ) -> None:
        limit = of.max_response_tokens or config.rollout.max_response_tokens
        sampling = {name: getattr(of, name) for name in ("temperature", "top_p", "top_k")}
        whole = config.rollout.model_copy(update={**sampling, "max_response_tokens": limit, "tokens_per_round": None})
        self._dispatcher = Dispatcher(whole, pool, stop_token_ids=stop_token_ids, run_seed=config.run.seed)
        prefix = f"eval-{of.name}-" if of.name else "eval-"
        self._empty = [
            Trajectory.of(f"{prefix}{prompt.prompt_id}.{i}", prompt)
            for prompt in prompts
            for i in range(of.samples_per_prompt)
        ]
        self.responses: dict[str, Trajectory] = {}  # by sample, of the evaluation in progress

    def begin(self, version: int, *, anew: bool) -> None:
        """Sample with weights of `version` from now on, and forget the answers so far if `anew`."""
        self._dispatcher.version = version
        self._dispatcher.stats = RolloutStats()
        if anew:
            self.responses = {t.sample_id: t for t in self._empty}

    @property
    def num_responses(self) -> int:
        return len(self._empty)

    @property
    def unfinished(self) -> list[Trajectory]:
        return [t for t in self.responses.values() if t.finish_reason is None]

    async def grow(self, answered: Callable[[], None]) -> None:
        """Ask the live engines once for every unfinished response; report each answer."""

        def accept(trajectory: Trajectory) -> None:
            self.responses[trajectory.sample_id] = trajectory
            answered()

        await self._dispatcher.grow_together(self.unfinished, 0, accept)


class Evaluator:
    """Sampler of the responses to some sets of prompts, with the same prompts and seeds every time.

    All sets are asked at once: engines that are done with one go on with the others.
    """

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        sets: Sequence[tuple[EvalSet, Sequence[Prompt]]],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._pool = pool
        self._sets = {of.name: _SetEvaluator(config, pool, of, prompts, stop_token_ids) for of, prompts in sets}
        self._unfinished_version: int | None = None  # version of the weights of the evaluation in progress
        self._num_answers = 0
        num_responses = sum(one.num_responses for one in self._sets.values())
        num_prompts = sum(len(prompts) for _, prompts in sets)

        rollout = config.rollout
        self.deadline_s = rollout.request_timeout_s * (rollout.max_retries + 2)
        """Longest time without `progress` in `sample`; after it, something hangs."""
        self.what = (
            f"the engines' {num_responses} responses to {num_prompts} problems (deadline: {self.deadline_s:g} s, "
            f"rollout.request_timeout_s = {rollout.request_timeout_s:g} for each of rollout.max_retries + 2 tries)"
        )
        """Description used in timeout errors."""

    def progress(self) -> tuple[int, ...]:
        """Return counts that grow meanwhile: answers, and fenced engines."""
        return self._num_answers, self._pool.num_fenced

    async def sample(self, version: int) -> dict[str, list[Trajectory]]:
        """Return whole responses of the weights of `version`, which every live engine holds, by the name of their set.

        A version of -1 means the engines' first weights.

        Raises:
            NoEngineLeftError: no engine is left. The next call for this version keeps the answers so far.
            EngineError: responses are aborted again and again.
        """
        self._pool.expect(version)
        for one in self._sets.values():
            one.begin(version, anew=version != self._unfinished_version)
        self._unfinished_version = version
        for _ in range(_MAX_ROUNDS):  # one, unless requests are aborted or engines fail
            unfinished = [one for one in self._sets.values() if one.unfinished]
            if not unfinished:
                break
            if not self._pool.live():
                raise NoEngineLeftError(f"no rollout engine is left for the evaluation: {self._pool.describe()}")
            outcomes = await asyncio.gather(*(one.grow(self._count) for one in unfinished), return_exceptions=True)
            for failure in filter(None, outcomes):
                raise failure
        else:
            raise EngineError(
                f"responses of the evaluation were aborted {_MAX_ROUNDS} times in a row; something may be aborting "
                "requests"
            )
        self._unfinished_version = None
        return {name: list(one.responses.values()) for name, one in self._sets.items()}

    def _count(self) -> None:
        self._num_answers += 1


def eval_metrics(samples: Sequence[Trajectory], rewards: Sequence[float], name: str = "") -> dict[str, float]:
    """Return mean reward, its standard error over prompts, and the responses' lengths, for the set of this name."""
    by_prompt: dict[int, list[float]] = {}
    for trajectory, reward in zip(samples, rewards, strict=True):
        by_prompt.setdefault(trajectory.prompt.prompt_id, []).append(reward)
    means = [statistics.fmean(rewards) for rewards in by_prompt.values()]
    prefix = f"eval/{name}/" if name else "eval/"
    return {
        f"{prefix}reward": statistics.fmean(means),
        f"{prefix}reward_stderr": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        f"{prefix}best_of_group": statistics.fmean(max(rewards) for rewards in by_prompt.values()),
        f"{prefix}response_tokens_mean": statistics.fmean(t.num_sampled_tokens for t in samples),
        f"{prefix}truncated_share": sum(t.finish_reason == "length" for t in samples) / len(samples),
        f"{prefix}num_samples": float(len(samples)),
    }
