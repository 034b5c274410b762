"""One scheduler with three settings that decide how a step gets its groups.

    tokens_per_round   a response grows by at most this many tokens per turn (partial rollout)
    abort_tail         once a step has its groups, unfinished responses are aborted, and resumed later
    overlap            sampling continues while the trainer trains, within `max_staleness`

Without the last two, a step samples in *rounds*: the driver answers all samples that wait for it, then each sample that
needs tokens grows by one piece, all engines together. The samples then depend only on the seed and the weights, so that
an interrupted run can be repeated exactly. With either one, `ContinuousSampling` keeps every slot busy. In both cases
untaken samples are kept for the next step.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, NoGroupKeptError, UserError, plural
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.book import Keep, Prompts, RolloutBook
from bapo_megatron.rollout.continuous import ContinuousSampling
from bapo_megatron.rollout.dispatch import Dispatcher, RolloutStats
from bapo_megatron.rollout.drivers import Driver, advanced
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Ended, Group, NeedsEnvironment, Sample

_MAX_IDLE_ROUNDS = 3  # rounds in a row without a single token before the engines are declared broken
_MAX_DROPPED_STEPS = 20  # as many groups in a row may be dropped as this many steps train
_POLL_S = 0.2


class Scheduler:
    """Owner of every sample between prompt and batch. Runs on one event loop; not thread-safe."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        pool: EnginePool,
        prompts: Prompts,
        driver: Driver,
        stop_token_ids: tuple[int, ...],
        seed: int,
        updates_per_step: int = 1,
        keep: Keep = lambda group: True,
        streams: Sequence[TokenStream] = (),
        annotators: Annotators | None = None,
        max_turn_tokens: int | None = None,
    ) -> None:
        """`streams`: streams of models and plugins that the engines return."""
        self.annotators = annotators or Annotators()
        self.config = config
        self.pool = pool
        self.driver = driver
        self.num_answers = 0  # answers of the driver, since this attempt began
        bound = StalenessBound(config.max_staleness, updates_per_step, config.prompts_per_step)
        self.book = RolloutBook(
            config,
            prompts,
            bound,
            keep,
            (*streams, *self.annotators.streams),
            by_group=driver.by_group,
            first_need=driver.first_need,
        )
        self.dispatcher = Dispatcher(
            config,
            pool,
            stop_token_ids=stop_token_ids,
            run_seed=seed,
            streams=streams,
            max_turn_tokens=max_turn_tokens,
        )
        self.sampling = ContinuousSampling(config, self.book, self.dispatcher, self.ask, self.book_answers)
        self._updates_per_step = updates_per_step
        self._num_dropped_before: Counter[str] = Counter()  # groups by reason, until the last stats
        self._num_dropped_in_a_row = 0

    @property
    def ledger(self) -> Ledger:
        return self.book.ledger

    async def take(self, step: int, version: int) -> tuple[list[Group] | None, RolloutStats]:
        """Return the judged groups of one step; every live engine holds weights of `version`.

        None instead of groups asks for a push of the same weights: all live engines are gone, but one is back. The call
        that returns the groups has the work until then in its stats.

        Raises:
            EngineError: no engine is left, none comes back in time, or they return no tokens at all.
        """
        self.pool.expect(version)
        self.dispatcher.version = version
        self.book.drop_stale(version)
        is_streaming = self.config.overlap or self.config.abort_tail
        groups = await (self._take_from_stream(step, version) if is_streaming else self._take_rounds(step, version))
        return groups, RolloutStats() if groups is None else self._take_stats()

    async def close(self) -> None:
        """Stop sampling. Samples keep their tokens; those waiting for their environment will ask it again."""
        await self.sampling.close()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON, with arrays, from which a run resumes without losing anything."""
        return self.book.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.book.load_state_dict(state)

    # rounds

    async def _take_rounds(self, step: int, version: int) -> list[Group] | None:
        num_idle = 0
        while True:
            if await self._answer_all():
                num_idle = 0  # a step may wait for environments alone
            if (groups := self.book.choose(version)) is not None:
                return groups
            if not self.pool.live():
                await self.pool.until_one_is_back()
                return None
            if any(isinstance(s.need, NeedsEnvironment) for s in self.book.admit(version, version)):
                continue  # their programs begin them
            num_idle = 0 if await self._run_round(step) else num_idle + 1
            if num_idle >= _MAX_IDLE_ROUNDS:
                raise EngineError(
                    f"{num_idle} rounds in a row returned no token from {', '.join(e.url for e in self.pool.live())}; "
                    "something may be aborting requests there, or the context is too short"
                )

    async def _run_round(self, step: int) -> bool:
        """Grow every sample that needs tokens by one piece. Return whether a token came or an engine was fenced."""
        engines, num_before = self.pool.live(), self.ledger.num_tokens["generated"]
        growing = self.book.growing()
        for sample in growing:
            self.book.start(sample, self.dispatcher.version)
        try:
            await self.dispatcher.grow_together(growing, step, self.book.grow)
        finally:
            for sample in growing:
                self.book.release(sample.sample_id)
        self.dispatcher.stats.num_rounds += 1
        return self.ledger.num_tokens["generated"] > num_before or not all(map(self.pool.is_live, engines))

    async def _answer_all(self) -> bool:
        """Ask the driver about all waiting samples, and book its answers in the order of their prompts, whichever
        arrives first. Return whether there were any."""
        answers = await asyncio.gather(*(self.ask(samples) for samples in self.book.waiting()))
        for samples in answers:
            self.book_answers(samples)
        return bool(answers)

    # streaming

    async def _take_from_stream(self, step: int, version: int) -> list[Group] | None:
        self.sampling.start(step, version)
        while (groups := self.book.choose(version)) is None:
            if not self.pool.live():
                await self.pool.until_one_is_back()
                return None
            await self.sampling.wait(_POLL_S)
        if self.config.overlap:
            self.sampling.next_version = version + self._updates_per_step
        else:
            await self.sampling.halt()
        return groups

    # both

    def _take_stats(self) -> RolloutStats:
        stats, self.dispatcher.stats = self.dispatcher.stats, RolloutStats()
        dropped = self.book.num_dropped - self._num_dropped_before
        self._num_dropped_before = self.book.num_dropped.copy()
        stats.num_stale_groups, stats.num_dropped_groups = dropped["stale"], dropped["keep_group"]
        stats.num_failed_groups = dropped["failed"]
        stats.num_fenced = self.pool.num_fenced
        return stats

    async def ask(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the driver's answers to samples of one group, annotated where a sample has ended."""
        answers = await advanced(self.driver, samples, self.config.max_response_tokens)
        answers = await self.annotators.annotated(answers)
        self.num_answers += len(answers)  # progress, while others wait for a process
        return answers

    def book_answers(self, samples: Sequence[Sample]) -> None:
        """Book a driver's answers to samples of one group, and settle the group if it is now complete."""
        for sample in samples:
            self.book.answer(sample)
        if (group := self.book.group(samples[0].prompt.prompt_id)).is_complete:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        self.dispatcher.stats.rewards += group.rewards
        is_kept = self.book.settle(group, self.dispatcher.version)
        self._num_dropped_in_a_row = 0 if is_kept else self._num_dropped_in_a_row + 1
        if self._num_dropped_in_a_row >= _MAX_DROPPED_STEPS * self.config.prompts_per_step:
            if not group.has_baseline:
                failed = [s.need.message for s in group.samples if isinstance(s.need, Ended) and s.reward is None]
                raise UserError(
                    f"{self._num_dropped_in_a_row} groups in a row were dropped, the last one because its environment "
                    f"failed on {len(failed)} of its {plural(len(group.samples), 'sample')}: {failed[0]}"
                )
            raise NoGroupKeptError(
                f"{self._num_dropped_in_a_row} groups in a row were dropped (keep_group): the prompts are far too easy "
                'or too hard for this policy; choose others, or set rollout.keep_group="all"'
            )
