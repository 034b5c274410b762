"""Synchronous, partial, over-sampled and overlapped rollouts with one engine, side by side, and their bounds.

    python -m benchmarks.rollout [--quick]

The embedded engine process, the scheduler and the weight channel are real. Three things are simulated: response lengths
are drawn from a long-tailed (log-normal) distribution, the same for every mode, and imposed on the engine's answers;
prompts are random tokens of one length; and an optimizer step is a wait that leaves the CPU to the engine, as a trainer
on other devices would. It is followed by a real push of weights.

rollout_bound.py derives the bound next to each row. Training takes half as long as the synchronous rollout. Modes take
turns, and each is compared with the synchronous turn before it. The rows give the time of a step; the tables of all
turns are printed. The tokens of a few steps vary with their random lengths and the buffer; the number of steps does
not. Every trained response must have the length that the workload gives it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.config.schema import RolloutConfig, SyncConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.drivers import Driver, JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.types import Ended, Prompt
from benchmarks.rollout_bound import CALIBRATION_TOKENS, Bound, StepCost, Workload, bound
from benchmarks.side_by_side import Rows, Turns, main
from tests.engine_processes import started_engines

TIMEOUT_S = 300.0
VOCAB_SIZE = 128
NUM_CALIBRATIONS = 3
NUM_BOUND_STEPS = 32  # number of steps from whose lengths the bound is computed
MAX_STALENESS = 8  # for the overlapped mode, in steps: a response of full length takes several of them


class PlannedEngine(HttpEngine):
    """The real engine, except that a response ends ("stop") at the length that the workload gives it."""

    def __init__(self, url: str, workload: Workload) -> None:
        super().__init__(url, request_timeout_s=TIMEOUT_S, vocab_size=VOCAB_SIZE)
        self._workload = workload

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        left = [self._tokens_left(request) for request in requests]
        capped = [replace(r, max_new_tokens=min(r.max_new_tokens, n)) for r, n in zip(requests, left, strict=True)]
        results = await super().generate_many(capped)
        return [_stopped(result, n) for result, n in zip(results, left, strict=True)]

    def _tokens_left(self, request: GenerateRequest) -> int:
        sample_id = request.rid.split("-")[0]
        return self._workload.length(sample_id) - (len(request.token_ids) - self._workload.prompt_tokens)


def _stopped(result: GenerateResult | EngineError, tokens_left: int) -> GenerateResult | EngineError:
    if isinstance(result, EngineError) or len(result.token_ids) < tokens_left:
        return result
    return replace(result, finish_reason="stop")


class RandomPrompts:
    """An endless stream of prompts of one length."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._next_id = 0

    def next(self) -> Prompt:
        prompt_id, self._next_id = self._next_id, self._next_id + 1
        return Prompt(prompt_id, random_tokens(self._workload.prompt_tokens, seed=prompt_id), "", "", "random")

    def state_dict(self) -> dict[str, Any]:
        return {"next_id": self._next_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_id = state["next_id"]


def random_tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(VOCAB_SIZE, size=num_tokens).tolist())


def save_model(folder: Path, max_context: int) -> dict[str, Tensor]:
    """Save a random policy of the demo model's size that never ends a response; return its weights."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


@contextmanager
def engine_process(folder: Path, workload: Workload) -> Iterator[tuple[str, int]]:
    """Start an embedded engine with one CPU thread; yield its URL and process id."""
    arguments = ("--max-context", str(workload.max_context), "--max-running", str(workload.slots))
    with started_engines(folder, 1, *arguments, model=folder) as (engine,):
        yield engine.url, engine.process.pid


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process's threads have used, with a resolution of 1 ns (Linux, proc(5))."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def measure_cost(engine: HttpEngine, pid: int, workload: Workload) -> StepCost:
    """Time decode steps alone: a call for many tokens minus a call for one, which has the same prefill."""
    rows = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < workload.slots] + [workload.slots]
    contexts = [workload.prompt_tokens, workload.max_response_tokens]

    async def call_s(num_rows: int, context: int, num_tokens: int) -> float:
        requests = [
            GenerateRequest(f"cost-{i}", random_tokens(context, seed=i), num_tokens, 1.0, (), seed=i)
            for i in range(num_rows)
        ]
        start = cpu_s(pid)
        await engine.generate_many(requests)
        return cpu_s(pid) - start

    async def step_s(num_rows: int, context: int) -> float:
        one = [await call_s(num_rows, context, 1) for _ in range(NUM_CALIBRATIONS)]
        many = [await call_s(num_rows, context, 1 + CALIBRATION_TOKENS) for _ in range(NUM_CALIBRATIONS)]
        return (min(many) - min(one)) / CALIBRATION_TOKENS

    return StepCost(rows, contexts, [[await step_s(n, c) for c in contexts] for n in rows])


SYNCHRONOUS = "synchronous"
MODES: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    "partial": {"tokens_per_round": 32},
    "over-sampled": {"abort_tail": True},
    "overlapped": {"overlap": True, "max_staleness": MAX_STALENESS},
}


@dataclass(slots=True)
class Measured:
    """Some steps of one mode in steady state, in seconds of wall time and response tokens."""

    num_steps: int = 0
    wall_s: float = 0.0
    idle_s: float = 0.0  # how long the trainer waited for its batch
    train_s: float = 0.0
    engine_cpu_s: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    ages: list[int] = field(default_factory=list)  # ages of trained tokens, in optimizer updates


class ModeRun:
    """One mode's training loop. It takes turns with the other modes, and each turn continues the last one."""

    def __init__(self, mode: str, bench: Bench, driver: Driver | None = None) -> None:
        w = bench.workload
        config = RolloutConfig(
            prompts_per_step=w.prompts_per_step,
            samples_per_prompt=w.samples_per_prompt,
            max_response_tokens=w.max_response_tokens,
            max_concurrent_requests=w.slots,
            request_timeout_s=TIMEOUT_S,
            **MODES[mode],
        )
        self._scheduler = Scheduler(
            config,
            pool=EnginePool([bench.engine]),
            prompts=RandomPrompts(w),
            driver=driver or JudgeOnce(lambda samples: [Verdict(Ended(reward=0.0))] * len(samples)),
            stop_token_ids=(),
            seed=w.seed,
        )
        self._bench = bench
        self._version = 0

    def turn(self, num_steps: int, *, train_s: Callable[[float], float], num_warmup: int = 1) -> Measured:
        """Run steps (batch, optimizer step, push); do not count the first ones, which refill the slots.

        `train_s` maps the duration of a batch to the duration of its optimizer step.
        """
        bench, tokens = self._bench, self._scheduler.ledger.num_tokens
        bench.push(self._version)
        for step in range(num_warmup + num_steps):
            if step in (0, num_warmup):
                measured, start_s = Measured(), time.perf_counter()
                tokens_before, cpu_before_s = tokens["generated"], cpu_s(bench.pid)
            asked_s = time.perf_counter()
            groups, _ = bench.loop.run(self._scheduler.take(self._version, self._version), TIMEOUT_S)
            assert groups is not None, "the engine was lost"
            waited_s = time.perf_counter() - asked_s
            measured.idle_s += waited_s
            measured.train_s += train_s(waited_s)
            for sample in (s for group in groups for s in group.samples):
                assert len(sample.versions) == bench.workload.length(sample.sample_id), "another length"
            measured.ages += [self._version - v for g in groups for s in g.samples for v in s.versions]
            time.sleep(train_s(waited_s))
            self._version += 1
            self._scheduler.pool.expect(self._version)
            bench.push(self._version)
        measured.num_steps, measured.wall_s = num_steps, time.perf_counter() - start_s
        measured.generated_tokens = tokens["generated"] - tokens_before
        measured.engine_cpu_s = cpu_s(bench.pid) - cpu_before_s
        measured.trained_tokens = len(measured.ages)
        bench.loop.run(self._scheduler.close(), TIMEOUT_S)
        return measured


class Bench:
    """An engine, its request loop and its weight channel, which all modes use in turns."""

    def __init__(self, engine: PlannedEngine, workload: Workload, pid: int, weights: dict[str, Tensor]) -> None:
        self.workload = workload
        self.pid = pid
        self.loop = LoopThread()
        self.engine = engine
        self._weights = weights
        self._channel = BroadcastChannel(EnginePool([self.engine]), SyncConfig(timeout_s=TIMEOUT_S), self.loop.submit)
        self._channel.connect([TensorSpec.of(name, tensor) for name, tensor in self._weights.items()])

    def cost(self) -> StepCost:
        plain = HttpEngine(self.engine.url, request_timeout_s=TIMEOUT_S)

        async def measure() -> StepCost:
            try:
                return await measure_cost(plain, self.pid, self.workload)
            finally:
                await plain.close()

        return self.loop.run(measure(), 4 * TIMEOUT_S)

    def push(self, version: int) -> None:
        self._channel.push(iter(self._weights.items()), version)

    def close(self) -> None:
        self._channel.close()
        self.loop.run(self.engine.close(), TIMEOUT_S)
        self.loop.close()


@dataclass(frozen=True)
class Plan:
    """A workload, with the numbers of turns and steps to measure."""

    workload: Workload
    num_turns: int
    num_steps: int  # counted steps per turn; one more comes before them
    num_warmup: int  # steps before the first turn


TRAIN_SHARE = 0.5  # training time / synchronous rollout time
PLAN = Plan(Workload(), num_turns=5, num_steps=3, num_warmup=5)
QUICK_PLAN = Plan(Workload(prompts_per_step=4, max_response_tokens=128, median_tokens=16.0), 3, 2, 2)


def rows(quick: bool) -> Rows:
    """Compare a step of each mode with a synchronous step."""
    plan = QUICK_PLAN if quick else PLAN
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(Path(folder), plan.workload.max_context)
        with engine_process(Path(folder), plan.workload) as (url, pid):
            bench = Bench(PlannedEngine(url, plan.workload), plan.workload, pid, weights)
            turns, theory = compare(bench, plan)
            bench.close()
    for mode in MODES:
        if mode != SYNCHRONOUS:
            case = f"step of {mode} rollouts, bound {theory.speedup(mode):.2f}"
            yield turns.row(case, SYNCHRONOUS, ours=mode, unit="s")


def compare(bench: Bench, plan: Plan) -> tuple[Turns, Bound]:
    """Print a table for each turn; return the seconds per step, and the bound."""
    w = bench.workload
    lengths = w.lengths(500)
    print(
        f"{w.prompts_per_step} prompts x {w.samples_per_prompt} responses per step, {w.slots} slots; response tokens: "
        f"median {statistics.median(lengths):.0f}, mean {statistics.fmean(lengths):.0f}, at most {max(lengths)} "
        f"(log-normal, sigma {w.sigma:g})"
    )
    cost = bench.cost()
    middle = (cost.contexts[0] + cost.contexts[-1]) // 2
    print(f"engine, tokens per second of its CPU time with responses of {middle} tokens, by running responses:")
    print("   " + "   ".join(f"{n}: {n / cost(n, middle):.0f}" for n in cost.rows))
    theory = bound(w, cost, num_steps=NUM_BOUND_STEPS, train_share=TRAIN_SHARE)
    runs = {mode: ModeRun(mode, bench) for mode in MODES}
    results: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for run in runs.values():
        run.turn(0, num_warmup=plan.num_warmup, train_s=lambda waited_s: 0.0)
    load_before = os.getloadavg()[0]
    for _ in range(plan.num_turns):
        first = runs[SYNCHRONOUS].turn(plan.num_steps, train_s=lambda waited_s: TRAIN_SHARE * waited_s)
        train_s = first.train_s / plan.num_steps
        print(f"training takes {train_s:.2f} s per step: {TRAIN_SHARE:g} x the rollout of a synchronous step")
        print_header()
        for mode, run in runs.items():
            is_first = mode == SYNCHRONOUS
            results[mode].append(first if is_first else run.turn(plan.num_steps, train_s=partial(constant, train_s)))
            print_row(mode, results[mode][-1:], results[SYNCHRONOUS][-1:], theory)
    print(f"medians of {plan.num_turns} turns (lowest to highest)")
    print_header()
    for mode, measured in results.items():
        print_row(mode, measured, results[SYNCHRONOUS], theory)
    seconds = {mode: [m.wall_s / m.num_steps for m in measured] for mode, measured in results.items()}
    return Turns(seconds, load_before, os.getloadavg()[0]), theory


def constant(train_s: float, waited_s: float) -> float:
    """Return the duration of an optimizer step: the same, however long its batch took."""
    return train_s


def print_header() -> None:
    columns = (
        "mode",
        "generated/s",
        "trained/s",
        "generated x",
        "trained x",
        "steps x",
        "bound x",
        "idle",
        "bound",
        "per CPU s",
    )
    print("| " + " | ".join(columns) + " | age mean | max |\n" + "|---" * (len(columns) + 2) + "|", flush=True)


def print_row(mode: str, runs: Sequence[Measured], baseline: Sequence[Measured], theory: Bound) -> None:
    """Print a mode's tokens per second, their ratio to `baseline` in the same turn, the trainer's idle share, ages."""
    generated = [r.generated_tokens / r.wall_s for r in runs]
    trained = [r.trained_tokens / r.wall_s for r in runs]
    ages = [age for r in runs for age in r.ages]
    cells = (
        mode,
        _spread(generated, 0),
        _spread(trained, 0),
        _spread([v * b.wall_s / b.generated_tokens for v, b in zip(generated, baseline, strict=True)], 2),
        _spread([v * b.wall_s / b.trained_tokens for v, b in zip(trained, baseline, strict=True)], 2),
        _spread([r.num_steps / r.wall_s * b.wall_s / b.num_steps for r, b in zip(runs, baseline, strict=True)], 2),
        f"{theory.speedup(mode):.2f}",
        _spread([r.idle_s / r.wall_s for r in runs], 2),
        f"{theory.idle_share(mode):.2f}",
        _spread([r.generated_tokens / r.engine_cpu_s for r in runs], 0),
        f"{statistics.fmean(ages):.2f}",
        f"{max(ages)}",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main(__doc__, rows)
