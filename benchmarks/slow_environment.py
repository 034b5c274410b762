"""Steps of 64 samples whose tool takes 0.5 s a turn, against the same steps with a tool that answers immediately.

    python -m benchmarks.slow_environment [--quick]

Each sample has three turns of the policy, and two answers of its tool between them. The engine, the scheduler, the
weight channel and the tool's worker process are real; lengths, prompts and training are simulated as in rollout.py. The
ratio of a row is without / with the wait: at 0.77, waiting tools make a step take 1.3 times as long.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.rewards.environments import EnvironmentSpec
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.drivers import StepDriver
from benchmarks.rollout import SYNCHRONOUS, TRAIN_SHARE, Bench, ModeRun, PlannedEngine, engine_process, save_model
from benchmarks.rollout_bound import Workload
from benchmarks.side_by_side import Rows, Turns, main

MODES = (SYNCHRONOUS, "overlapped")
WAIT_S = 0.5
WAITS, NO_WAIT = f"tool takes {WAIT_S:g} s a turn", "tool takes 0 s"
NUM_TURNS = 3
ANSWER = (1, 2, 3, 4, 5)
QUICK, FULL = (2, 3), (7, 6)  # turns of the ways, steps in each
NUM_WARMUP = 3  # uncounted steps before each turn, in which overlapped sampling fills again


@dataclass(frozen=True, slots=True)
class TurnsWorkload(Workload):
    """The work of every mode: turns of one sample have the same length."""

    samples_per_prompt: int = 8
    max_response_tokens: int = 48 * NUM_TURNS
    median_tokens: float = 6.0  # in each turn
    sigma: float = 0.8

    @property
    def max_context(self) -> int:
        return Workload.max_context.fget(self) + (NUM_TURNS - 1) * len(ANSWER)  # type: ignore[attr-defined]

    def turn_length(self, sample_id: str) -> int:
        return min(Workload.length(self, sample_id), self.max_response_tokens // NUM_TURNS)

    def length(self, sample_id: str) -> int:
        return NUM_TURNS * self.turn_length(sample_id)


class TurnsEngine(PlannedEngine):
    """The real engine, except that a turn ends at the length that the workload gives it."""

    def _tokens_left(self, request: GenerateRequest) -> int:
        workload = self._workload
        assert isinstance(workload, TurnsWorkload)
        length = workload.turn_length(request.rid.split("-")[0])
        return length - (len(request.token_ids) - workload.prompt_tokens) % (length + len(ANSWER))


async def step(turn: dict[str, Any], state: Any, *, wait_s: float) -> dict[str, Any]:
    """Answer all turns but the last after `wait_s`."""
    if turn["number"] == NUM_TURNS:
        return {"reward": 0.0}
    await asyncio.sleep(wait_s)
    return {"token_ids": ANSWER}


def driver(wait_s: float, workload: Workload) -> StepDriver:
    spec = EnvironmentSpec("benchmarks.slow_environment:step", 30.0, 4 << 30, {"wait_s": wait_s})
    return StepDriver(
        EnvironmentProcesses(spec, concurrency=1024),
        encode=lambda answer, turn, max_tokens: (answer.token_ids or (), False),
        decode=lambda token_ids: "",
        max_response_tokens=workload.max_response_tokens,
        max_answer_tokens=len(ANSWER),
        max_turns=NUM_TURNS,
    )


def rows(quick: bool) -> Rows:
    """Compare the steps of synchronous and overlapped rollouts with and without the wait."""
    workload, (num_turns, num_steps) = TurnsWorkload(), QUICK if quick else FULL
    tools = {NO_WAIT: driver(0.0, workload), WAITS: driver(WAIT_S, workload)}
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(Path(folder), workload.max_context)
        with engine_process(Path(folder), workload) as (url, pid):
            bench = Bench(TurnsEngine(url, workload), workload, pid, weights)
            runs = {f"{mode}, {tool}": ModeRun(mode, bench, tools[tool]) for mode in MODES for tool in tools}
            took_s: dict[str, list[float]] = {name: [] for name in runs}
            load_before = os.getloadavg()[0]
            for _ in range(num_turns):
                train_s: float | None = None  # the same for all, from the first one
                for name, run in runs.items():
                    measured = run.turn(num_steps, train_s=_trains(train_s), num_warmup=NUM_WARMUP)
                    train_s = train_s or measured.train_s / num_steps
                    took_s[name].append(measured.wall_s / num_steps)
            bench.close()
    for tool in tools.values():
        tool.close()
    turns = Turns(took_s, load_before, os.getloadavg()[0])
    for mode in MODES:
        row = turns.row(f"step of {mode} rollouts, {WAITS}", f"{mode}, {NO_WAIT}", ours=f"{mode}, {WAITS}", unit="s")
        yield replace(row, other=NO_WAIT)


def _trains(train_s: float | None) -> Callable[[float], float]:
    return lambda waited_s: TRAIN_SHARE * waited_s if train_s is None else train_s


if __name__ == "__main__":
    main(__doc__, rows)
