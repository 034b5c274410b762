"""A seeded campaign of faults on real engines, in every mode: every token that is trained is what it claims to be."""

import contextlib
import importlib.util
import math
import random
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes, sglang
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.rewards import worker_pool
from tests.distributed import HANG_S
from tests.integration.campaign import ROLLOUT, Campaign, Fault, Site
from tests.integration.campaign_faults import JUDGE, PUSHES, SAMPLING, SPOILT, spoilt
from tests.integration.nursery import Nursery, kill_session
from tests.integration.vain import NEVER_S, Vain
from tests.unit.test_reward_hooks import strike_only

LEGS: dict[str, dict[str, Any]] = {
    "rounds, 9": {"tokens_per_round": 9},
    "tail": {"abort_tail": True},
    "both, 9": {"overlap": True, "abort_tail": True, "tokens_per_round": 9},
}
SEED = 5


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
        share = EngineShare(count=1, first_gpu=0)
        log = self._folder / f"server-{len(self._started)}.log"
        command = sglang.command(config, checkpoint, share, 0, port, has_gpu=False)
        command[command.index("bapo_megatron.engines.sglang_server")] = "tests.integration.halting_sglang"
        environment = sglang.environment(config, share, 0, []) | {"BAPO_TEST_HALT": str(self._halt_file(port))}
        server = processes.start(command, log, environment)
        threading.Thread(target=server.wait, daemon=True).start()  # no zombies
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
        for server in self._started:
            with contextlib.suppress(ProcessLookupError):
                kill_session(server.pid, signal.SIGKILL)


@contextlib.contextmanager
def opened(starter: Embedded | SGLang, num_sites: int, folder: Path, vain: Vain) -> Iterator[Campaign]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as in a trainer of one rank
    try:
        campaign = Campaign(starter, num_sites, folder, vain)
        try:
            yield campaign
        finally:
            campaign.close()
    finally:
        starter.end()
        dist.destroy_process_group()


def deal(num_legs: int, seed: int) -> list[list[list[Fault]]]:
    """Plan each step of each leg: an event or spoilt replies, and in a third of the steps a failing push; each once."""
    rng = random.Random(seed)
    faults = [*SAMPLING, *(spoilt(kind, rng.choice((1, 3))) for kind in SPOILT)]
    steps = [[fault] for fault in rng.sample(faults, len(faults))]
    for step, push in zip(steps[::3], rng.sample(PUSHES, len(PUSHES)), strict=False):
        step.append(push)
    size = math.ceil(len(steps) / num_legs)
    return [steps[i : i + size] for i in range(0, len(steps), size)]


@pytest.fixture
def vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vain:
    strike_only("hang", monkeypatch)
    monkeypatch.setattr(worker_pool, "START_TIMEOUT_S", HANG_S)
    return Vain(tmp_path, monkeypatch)


def fight(campaign: Campaign, plans: dict[str, list[list[Fault]]], capsys: pytest.CaptureFixture[str]) -> int:
    """Run all legs, and check what must hold after them; return how many faults happened."""
    began_s = time.monotonic()
    for name, plan in plans.items():
        campaign.run_leg(name, LEGS[name], plan)
    elapsed_s = time.monotonic() - began_s
    num_tokens, worst, betrayed = campaign.check_logprobs()
    num_faults = sum(campaign.hits.values())
    with capsys.disabled():
        print(f"\n{campaign.table()}")
        print(
            f"{num_faults} faults in {elapsed_s:.0f} s, engines fenced {campaign.num_fenced} times; "
            f"{num_tokens} tokens are of their versions within {worst:.1g}, other weights betray {betrayed:.0%}"
        )
    assert campaign.kinds == {fault.kind for plan in plans.values() for faults in plan for fault in faults} | set(JUDGE)
    num_samples = ROLLOUT["prompts_per_step"] * ROLLOUT["samples_per_prompt"]
    assert len(campaign.trained) == campaign.num_steps * num_samples
    assert betrayed > 0.9, "the oracle would not notice wrong weights"
    return num_faults


@pytest.mark.slow
def test_no_fault_makes_a_run_hang_lose_samples_or_train_what_is_not_as_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain
) -> None:
    with opened(Embedded(), 3, tmp_path, vain) as campaign:
        plans = dict(zip(LEGS, deal(len(LEGS), SEED), strict=True))
        assert fight(campaign, plans, capsys) >= 30
        assert campaign.kinds == {fault.kind for fault in (*SAMPLING, *PUSHES)} | {*SPOILT, *JUDGE}


@pytest.mark.slow
def test_real_sglang_servers_under_fire(tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; scripts/install_sglang_cpu.sh does that")
    fault = {fault.kind: fault for fault in (*SAMPLING, *PUSHES)}
    plans = {
        "rounds, 9": [  # step i strikes server i % 2, its push the other one
            [spoilt("garbage", 1)],
            [fault["hung, then continues"]],
            [],
            [fault["aborted by a third party"]],
            [],
            [fault["paused by a third party"]],
            [],
            [],
        ],
        "both, 9": [
            [spoilt("nan", 1)],
            [fault["push: torn, killed between buckets"]],
            [],
            [fault["aborted by a third party"]],
            [],
        ],
    }
    with opened(SGLang(tmp_path), 2, tmp_path, vain) as campaign:
        assert fight(campaign, plans, capsys) >= 5
