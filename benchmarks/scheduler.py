"""The scheduler's CPU time per response, with more and more active responses, against one that loops over all of them.

    python -m benchmarks.scheduler [--quick]

The real scheduler runs overlapped on a clock that jumps, with engines that answer when a response's time has come;
there is no model and no network. Lengths are drawn from a long-tailed distribution. A step trains equally many groups
in every case: only the number of active responses differs, and a fifth of these wait for a slot. The other way is
tests/unit/plain_scheduler.py; both must train the same responses.

Ours is measured once as many responses are trained as are active. The other way would take minutes to get there, so it
is measured at the beginning. Python's garbage collector visits every live object, so its share is shown separately.
"""

import asyncio
import gc
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.runtime import starting
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.types import Ended
from benchmarks.side_by_side import DisagreementError, Rows, Turns, main
from tests.unit.plain_scheduler import make_plain
from tests.unit.test_scheduler import CountingPrompts

NUM_ACTIVE = (100, 1_000, 10_000)
SAMPLES_PER_PROMPT = 10
PROMPTS_PER_STEP = 5
NUM_ENGINES = 4
TOKENS_PER_S = 2.0
NUM_WARMUP = 10  # at least this many steps are not counted
NUM_STEPS = 200
NUM_PLAIN_STEPS = 10
PLAIN = "loops over all"


class ClockEngine:
    """An engine whose responses grow concurrently, at about the same speed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        return [await self._sample(request) for request in requests]

    async def _sample(self, request: GenerateRequest) -> GenerateResult:
        rng, version = random.Random(request.seed), self.version
        num_tokens = min(32, 1 + int(rng.lognormvariate(1.0, 0.8)))
        await asyncio.sleep(num_tokens * rng.uniform(0.8, 1.2) / TOKENS_PER_S)  # otherwise all answer in lockstep
        span = VersionSpan(version, 0, num_tokens)
        return GenerateResult(
            request.rid,
            np.array((1,) * num_tokens, np.int64),
            np.array((-1.0,) * num_tokens, np.float32),
            (span,),
            "stop",
            3,
            0,
        )

    async def health(self) -> bool:
        return True


@dataclass(slots=True)
class Cost:
    """The cost of some steps."""

    cpu_s: float  # CPU seconds per response that ended
    collector_s: float  # the part of them spent in Python's garbage collector
    trained: list[str]  # ids of all responses that were trained, in order


@contextmanager
def collector_time() -> Iterator[list[float]]:
    """Yield a list to which each garbage collection adds its CPU seconds."""
    found: list[float] = []
    start_s = 0.0

    def note(phase: str, info: object) -> None:
        nonlocal start_s
        if phase == "start":
            start_s = time.process_time()
        else:
            found.append(time.process_time() - start_s)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


async def measure(num_active: int, num_warmup: int, num_steps: int, *, is_plain: bool) -> Cost:
    """Return the cost of the steps after the first `num_warmup`."""
    num_groups = num_active // SAMPLES_PER_PROMPT
    config = RolloutConfig(
        prompts_per_step=PROMPTS_PER_STEP,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        groups_in_flight=num_groups,
        max_concurrent_requests=num_active * 4 // 5 // NUM_ENGINES,
        overlap=True,
        max_staleness=8 + 8 * num_groups // PROMPTS_PER_STEP,
    )
    engines = [ClockEngine(f"clock://{i}") for i in range(NUM_ENGINES)]
    scheduler = Scheduler(
        config,
        pool=EnginePool(engines),  # type: ignore[arg-type]
        prompts=CountingPrompts(),
        driver=JudgeOnce(lambda samples: [Verdict(Ended(reward=0.0))] * len(samples)),
        stop_token_ids=(),
        seed=0,
    )
    scheduler = make_plain(scheduler) if is_plain else scheduler
    trained: list[str] = []

    async def take(step: int) -> None:
        groups, _ = await scheduler.take(step, step)
        assert groups is not None, "an engine was lost"
        trained.extend(sample.sample_id for group in groups for sample in group.samples)
        scheduler.pool.expect(step + 1)
        for engine in engines:
            engine.version = step + 1

    def num_ended() -> int:
        counts = scheduler.ledger.counts()
        return counts["finished"] + counts["trained"]

    for step in range(num_warmup):
        await take(step)
    num_before, start_s = num_ended(), time.process_time()
    with collector_time() as collected_s:
        for step in range(num_warmup, num_warmup + num_steps):
            await take(step)
    took_s, num = time.process_time() - start_s, num_ended() - num_before
    assert scheduler.ledger.counts()["running"] == config.max_concurrent_requests * NUM_ENGINES, "a slot is free"
    return Cost(took_s / num, sum(collected_s) / num, trained)


def rows(quick: bool) -> Rows:
    """Compare the CPU time per response with a plain scheduler's, for several numbers of active responses."""
    ours: dict[int, list[Cost]] = {num_active: [] for num_active in NUM_ACTIVE}
    amounts: dict[int, dict[str, list[float]]] = {n: {"ours": [], PLAIN: []} for n in NUM_ACTIVE}
    with starting():  # sets up the garbage collector as on a rank
        pass
    load_before = os.getloadavg()[0]
    for _ in range(1 if quick else 5):
        for num_active, costs in ours.items():  # take turns, because the machine's speed changes within minutes
            num_warmup = max(NUM_WARMUP, num_active // (PROMPTS_PER_STEP * SAMPLES_PER_PROMPT))
            costs.append(run_on_clock(measure(num_active, num_warmup, NUM_STEPS, is_plain=False)))
            plain = run_on_clock(measure(num_active, NUM_WARMUP, NUM_PLAIN_STEPS, is_plain=True))
            amounts[num_active]["ours"].append(costs[-1].cpu_s * 1e6)
            amounts[num_active][PLAIN].append(plain.cpu_s * 1e6)
            if costs[-1].trained[: len(plain.trained)] != plain.trained:
                raise DisagreementError(f"with {num_active} active responses, the two schedulers train different ones")
    for num_active, of_case in amounts.items():
        yield Turns(of_case, load_before, os.getloadavg()[0]).row(f"{num_active:,} active", PLAIN, unit="CPU us")
    for what, costs_s in {
        "": {n: [c.cpu_s for c in costs] for n, costs in ours.items()},
        ", without the garbage collector": {n: [c.cpu_s - c.collector_s for c in costs] for n, costs in ours.items()},
    }.items():
        figures = ", ".join(f"{statistics.median(each) * 1e6:.0f}" for each in costs_s.values())
        pairs = zip(costs_s[NUM_ACTIVE[0]], costs_s[NUM_ACTIVE[-1]], strict=True)
        growth = sorted(last / first for first, last in pairs)
        print(
            f"CPU us of a response{what}: {figures}; the last takes {statistics.median(growth):.2f} x as long as the "
            f"first ({growth[0]:.2f} to {growth[-1]:.2f} over the turns)"
        )


if __name__ == "__main__":
    main(__doc__, rows)
