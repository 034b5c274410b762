"""Whole campaigns of faults: engines of two kinds, legs in three modes, and which fault meets which step.

    python -m tests.integration.campaign_runs FOLDER [--routes] [--first 0] [--count 12]

Each seed is one campaign of all faults of engines, pushes and environments: one line in FOLDER/campaigns.jsonl. With
`--routes` the model is a mixture, in one mode, and replies have wrong routes besides.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes, sglang
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.rewards import worker_pool
from bapo_megatron.rewards.worker_pool import Worker
from bapo_megatron.runtime.files import JsonlWriter
from bapo_megatron.types import Ended
from tests.distributed import HANG_S
from tests.integration.campaign import ROLLOUT, Campaign, Fault, Site
from tests.integration.campaign_answers import Judge, MakeAnswers, Turns
from tests.integration.campaign_environment import FAILURES, kind_of
from tests.integration.campaign_faults import JUDGE, PUSHES, SAMPLING, SPOILT, spoilt
from tests.integration.campaign_oracle import Checked, check_logprobs, check_routes
from tests.integration.faulty_proxy import ROUTE_FAULTS
from tests.integration.nursery import Nursery, kill_session
from tests.integration.vain import NEVER_S, Vain

LEGS: dict[str, dict[str, Any]] = {
    "rounds, 9": {"tokens_per_round": 9},
    "tail": {"abort_tail": True},
    "both, 9": {"overlap": True, "abort_tail": True, "tokens_per_round": 9},
}
Plans = dict[str, list[list[Fault]]]  # by leg: the faults of each step
ENVIRONMENT = tuple(f"environment: {kind}" for kind in (*FAILURES, "long"))
_HANG_S = 0.5  # deadline of a call that is never answered


class Embedded:
    """A starter of embedded engines."""

    def __init__(self) -> None:
        self._nursery = Nursery()

    def start(self, port: int, checkpoint: Path, version: str) -> int:
        arguments = ["--model-path", str(checkpoint), "--port", str(port), "--weight-version", version]
        arguments += ["--max-context", "64", "--max-running", "32", "--update-timeout-s", str(NEVER_S)]
        return self._nursery.start(arguments)

    @contextlib.asynccontextmanager
    async def halting(self, site: Site) -> AsyncIterator[None]:
        await site.post("/pause_generation", {"mode": "in_place"})
        yield

    def end(self) -> None:
        self._nursery.end()


class SGLang:
    """A starter of real SGLang servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, port: int, checkpoint: Path, version: str) -> int:
        extra = {} if version == "default" else {"weight_version": version}
        limits = {"max_response_tokens": 32, "max_concurrent_requests": 32, "engine_threads": 1}
        config = Config.model_validate(
            {"data": {"max_prompt_tokens": 32}, "rollout": limits, "sglang": {"extra": extra}}
        )
        share = Placement(num_servers=1).on()
        log = self._folder / f"server-{len(self._started)}.log"
        command = sglang.command(resolve(config, checkpoint), share, 0, port, has_gpu=False)
        command[command.index("bapo_megatron.engines.sglang_server")] = "tests.integration.halting_sglang"
        environment = sglang.environment(config, share, 0, []) | {"BAPO_TEST_HALT": str(self._halt_file(port))}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # where tests/ is
        server = processes.start(command, log, environment)
        self._started.append(server)
        return server.pid

    @contextlib.asynccontextmanager
    async def halting(self, site: Site) -> AsyncIterator[None]:
        file = self._halt_file(site.port)
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def _halt_file(self, port: int) -> Path:
        return self._folder / f"halt-{port}"

    def end(self) -> None:
        for server in self._started:  # not reaped yet, so the ids are still their own
            kill_session(server.pid, signal.SIGKILL)
            server.wait(HANG_S)


@contextlib.contextmanager
def opened(
    starter: Embedded | SGLang,
    num_sites: int,
    folder: Path,
    vain: Vain,
    make_answers: MakeAnswers = Judge,
    model: str = "demo",
) -> Iterator[Campaign]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as in a trainer of one rank
    try:
        campaign = Campaign(starter, num_sites, folder, vain, make_answers, model)
        try:
            yield campaign
        finally:
            campaign.close()
    finally:
        starter.end()
        dist.destroy_process_group()


def deal(num_legs: int, seed: int, more: Sequence[Fault] = ()) -> list[list[list[Fault]]]:
    """Plan each step of each leg: an event or spoilt replies, and in a third of the steps a failing push; each once."""
    rng = random.Random(seed)
    faults = [*SAMPLING, *(spoilt(kind, rng.choice((1, 3))) for kind in SPOILT), *more]
    steps = [[fault] for fault in rng.sample(faults, len(faults))]
    for step, push in zip(steps[::3], rng.sample(PUSHES, len(PUSHES)), strict=False):
        step.append(push)
    size = math.ceil(len(steps) / num_legs)
    return [steps[i : i + size] for i in range(0, len(steps), size)]


def dense_plans(seed: int) -> Plans:
    """Plan a campaign in all modes."""
    return dict(zip(LEGS, deal(len(LEGS), seed), strict=True))


def routed_plans(seed: int) -> Plans:
    """Plan a campaign of a mixture in one mode, which has everything."""
    (steps,) = deal(1, seed, [spoilt(kind, 1) for kind in ROUTE_FAULTS])
    return {"both, 9": steps}


def chosen_deadlines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Vain:
    """Let only deadlines of calls that are never answered pass."""
    ask = Worker.ask

    async def ask_with(worker: Worker, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
        hangs = kind_of(fields["turn"]) == "hang" if "turn" in fields else fields["response"] == "hang"
        return await ask(worker, fields, _HANG_S if hangs else limit_s)

    monkeypatch.setattr(Worker, "ask", ask_with)
    monkeypatch.setattr(worker_pool, "START_TIMEOUT_S", HANG_S)
    return Vain(folder, monkeypatch)


def fight(campaign: Campaign, plans: Plans, answers: tuple[str, ...] = JUDGE) -> dict[str, Any]:
    """Run all legs, and check what must hold after them; return what happened."""
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    for name, plan in plans.items():
        campaign.run_leg(name, LEGS[name], plan)
    elapsed_s = time.monotonic() - began_s
    samples = campaign.samples
    tokens = check_logprobs(campaign.policy.model, samples, campaign.config.rollout.temperature)
    planned = {fault.kind for plan in plans.values() for faults in plan for fault in faults}
    assert planned <= campaign.kinds <= planned | set(answers)
    num_samples = ROLLOUT["prompts_per_step"] * ROLLOUT["samples_per_prompt"]
    assert len(campaign.trained) + len(campaign.dropped) >= campaign.num_steps * num_samples
    assert tokens.betrayed > 0.9, "the oracle would not notice wrong weights"
    routes = check_routes(campaign.policy.model, samples) if campaign.streams else Checked()
    assert not campaign.streams or routes.betrayed > 0.9, "nor wrong routes"
    assert campaign.refused == {kind: n for (_, kind), n in campaign.hits.items() if kind in ROUTE_FAULTS}
    return {
        "faults": sum(campaign.hits.values()),
        "of_answers": sum(n for (_, kind), n in campaign.hits.items() if kind in answers),
        "fenced": campaign.num_fenced,
        "steps": campaign.num_steps,
        "samples": len(samples),
        "failed": sum(isinstance(s.need, Ended) and s.need.problem is not None for s in samples),
        "turns": sum(len(s.trajectories[0].turns) for s in samples),
        "given": sum(s.num_given_tokens for s in samples),
        "tokens": asdict(tokens),
        "routes": asdict(routes),
        "refused": campaign.refused.total(),
        "elapsed_s": round(elapsed_s),
        "cpu_s": round(_cpu_s() - began_cpu_s),
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.integration.campaign_runs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--routes", action="store_true", help="a mixture, in one mode")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=12, help="number of seeds")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = JsonlWriter(options.folder / "campaigns.jsonl")
    num_failed = 0
    for seed in range(options.first, options.first + options.count):
        folder = options.folder / f"campaign-{seed}"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            vain = chosen_deadlines(folder, monkeypatch)
            try:
                model, plans = ("moe", routed_plans(seed)) if options.routes else ("demo", dense_plans(seed))
                with opened(Embedded(), 3, folder, vain, Turns, model) as campaign:
                    row = fight(campaign, plans, ENVIRONMENT)
            except AssertionError as error:
                num_failed += 1
                row = {"error": str(error)[-4000:] or repr(error)}
        table.write({"seed": seed} | row)
        print(json.dumps({"seed": seed} | row), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
