"""Simulated steps against measured ones, with costs measured in the same run.

    python -m benchmarks.simulated [--turns N] [--steps N]

The measured side is rollout.py with a constant training time: a real engine process, scheduler and weight channel, with
imposed lengths. First the costs of decode steps, prefills, calls, requests, aborts, replies and pushes are measured.
The simulation gets these costs and the same lengths, and runs as many steps as the measured side has run.

Each turn of a mode follows a synchronous turn. All costs are scaled by one factor, with which the simulation of that
synchronous turn takes as long as it took: other work on the machine changes its speed within seconds. The ratios are
simulated / measured; their medians should be within 15 % on a quiet machine. The synchronous mode's ratio is without
the factor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.simulate.run import Simulated, simulate
from bapo_megatron.simulate.world import RANK_ZERO_US, World
from bapo_megatron.types import Ended
from benchmarks.rollout import (
    MODES,
    SYNCHRONOUS,
    TIMEOUT_S,
    VOCAB_SIZE,
    Bench,
    Measured,
    ModeRun,
    PlannedEngine,
    RandomPrompts,
    constant,
    engine_process,
    random_tokens,
    save_model,
)
from benchmarks.rollout_bound import CALIBRATION_TOKENS, StepCost, Workload
from benchmarks.side_by_side import middle_half

WORKLOAD = Workload(prompts_per_step=4, max_response_tokens=128, median_tokens=16.0)
NUM_WARMUP = 2  # steps before the first turn
TRAIN_S = 0.1  # about half of a synchronous rollout
NUM_METERS = 4
NUM_REPEATS = 4  # for each measurement


@dataclass(frozen=True)
class Costs:
    """Seconds by the clock."""

    step: StepCost
    prefill: float  # a token
    call: float  # with nothing else to do; next to decoding it takes no time of the engine's
    request: float
    abort: float  # one of many
    reply: float
    push: float


REST = tuple(one.name for one in fields(Costs) if one.name != "step")


class Meter:
    """Measures the costs of an engine and of rank 0, with prompts that the engine has not seen."""

    def __init__(self, bench: Bench, url: str) -> None:
        self._bench = bench
        self._seed = 1_000_000
        self._engine = HttpEngine(url, request_timeout_s=TIMEOUT_S, vocab_size=VOCAB_SIZE)
        self._short = replace(bench.workload, max_response_tokens=1)
        self._planned = PlannedEngine(url, self._short)
        self._scheduler = Scheduler(
            rollout_config(SYNCHRONOUS, self._short),
            pool=EnginePool([self._planned]),
            prompts=RandomPrompts(self._short),
            driver=JudgeOnce(lambda samples: [Verdict(Ended(reward=0.0))] * len(samples)),
            stop_token_ids=(),
            seed=1,
        )
        self._step = 0

    def _take_s(self) -> float:
        """Return the seconds in which a step of one token a response is taken."""
        began_s = time.perf_counter()
        for _ in range(NUM_REPEATS):
            self._bench.loop.run(self._scheduler.take(self._step, self._step), TIMEOUT_S)
        return (time.perf_counter() - began_s) / NUM_REPEATS

    def costs(self) -> Costs:
        """Measure all costs; the engine has weights of a new version afterwards."""
        w, loop = self._bench.workload, self._bench.loop
        began_s = time.perf_counter()
        for _ in range(NUM_REPEATS):
            self._step += 1
            self._bench.push(self._step)
        push = (time.perf_counter() - began_s) / NUM_REPEATS
        step, prefill, call, request = loop.run(self._of_engine(w), 4 * TIMEOUT_S)
        abort = loop.run(self._abort_s(w), TIMEOUT_S)
        taking = self._take_s()
        known = call + w.slots * request + step(w.slots, w.prompt_tokens)
        known += w.prompts_per_step * w.prompt_tokens * prefill
        reply = max(0.0, taking - known) / w.slots
        return Costs(step, prefill, call, request, max(0.0, abort - reply), reply, push)

    def close(self) -> None:
        self._bench.loop.run(self._engine.close(), TIMEOUT_S)
        self._bench.loop.run(self._planned.close(), TIMEOUT_S)

    async def _abort_s(self, w: Workload) -> float:
        """Return the seconds of an abort, when all running responses are aborted together."""
        aborting_s = 0.0
        for _ in range(NUM_REPEATS):
            self._seed += w.slots
            seeds, longest = range(self._seed, self._seed + w.slots), w.max_response_tokens
            requests = [
                GenerateRequest(f"abort-{i}", random_tokens(w.prompt_tokens, i), longest, 1.0, (), seed=i)
                for i in seeds
            ]
            calls = [asyncio.create_task(self._engine.generate_many([request])) for request in requests]
            while (await self._engine.load())[1] < w.slots:
                assert not any(call.done() for call in calls), "a response ended before it was aborted"
            start_s = time.perf_counter()
            await asyncio.gather(*(self._engine.abort(request.rid) for request in requests), *calls)
            aborting_s += time.perf_counter() - start_s
        return aborting_s / NUM_REPEATS / w.slots

    async def _of_engine(self, w: Workload) -> tuple[StepCost, float, float, float]:
        """Return the seconds of a decode step, a token's prefill, a call and a request."""
        rows, contexts = [1, w.slots // 2, w.slots], [w.prompt_tokens, w.max_response_tokens]

        async def mean_s(num_rows: int, context: int, num_tokens: int) -> float:
            found = []
            for _ in range(NUM_REPEATS):
                self._seed += num_rows
                requests = [
                    GenerateRequest(f"cost-{i}", random_tokens(context, self._seed + i), num_tokens, 1.0, (), seed=i)
                    for i in range(num_rows)
                ]
                start_s = time.perf_counter()
                await self._engine.generate_many(requests)
                found.append(time.perf_counter() - start_s)
            return statistics.fmean(found)

        many, small, large, n = 1 + CALIBRATION_TOKENS, *contexts, w.slots
        one = {(num, c): await mean_s(num, c, 1) for num in rows for c in contexts}
        full = {(num, c): await mean_s(num, c, many) for num in rows for c in contexts}
        steps = [[max(1e-5, full[num, c] - one[num, c]) / CALIBRATION_TOKENS for c in contexts] for num in rows]
        step = StepCost(rows, contexts, steps)
        prefill = max(0.0, (one[n, large] - one[n, small]) / (n * (large - small)))
        of_request = (one[n, small] - one[1, small] - step(n, small) + step(1, small)) / (n - 1)
        request = max(0.0, of_request - prefill * small)
        call = max(0.0, one[1, small] - step(1, small) - prefill * small - request)
        return step, prefill, call, request


def mean_costs(measured: Sequence[Costs]) -> Costs:
    seconds = np.mean([one.step.seconds for one in measured], axis=0)
    rest = {name: statistics.fmean(getattr(one, name) for one in measured) for name in REST}
    return Costs(replace(measured[0].step, seconds=seconds.tolist()), **rest)


def scaled(costs: Costs, factor: float) -> Costs:
    seconds = (factor * np.array(costs.step.seconds)).tolist()
    return Costs(replace(costs.step, seconds=seconds), **{name: factor * getattr(costs, name) for name in REST})


def rollout_config(mode: str, w: Workload) -> RolloutConfig:
    return RolloutConfig(
        prompts_per_step=w.prompts_per_step,
        samples_per_prompt=w.samples_per_prompt,
        max_response_tokens=w.max_response_tokens,
        max_concurrent_requests=w.slots,
        request_timeout_s=TIMEOUT_S,
        **MODES[mode],
    )


def simulated(mode: str, w: Workload, costs: Costs, train_s: float, num_before: int, num_steps: int) -> Simulated:
    """Simulate some steps after those that were measured before."""
    rollout = rollout_config(mode, w)
    world = World(
        rollout,
        num_servers=1,
        step_s=lambda num, context: costs.step(num, int(context)),
        lengths=w.length,
        train_s=partial(constant, train_s),
        push_s=costs.push,
        prompt_tokens=w.prompt_tokens,
        max_running=w.slots,
        pads=True,
        prefill_s=costs.prefill,
        pass_s=costs.step(1, w.prompt_tokens),
        call_s=0.0 if rollout.overlap or rollout.abort_tail else costs.call,
        request_s=costs.request,
        abort_s=costs.abort,
        token_us=RANK_ZERO_US,
        reply_us={"reply": 1e6 * costs.reply},
    )
    return simulate(world, num_steps, num_before)


def main() -> None:
    """Print each turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES}
    ages: dict[str, tuple[list[int], list[float]]] = {mode: ([], []) for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(Path(folder), WORKLOAD.max_context)
        with engine_process(Path(folder), WORKLOAD) as (url, pid):
            bench = Bench(PlannedEngine(url, WORKLOAD), WORKLOAD, pid, weights)
            runs = {mode: ModeRun(mode, bench) for mode in MODES}
            for run in runs.values():
                run.turn(0, num_warmup=NUM_WARMUP, train_s=lambda waited_s: 0.0)
            meter = Meter(bench, url)
            costs = mean_costs([meter.costs() for _ in range(NUM_METERS)])
            print(f"{WORKLOAD.slots} rows: {1000 * costs.step(WORKLOAD.slots, 64):.2f} ms a decode step; in ms:")
            print(", ".join(f"{name} {1000 * getattr(costs, name):.3f}" for name in REST), flush=True)
            num_run = dict.fromkeys(MODES, NUM_WARMUP)

            def take_turn(mode: str) -> tuple[Measured, Callable[[Costs], Simulated]]:
                found = runs[mode].turn(options.steps, train_s=partial(constant, TRAIN_S))
                num_before = num_run[mode] + 1  # the turn's first step is not counted
                num_run[mode] = num_before + options.steps
                return found, lambda costs: simulated(mode, WORKLOAD, costs, TRAIN_S, num_before, options.steps)

            for turn in range(options.turns):
                print(f"turn {turn}, load {os.getloadavg()[0]:.1f}", flush=True)
                for mode in (mode for mode in MODES if mode != SYNCHRONOUS):
                    found, guess = take_turn(SYNCHRONOUS)
                    train_s, guessed_s = TRAIN_S * options.steps, guess(costs).seconds
                    factor = (found.wall_s - train_s) / (guessed_s - train_s)
                    ratios[SYNCHRONOUS].append(guessed_s / found.wall_s)
                    now = scaled(costs, factor)
                    found, guess = take_turn(mode)
                    result = guess(now)
                    ratios[mode].append(result.seconds / found.wall_s)
                    ages[mode][0].extend(found.ages)
                    ages[mode][1].append(sum(age * share for age, share in result.ages.items()))
                    print(
                        f"   {mode:<12} measured {found.wall_s / options.steps:.3f} s, simulated "
                        f"{result.seconds / options.steps:.3f}; ratio {ratios[mode][-1]:.2f}; factor {factor:.2f}",
                        flush=True,
                    )
            meter.close()
            bench.close()
    for mode, of_mode in ratios.items():
        low, middle, high = middle_half(of_mode)
        text = f"{mode:<12} median {middle:.2f}, middle half {low:.2f} to {high:.2f}"
        real, guessed = ages[mode]
        if real:
            text += f"; mean age measured {statistics.fmean(real):.2f}, simulated {statistics.fmean(guessed):.2f}"
        print(text)


if __name__ == "__main__":
    main()
