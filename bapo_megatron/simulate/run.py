"""The simulated training loop: batch, training, push, and what it measures."""

import asyncio
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.simulate.server import SimulatedServer
from bapo_megatron.simulate.world import Answers, Prompts, RankZero, World, standard_normal
from bapo_megatron.types import Group


@dataclass(frozen=True, slots=True)
class Simulated:
    """Results of the counted steps, in simulated seconds and tokens."""

    steps_s: tuple[float, ...]
    trainer_idle: float  # share of the time
    servers_idle: float
    servers_prefilling: float
    trained_tokens: int  # sampled ones
    generated_tokens: int
    num_responses: int  # trained
    ages: dict[int, float]  # share of trained tokens by age, in optimizer updates, averaged over a step's updates
    first_ages: dict[int, float]  # share of trained responses by the age of their first token, in steps
    rank_zero: dict[str, float]  # shares of one core's time
    num_fenced: int  # since the beginning, as are the seconds of faults
    num_dropped: dict[str, int]  # groups by reason

    @property
    def seconds(self) -> float:
        return sum(self.steps_s)


def simulate(world: World, num_steps: int, num_warmup: int) -> Simulated:
    """Run a number of steps after some that are not counted.

    Raises:
        EngineError: all servers are down for too long.
    """
    with _without_warnings():
        return run_on_clock(_Simulation(world.in_units()).run(num_steps, num_warmup))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the pool's warnings about simulated servers out of the terminal."""
    log = logging.getLogger("bapo_megatron")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class _Simulation:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rank_zero = RankZero(world)
        self._servers = [SimulatedServer(f"simulated://{i}", world, self._rank_zero) for i in range(world.num_servers)]
        self._pool = EnginePool(self._servers, world.return_limit_s)  # type: ignore[arg-type]
        self._scheduler = Scheduler(
            world.rollout,
            pool=self._pool,
            prompts=Prompts(world.prompt_tokens),
            driver=Answers(world),
            stop_token_ids=(),
            seed=world.seed,
            keep=self._keep,
            updates_per_step=world.updates_per_step,
        )
        self._version = 0

    async def run(self, num_steps: int, num_warmup: int) -> Simulated:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._pool.watch())]
        for number, at_s, for_s in self._world.down:
            server = self._servers[number]
            if at_s == 0:  # late: a run begins without it
                server.die()
                self._pool.fence(server, "it is late")  # type: ignore[arg-type]
            tasks.append(loop.create_task(self._fail(server, at_s, for_s)))
        try:
            return await self._steps(num_steps, num_warmup)
        finally:
            for task in tasks:
                task.cancel()
            await self._scheduler.close()

    async def _steps(self, num_steps: int, num_warmup: int) -> Simulated:
        loop, world, scheduler = asyncio.get_running_loop(), self._world, self._scheduler
        steps_s: list[float] = []
        ages, first_ages = defaultdict[int, float](float), defaultdict[int, float](float)
        trained_s, before, dropped_before = 0.0, self._totals(), dict(scheduler.book.num_dropped)
        for step in range(num_warmup + num_steps):
            if step == num_warmup:
                steps_s, trained_s, before, dropped_before = [], 0.0, self._totals(), dict(scheduler.book.num_dropped)
                ages.clear()
                first_ages.clear()
            began_s = loop.time()
            groups = await self._take(step)
            train_s = world.train_s(self._count(groups, ages, first_ages) * world.unit)
            trained_s += train_s
            if world.shares_gpus:
                self._pause()
            await asyncio.sleep(train_s + world.moves_s)
            self._version += world.updates_per_step
            await self._push()
            steps_s.append(loop.time() - began_s)
        counted = {name: total - before.get(name, 0.0) for name, total in self._totals().items()}
        total_s, num_tokens, num_responses = sum(steps_s), sum(ages.values()), sum(first_ages.values())
        return Simulated(
            steps_s=tuple(steps_s),
            trainer_idle=1 - trained_s / total_s,
            servers_idle=1 - counted["busy"] / total_s / world.num_servers,
            servers_prefilling=counted["prefilled"] / total_s / world.num_servers,
            trained_tokens=round(num_tokens * world.unit),
            generated_tokens=round(counted["generated"] * world.unit),
            num_responses=round(num_responses),
            ages={age: ages[age] / num_tokens for age in sorted(ages)},
            first_ages={age: first_ages[age] / num_responses for age in sorted(first_ages)},
            rank_zero={name: counted[f"rank 0 {name}"] / total_s for name in self._rank_zero.busy_s},
            num_fenced=self._pool.num_fenced,
            num_dropped={
                reason: num - dropped_before.get(reason, 0) for reason, num in scheduler.book.num_dropped.items()
            },
        )

    async def _take(self, step: int) -> list[Group]:
        while True:
            groups, _ = await self._scheduler.take(step, self._version)
            if groups is not None:
                return groups
            await self._push()  # all servers were lost, and one is back without weights

    def _count(self, groups: list[Group], ages: defaultdict[int, float], first_ages: defaultdict[int, float]) -> int:
        """Count ages as the updates of this step see them; return the number of simulated tokens."""
        updates, num_tokens = self._world.updates_per_step, 0
        for sample in (s for group in groups for s in group.samples):
            segments = sample.sampled_segments
            for origin, segment in segments:
                num_tokens += segment.num_tokens
                for update in range(updates):
                    ages[self._version + update - origin.version] += segment.num_tokens / updates
            first_ages[(self._version - segments[0][0].version) // updates] += 1
        return num_tokens

    def _pause(self) -> None:
        for server in self._servers:
            if server.is_up:
                server.pause()

    async def _push(self) -> None:
        """Push the weights to the live servers, and to those that are back."""
        self._pool.expect(self._version)
        if self._world.ends_requests:
            await self._scheduler.sampling.pause()
        members = [*self._pool.live(), *self._pool.back()]
        self._pause()
        await asyncio.sleep(self._world.push_s)
        for server in self._servers:
            if server.is_up and server in members:
                server.resume(self._version)
                if not self._pool.is_live(server):  # type: ignore[arg-type]
                    self._pool.admit(server)  # type: ignore[arg-type]

    async def _fail(self, server: SimulatedServer, at_s: float, for_s: float) -> None:
        await asyncio.sleep(at_s)
        if at_s:
            server.die()
        await asyncio.sleep(for_s)
        server.restart()

    def _keep(self, group: Group) -> bool:
        share = self._world.kept_share
        draw = standard_normal(self._world.seed, "keep", group.prompt.prompt_id)
        return share >= 1 or statistics.NormalDist().cdf(draw) < share

    def _totals(self) -> dict[str, float]:
        """Return what is counted since the beginning."""
        for server in self._servers:
            server.count()
        return {
            "busy": sum(server.busy_s for server in self._servers),
            "prefilled": sum(server.prefilled_s for server in self._servers),
            "generated": self._scheduler.ledger.num_tokens["generated"],
            **{f"rank 0 {name}": seconds for name, seconds in self._rank_zero.busy_s.items()},
        }
