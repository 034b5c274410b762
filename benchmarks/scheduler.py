"""CPU time of the scheduler per response, with more and more responses active, against one that loops over all of them.

    python -m benchmarks.scheduler [--quick]

The real scheduler, overlapped, on a clock that jumps, with engines that answer when a response's time has come: no
model, no network. Lengths are drawn from a long-tailed distribution. A step trains as many groups in every case: only
the number of active responses differs, and a fifth of these wait for a slot. The other way is
tests/unit/plain_scheduler.py; both must train the same.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError
from bapo_megatron.rewards.pool import Verdict
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from benchmarks.side_by_side import DisagreementError, Rows, Turns, main
from tests.unit.plain_scheduler import make_plain
from tests.unit.test_scheduler import CountingPrompts, run_on_clock

NUM_ACTIVE = (100, 1_000, 10_000)
SAMPLES_PER_PROMPT = 10
PROMPTS_PER_STEP = 5
NUM_ENGINES = 4
TOKENS_PER_S = 2.0
NUM_WARMUP = 10  # steps that are not counted
PLAIN = "loops over all"


class ClockEngine:
    """An engine whose responses grow side by side, all at the same speed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        return [await self._sample(request) for request in requests]

    async def _sample(self, request: GenerateRequest) -> GenerateResult:
        num_tokens = min(32, 1 + int(random.Random(request.seed).lognormvariate(1.0, 0.8)))
        version = self.version
        await asyncio.sleep(num_tokens / TOKENS_PER_S)
        span = VersionSpan(version, 0, num_tokens)
        return GenerateResult(request.rid, (1,) * num_tokens, (-1.0,) * num_tokens, (span,), "stop", 3, 0)

    async def health(self) -> bool:
        return True


async def cpu_s_per_response(num_active: int, num_steps: int, *, is_plain: bool) -> tuple[float, list[str]]:
    """Return the CPU seconds for each trained response once all slots are full, and the ids of those responses."""
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
        driver=JudgeOnce(lambda samples: [Verdict(0.0, None, "", 0.0)] * len(samples)),
        stop_token_ids=(),
        seed=0,
    )
    scheduler = make_plain(scheduler) if is_plain else scheduler
    trained: list[str] = []
    for step in range(NUM_WARMUP + num_steps):
        if step == NUM_WARMUP:
            start_s, num_before = time.process_time(), len(trained)
        groups, _ = await scheduler.take(step, step)
        assert groups is not None, "an engine was lost"
        trained += [sample.sample_id for group in groups for sample in group.samples]
        scheduler.pool.expect(step + 1)
        for engine in engines:
            engine.version = step + 1
    took_s = time.process_time() - start_s
    assert scheduler.ledger.counts()["running"] == config.max_concurrent_requests * NUM_ENGINES, "a slot is free"
    return took_s / (len(trained) - num_before), trained


def rows(quick: bool) -> Rows:
    """Compare the CPU time of a response with a plain scheduler, by the number of those that are active."""
    num_turns, num_steps = (1, 10) if quick else (3, 20)
    ours_s: dict[int, float] = {}
    for num_active in NUM_ACTIVE:
        load_before, amounts = os.getloadavg()[0], {"ours": [], PLAIN: []}
        for _ in range(num_turns):
            found = {}
            for name, taken in amounts.items():
                measuring = cpu_s_per_response(num_active, num_steps, is_plain=name == PLAIN)
                seconds, found[name] = run_on_clock(measuring)
                taken.append(seconds * 1e6)
            if found["ours"] != found[PLAIN]:
                raise DisagreementError(f"with {num_active} active responses, other ones are trained")
        ours_s[num_active] = statistics.median(amounts["ours"])
        yield Turns(amounts, load_before, os.getloadavg()[0]).row(f"{num_active:,} active", PLAIN, unit="CPU us")
    growth = ours_s[NUM_ACTIVE[-1]] / ours_s[NUM_ACTIVE[0]]
    print(f"a response with {NUM_ACTIVE[-1]:,} active takes {growth:.2f} x as long as with {NUM_ACTIVE[0]:,}")


if __name__ == "__main__":
    main(__doc__, rows)
