"""Evaluation: complete samples of the current weights for the evaluation prompts, and their metrics.

Inside a run it happens between a weight push and the next step, so all tokens have one version, in every mode; with
overlap, sampling for training continues meanwhile. It does not touch the ledger. Environments answer while it samples.
Judges of whole groups are asked afterwards: judging has its own deadlines and says nothing about the engines.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from bapo_megatron.config.schema import Config, EvalSet
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, NoEngineLeftError, plural
from bapo_megatron.rollout.dispatch import Dispatcher, RolloutStats
from bapo_megatron.rollout.drivers import Driver, advanced
from bapo_megatron.types import NeedsEnvironment, NeedsTokens, Prompt, Sample

_MAX_ROUNDS = 8  # rounds of requests that bring no token


class _SetEvaluator:
    """Sampler of one set's prompts, within an evaluation of several."""

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        of: EvalSet,
        prompts: Sequence[Prompt],
        stop_token_ids: tuple[int, ...],
        driver: Driver,
    ) -> None:
        limit = of.max_response_tokens or config.rollout.max_response_tokens
        self._limit, self._driver = limit, driver
        sampling = {name: getattr(of, name) for name in ("temperature", "top_p", "top_k")}
        whole = config.rollout.model_copy(update={**sampling, "max_response_tokens": limit, "tokens_per_round": None})
        self._dispatcher = Dispatcher(
            whole,
            pool,
            stop_token_ids=stop_token_ids,
            run_seed=config.run.seed,
            max_turn_tokens=config.environment.turn_limit,
        )
        prefix = f"eval-{of.name}-" if of.name else "eval-"
        self._empty = [
            Sample.of(f"{prefix}{prompt.prompt_id}.{i}", prompt, need=driver.first_need)
            for prompt in prompts
            for i in range(of.samples_per_prompt)
        ]
        self.samples: dict[str, Sample] = {}  # by id, for the evaluation in progress

    def begin(self, version: int, *, anew: bool) -> None:
        """Sample with weights of `version` from now on; if `anew`, discard the answers so far."""
        self._dispatcher.version = version
        self._dispatcher.stats = RolloutStats()
        if anew:
            self.samples = {s.sample_id: s for s in self._empty}

    @property
    def num_samples(self) -> int:
        return len(self._empty)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since `begin`."""
        return self._dispatcher.stats.num_tokens

    @property
    def growing(self) -> list[Sample]:
        return [s for s in self.samples.values() if isinstance(s.need, NeedsTokens)]

    @property
    def waiting(self) -> list[Sample]:
        """The samples that wait for an environment."""
        waiting = [s for s in self.samples.values() if isinstance(s.need, NeedsEnvironment)]
        return [] if self._driver.by_group else waiting

    async def grow(self, answered: Callable[[], None]) -> None:
        """Ask the live engines once for every sample that needs tokens; report each answer."""

        def accept(sample: Sample) -> None:
            self.samples[sample.sample_id] = sample
            answered()

        await self._dispatcher.grow_together(self.growing, 0, accept)

    async def answer(self, answered: Callable[[], None]) -> None:
        """Ask the environments of all waiting samples; report each answer."""

        async def ask(sample: Sample) -> None:
            (self.samples[sample.sample_id],) = await advanced(self._driver, [sample], self._limit)
            answered()

        await asyncio.gather(*map(ask, self.waiting))

    async def judged(self) -> list[Sample]:
        """Return all samples, ended."""
        samples = list(self.samples.values())
        return await advanced(self._driver, samples, self._limit) if self._driver.by_group else samples


class Evaluator:
    """Sampler of several sets of prompts, with the same prompts and seeds every time.

    All sets are asked at the same time: engines that finish one set continue with the others.
    """

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        sets: Sequence[tuple[EvalSet, Sequence[Prompt]]],
        stop_token_ids: tuple[int, ...],
        drivers: Mapping[str, Driver],
    ) -> None:
        """`drivers`: by name of the set; sets may share one."""
        self.pool = pool
        self._sets = {
            of.name: _SetEvaluator(config, pool, of, prompts, stop_token_ids, drivers[of.name]) for of, prompts in sets
        }
        self._unfinished_version: int | None = None  # version of the weights of the evaluation in progress
        self._num_answers = 0
        num_samples = sum(one.num_samples for one in self._sets.values())
        num_prompts = sum(len(prompts) for _, prompts in sets)

        rollout = config.rollout
        answer_s = max((driver.deadline_s for driver in drivers.values() if not driver.by_group), default=0.0)
        self.deadline_s = max(rollout.request_timeout_s * (rollout.max_retries + 2), answer_s)
        """The longest time without `progress` in `sample`; after it, something hangs."""
        self.what = (
            f"the engines' {plural(num_samples, 'response')} to {plural(num_prompts, 'problem')} "
            f"(deadline: {self.deadline_s:g} s, rollout.request_timeout_s = {rollout.request_timeout_s:g} for each of "
            "rollout.max_retries + 2 tries)"
        )
        """Description used in timeout errors."""

    def progress(self) -> tuple[int, ...]:
        """Return counts that grow during the evaluation: answers, and fenced engines."""
        return self._num_answers, self.pool.num_fenced

    async def sample(self, version: int) -> None:
        """Sample with the weights of `version`, which every live engine holds, until only judges remain to be asked.

        Version -1 means the engines' initial weights.

        Raises:
            NoEngineLeftError: no engine is left. The next call for this version keeps the answers so far.
            EngineError: responses are aborted repeatedly.
            UserError: a driver returned neither tokens nor an end.
        """
        self.pool.expect(version)
        for one in self._sets.values():
            one.begin(version, anew=version != self._unfinished_version)
        self._unfinished_version = version
        num_rounds = 0  # without a token: requests were aborted, or engines failed
        while growing := [one for one in self._sets.values() if one.growing or one.waiting]:
            if any(one.waiting for one in growing):
                await asyncio.gather(*(one.answer(self._count) for one in growing))
                continue
            if not self.pool.live():
                raise NoEngineLeftError(f"no rollout engine is left for the evaluation: {self.pool.describe()}")
            if num_rounds == _MAX_ROUNDS:
                raise EngineError(
                    f"responses of the evaluation were aborted {_MAX_ROUNDS} times in a row; something may be aborting "
                    "requests"
                )
            num_before = sum(one.num_tokens for one in growing)
            outcomes = await asyncio.gather(*(one.grow(self._count) for one in growing), return_exceptions=True)
            for failure in filter(None, outcomes):
                raise failure
            num_rounds = num_rounds + 1 if sum(one.num_tokens for one in growing) == num_before else 0
        self._unfinished_version = None

    async def judged(self) -> dict[str, list[Sample]]:
        """Return the ended samples of the last `sample`, by the name of their set. It has no deadline of its own."""
        return {name: await one.judged() for name, one in self._sets.items()}

    def _count(self) -> None:
        self._num_answers += 1


def eval_metrics(samples: Sequence[Sample], name: str = "") -> dict[str, float]:
    """Return mean reward, its standard error over prompts, and the samples' lengths, for the set of this name.

    Invalid samples are left out. If none is valid, the only metric is their number, 0.
    """
    by_prompt: dict[int, list[float]] = {}
    prefix = f"eval/{name}/" if name else "eval/"
    samples = [s for s in samples if s.reward is not None]
    if not samples:
        return {f"{prefix}num_samples": 0.0}
    for sample in samples:
        if sample.reward is not None:
            by_prompt.setdefault(sample.prompt.prompt_id, []).append(sample.reward)
    means = [statistics.fmean(rewards) for rewards in by_prompt.values()]
    return {
        f"{prefix}reward": statistics.fmean(means),
        f"{prefix}reward_stderr": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        f"{prefix}best_of_group": statistics.fmean(max(rewards) for rewards in by_prompt.values()),
        f"{prefix}response_tokens_mean": statistics.fmean(s.num_sampled_tokens for s in samples),
        f"{prefix}truncated_share": sum(s.finish_reason == "length" for s in samples) / len(samples),
        f"{prefix}num_samples": float(len(samples)),
    }
