"""Runs whose trainer and engines share devices: same bits, servers first, weights through a folder in memory."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.engines import processes, sglang, supervisor
from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine, HttpTransport
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.supervisor import supervised
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.resolved import resolve
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.sync import open_channel
from bapo_megatron.sync.folder import kept_weights_folder, weights_folder
from tests.distributed import HANG_S
from tests.integration.forked import SMALL
from tests.integration.gates import Gates
from tests.integration.killable import NOT_COMPARED

SPLIT = "rollout.placement=split"
NUM_PUSHES = 5
KEY = "the-key-of-this-server"
MEAN_NATS, LARGEST_NATS = 3e-6, 3e-5  # float32 in transformers is up to 1e-5 away from float64 with these weights


def start(folder: Path, name: str, *settings: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={folder}", f"run.name={name}"]
    command += [*SMALL, "train.num_steps=3", "rollout.num_servers=2", *settings]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | variables
    )


def finish(run: subprocess.Popen[str]) -> str:
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 0, output
    return output


def in_memory(run: Path) -> Path:
    """Return the folder in memory of a run that has begun."""
    folder = weights_folder(load_config([run / "config.toml"], []), RunDir.attach(run))
    assert folder.parent.parent == Path("/dev/shm")
    return folder


def compared(run: Path) -> list[dict[str, float]]:
    rows = [
        {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    assert all(len(row) > 30 for row in rows)
    return rows


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    return {
        f"{file.relative_to(last)}/{k}": w for file in last.rglob("*.safetensors") for k, w in load_file(file).items()
    }


@pytest.mark.slow
def test_a_shared_device_changes_no_bit(tmp_path: Path) -> None:
    """The engine says that its launcher had no rank while it was not healthy, and that it had some without sharing."""
    late, found = "rollout.engine=tests.integration.late_engine:KIND", {}
    for name, settings in (("separate", ()), ("split", (SPLIT,))):
        finish(start(tmp_path, name, late, *settings))
        reports = [*(tmp_path / name / "logs").rglob("ranks-*.json")]
        found[name] = [bool(json.loads(report.read_text())) for report in reports]
    assert found == {"separate": [True, True], "split": [False, False]}
    one, other = (tmp_path / name for name in found)
    assert len(compared(one)) == 3
    assert compared(one) == compared(other)
    expected, held = weights(one), weights(other)
    assert expected.keys() == held.keys()
    assert all(torch.equal(expected[name], held[name]) for name in expected)
    assert not in_memory(other).parent.exists()


@pytest.mark.slow
def test_a_killed_run_leaves_weights_that_the_next_attempt_removes(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates", 2)
    run = start(tmp_path, "killed", SPLIT, "checkpoint.interval_steps=1", **gates.environment)
    try:
        gates.wait(2, lambda: run.poll() is None)
        folder = in_memory(tmp_path / "killed")
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert [version.name for version in folder.iterdir()] == ["v-2"]
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=HANG_S)
    assert folder.exists()
    finish(start(tmp_path, "killed", SPLIT, "checkpoint.interval_steps=1"))
    assert not folder.parent.exists()
    assert [row["step"] for row in read_metrics(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3]


class Policy:
    """The demo's weights in transformers, moved by each step."""

    def __init__(self) -> None:
        self.version = -1
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
        self.in_between = lambda: None  # what happens while the second half of the weights is still to be written

    @torch.no_grad()
    def step(self) -> None:
        self.version += 1
        for weight in self.model.parameters():
            weight.mul_(1 + 0.05 * torch.randn_like(weight))

    def _weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, weight) for name, weight in self._weights().items()]

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self._weights()
        for number, (name, weight) in enumerate(weights.items()):
            if number == len(weights) // 2:
                self.in_between()
            yield name, weight

    @torch.no_grad()
    def log_probs(self, token_ids: list[int]) -> np.ndarray:
        """Return each token's log-prob after those before it, without the first."""
        ids = torch.tensor([token_ids])
        return self.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_serves_what_the_folder_in_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the pushes lose their server: one while weights are written, one before it loads them."""
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.1)
    settings = ("rollout.engine=sglang", SPLIT, "data.max_prompt_tokens=32", "rollout.max_response_tokens=32")
    settings += ("rollout.max_concurrent_requests=8", "rollout.engine_threads=1", f"sync.timeout_s={HANG_S}")
    config = load_config([], [*settings, f"run.dir={tmp_path}", "run.name=run"])
    run, policy, loop = resolve(config, demo_model_path()), Policy(), LoopThread()
    with (
        RunDir.open(config) as run_dir,
        kept_weights_folder(config, run_dir),
        processes.reserved_ports(1) as ports,
        supervised(
            sglang.engine_specs(run, [tmp_path / "engine-0.log"], ports, run.placement.on()),
            startup_timeout_s=HANG_S,
            max_restarts=2,
        ) as started,
    ):
        started.wait()
        folder = weights_folder(config, run_dir)
        engine = HttpEngine(started.urls[0], request_timeout_s=HANG_S, whole_cache=True)
        pool = EnginePool([engine], HANG_S)
        watch = loop.submit(pool.watch())
        channel = open_channel(
            config.sync,
            (pool, loop.submit),
            channel=config.sync_channel,
            folder=folder,
            hf_path=run.folder,
            pause_mode="retract",
        )
        channel.connect(policy)  # type: ignore[arg-type]
        take = HttpTransport.take

        def kill() -> None:
            server = started._engines[0].process
            server.kill()
            server.wait()
            policy.in_between = lambda: None

        async def kill_and_take(transport: HttpTransport, *arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(HttpTransport, "take", take)
            kill()
            return await take(transport, *arguments, **options)

        errors: list[float] = []
        for number in range(NUM_PUSHES):
            policy.step()
            if number == 1:
                policy.in_between = kill
            if number == 3:
                monkeypatch.setattr(HttpTransport, "take", kill_and_take)
            if number in (1, 3):
                assert not channel.push(policy).num_tensors  # type: ignore[arg-type]
                assert not pool.live()
                loop.run(pool.until_one_is_back(), HANG_S)
            assert channel.push(policy).is_whole  # type: ignore[arg-type]
            assert [version.name for version in folder.iterdir()] == [f"v-{policy.version}"]
            prompt = [4, 5, 6, 7, 8]
            reply = loop.run(engine.generate(GenerateRequest(f"r-{number}", tuple(prompt), 16, 1.0, (), 7)), HANG_S)
            assert {span.version for span in reply.spans} == {policy.version}
            expected = policy.log_probs([*prompt, *reply.token_ids.tolist()])[len(prompt) - 1 :]
            errors += np.abs(expected - reply.behaviour_logprobs).tolist()
        watch.cancel()
        loop.run(engine.close(), HANG_S)
        loop.close()
        assert np.mean(errors) < MEAN_NATS
        assert max(errors) < LARGEST_NATS
    assert not folder.parent.exists()
