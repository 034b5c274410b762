"""One scheduler with three settings that decide how a step gets its groups.

    tokens_per_round   a response grows by at most this many tokens per turn (partial rollout)
    abort_tail         once a step has its groups, the unfinished responses are aborted, and resumed later
    overlap            sampling goes on while the trainer trains, within `max_staleness`

Without the last two a step samples in *rounds*: one piece of every unfinished response, all engines together. The
samples then depend only on the seed and the weights, so that an interrupted run can be repeated exactly. With either of
them a `Stream` keeps every slot busy. Both keep untaken responses for the next step.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.rollout.book import Keep, Prompts, RolloutBook
from bapo_megatron.rollout.dispatch import Dispatcher, RolloutStats
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.rollout.stream import Stream
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Group, Trajectory

_MAX_IDLE_ROUNDS = 3  # rounds in a row without a single token before the engines are declared broken
_MAX_DROPPED_STEPS = 20  # as many groups as this many steps train may be dropped in a row
_POLL_S = 0.2

Score = Callable[[Sequence[Trajectory]], Sequence[float]]


class Scheduler:
    """Owner of every sample between prompt and batch. Runs on one event loop; not thread-safe."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        pool: EnginePool,
        prompts: Prompts,
        score: Score,
        stop_token_ids: tuple[int, ...],
        seed: int,
        updates_per_step: int = 1,
        keep: Keep = lambda group: True,
        streams: Sequence[TokenStream] = (),
    ) -> None:
        """`score` may block (it is called in threads) and returns one reward per finished trajectory.

        `streams`: of models and plugins, that the engines return.
        """
        self.config = config
        self.pool = pool
        bound = StalenessBound(config.max_staleness, updates_per_step, config.prompts_per_step)
        self.book = RolloutBook(config, prompts, bound, keep, streams)
        self._score = score
        self._dispatcher = Dispatcher(config, pool, stop_token_ids=stop_token_ids, run_seed=seed, streams=streams)
        self._stream = Stream(config, self.book, self._dispatcher, self._judge)
        self._updates_per_step = updates_per_step
        self._num_dropped_before: Counter[str] = Counter()  # groups by reason, until the last stats
        self._num_dropped_in_a_row = 0

    @property
    def ledger(self) -> Ledger:
        return self.book.ledger

    async def take(self, step: int, version: int) -> tuple[list[Group] | None, RolloutStats]:
        """Return the judged groups of one step; every live engine holds weights of `version`.

        None instead of groups asks for a push of the same weights: all live engines are gone, but one is back. The work
        until then is in the stats of the call that returns the groups.

        Raises:
            EngineError: no engine is left, none comes back in time, or they return no tokens at all.
        """
        self.pool.expect(version)
        self._dispatcher.version = version
        self.book.drop_stale(version)
        is_streaming = self.config.overlap or self.config.abort_tail
        groups = await (self._take_from_stream(step, version) if is_streaming else self._take_rounds(step, version))
        return groups, RolloutStats() if groups is None else self._take_stats()

    async def close(self) -> None:
        """Stop sampling; responses keep their tokens."""
        await self._stream.halt()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON, with arrays, that a resumed run loses nothing with."""
        return self.book.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.book.load_state_dict(state)

    # rounds

    async def _take_rounds(self, step: int, version: int) -> list[Group] | None:
        num_idle = 0
        while True:
            await self._judge_complete()
            if (groups := self.book.choose(version)) is not None:
                return groups
            if not self.pool.live():
                await self.pool.until_one_is_back(self.config.startup_limit_s)
                return None
            self.book.admit(version, version)
            num_idle = 0 if await self._run_round(step) else num_idle + 1
            if num_idle >= _MAX_IDLE_ROUNDS:
                raise EngineError(
                    f"{num_idle} rounds in a row returned no token from {', '.join(e.url for e in self.pool.live())}; "
                    "something may be aborting requests there, or the context is too short"
                )

    async def _run_round(self, step: int) -> bool:
        """Grow every unfinished response by one piece. Return whether it gave a token or fenced an engine."""
        engines, num_before = self.pool.live(), self.ledger.num_tokens["generated"]
        unfinished = self.book.unfinished()
        for trajectory in unfinished:
            self.book.start(trajectory, self._dispatcher.version)
        try:
            await self._dispatcher.grow_together(unfinished, step, self.book.grow)
        finally:
            for trajectory in unfinished:
                self.book.release(trajectory.sample_id)
        self._dispatcher.stats.num_rounds += 1
        return self.ledger.num_tokens["generated"] > num_before or not all(map(self.pool.is_live, engines))

    async def _judge_complete(self) -> None:
        """Judge all complete groups at once; settle them in the order of their prompts, not of the verdicts."""
        groups = self.book.complete()
        rewards = await asyncio.gather(*(self._rewards(group) for group in groups))
        for group, values in zip(groups, rewards, strict=True):
            self._settle(group, values)

    # streaming

    async def _take_from_stream(self, step: int, version: int) -> list[Group] | None:
        self._stream.start(step, version)
        while (groups := self.book.choose(version)) is None:
            if not self.pool.live():
                await self.pool.until_one_is_back(self.config.startup_limit_s)
                return None
            await self._stream.wait(_POLL_S)
        if self.config.overlap:
            self._stream.next_version = version + self._updates_per_step
        else:
            await self._stream.halt()
        return groups

    async def _judge(self, group: Group) -> None:
        self._settle(group, await self._rewards(group))

    # both

    def _take_stats(self) -> RolloutStats:
        stats, self._dispatcher.stats = self._dispatcher.stats, RolloutStats()
        dropped = self.book.num_dropped - self._num_dropped_before
        self._num_dropped_before = self.book.num_dropped.copy()
        stats.num_stale_groups, stats.num_dropped_groups = dropped["stale"], dropped["keep_group"]
        stats.num_fenced = self.pool.num_fenced
        return stats

    async def _rewards(self, group: Group) -> Sequence[float]:
        return await asyncio.to_thread(self._score, group.trajectories)

    def _settle(self, group: Group, rewards: Sequence[float]) -> None:
        self._dispatcher.stats.rewards += rewards
        is_kept = self.book.settle(group, rewards, self._dispatcher.version)
        self._num_dropped_in_a_row = 0 if is_kept else self._num_dropped_in_a_row + 1
        if self._num_dropped_in_a_row >= _MAX_DROPPED_STEPS * self.config.prompts_per_step:
            raise UserError(
                f"{self._num_dropped_in_a_row} groups in a row were dropped (keep_group): the prompts are far too easy "
                'or too hard for this policy; choose others, or set rollout.keep_group="all"'
            )
