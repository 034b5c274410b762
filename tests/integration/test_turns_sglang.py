"""The order of calls in which a real SGLang server takes turns with a trainer.

Without a GPU, SGLang frees and restores nothing, and its memory saver cannot be enabled: the proxy that records the
calls says that it is. The schedulers' checks, the pause, the waiting requests and the weights are as on a GPU.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.runtime.turn import Turn
from bapo_megatron.sync.base import RankZeroChannel
from bapo_megatron.sync.disk import DiskChannel
from bapo_megatron.sync.turns import ServerTurns, Turns
from tests.contract.test_engine_contract import PROMPT, TOLERANCE, ask_later, logprobs_of, reference_logprobs
from tests.distributed import HANG_S
from tests.integration.faulty_proxy import FaultyProxy
from tests.rollout_servers import KEY, VOCAB_SIZE, Servers, sglang_servers, started, tiny_model

pytestmark = pytest.mark.slow

TOLD = {  # calls that change something -> what is recorded of their body
    "/pause_generation": "mode",
    "/release_memory_occupation": "tags",
    "/resume_memory_occupation": "tags",
    "/update_weights_from_disk": "weight_version",
    "/weights_checker": "action",
    "/continue_generation": None,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started("sglang", sglang_servers(1, 1), tiny_model, tmp_path_factory.mktemp("sglang")) as running:
        yield running


class RecordingProxy(FaultyProxy):
    """It forwards all calls with their key, and records those that change something."""

    def __init__(self, target: str, events: list[Any]) -> None:
        super().__init__(target)
        self._events = events

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.path in TOLD:
            name = TOLD[request.path]
            self._events.append((request.path, json.loads(raw).get(name) if name else None))
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with self._session.request(
            request.method, self._target + request.path, data=raw or None, headers=headers
        ) as response:
            reply, status = await response.read(), response.status
        if request.path == "/server_info":
            reply = json.dumps(json.loads(reply) | {"enable_memory_saver": True}).encode()
        return web.Response(body=reply, status=status)


class Trainer:
    """Implements `TrainerMemory` and `WeightSource`, with the weights of a model."""

    def __init__(self, events: list[Any], weights: dict[str, Tensor]) -> None:
        self.version, self.weights = 0, weights
        self._events = events

    def keep(self, parts: Set[str]) -> None:
        self._events.append(("trainer keeps", sorted(parts)))

    def take(self, parts: Set[str]) -> None:
        self._events.append(("trainer takes", sorted(parts)))

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.weights.items()]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


def test_a_step_makes_these_calls_in_this_order(servers: Servers, tmp_path: Path) -> None:
    events: list[Any] = []
    run = servers.loop.run
    proxy = RecordingProxy(servers.url, events)
    run(proxy.__aenter__())
    engine = HttpEngine(proxy.url, request_timeout_s=HANG_S, vocab_size=VOCAB_SIZE, key=KEY)
    trainer, hf_path = Trainer(events, servers.weights["a"]), Path(servers.get("/server_info")["model_path"])
    try:
        pool, config = EnginePool([engine]), SyncConfig(timeout_s=HANG_S)
        turns = Turns(
            ServerTurns(pool, servers.loop.submit, Turn(tmp_path / ".turn"), timeout_s=HANG_S, startup_limit_s=HANG_S),
            until_saved=lambda: events.append("saved"),
            until_free=lambda phase: events.append(f"free for {phase}"),
            sign_of_life_s=HANG_S,
        )
        channel = RankZeroChannel(
            DiskChannel(pool, config, servers.loop.submit, folder=tmp_path / "weights", hf_path=hf_path)
        )
        turns.trainer = trainer

        def push(version: int, model: str) -> None:
            trainer.version, trainer.weights = version, servers.weights[model]
            with turns.pushing():
                sent = channel.send(trainer)  # type: ignore[arg-type]
            channel.resume(sent)

        with turns.pushing():
            channel.connect(trainer)  # type: ignore[arg-type]
            push(1, "a")
        with turns.sampling():
            (pending,) = servers.held(lambda: [ask_later(servers, "in-a-release")])
        events.clear()
        with turns.training():
            events.append("training")
        push(2, "b")
        assert events == [
            "saved",
            ("trainer keeps", ["rest", "weights"]),  # it has none of them on the device
            ("/pause_generation", "retract"),
            ("/release_memory_occupation", ["cuda_graph", "kv_cache", "weights"]),
            "free for training",
            ("trainer takes", ["rest", "weights"]),
            "training",
            "saved",
            ("trainer keeps", ["weights"]),
            ("/pause_generation", "retract"),
            ("/resume_memory_occupation", ["weights"]),
            "free for pushing",
            ("trainer takes", ["weights"]),
            ("/pause_generation", "retract"),
            ("/update_weights_from_disk", "2"),
            ("/weights_checker", "checksum"),
            "saved",
            ("trainer keeps", []),
            ("/resume_memory_occupation", ["cuda_graph", "kv_cache"]),
            "free for sampling",
            ("trainer takes", []),
            ("/continue_generation", None),
        ]
        reply = pending.result(HANG_S)[1]
    finally:
        run(engine.close())
        run(proxy.__aexit__())
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["1", "2"]
    assert len(reply["output_ids"]) == servers.num_long
    cut = reply["meta_info"]["weight_versions"][1]["start"]
    for model, part in (("a", slice(0, cut)), ("b", slice(cut, None))):
        expected = reference_logprobs(servers.models[model], PROMPT, reply["output_ids"])[part]
        torch.testing.assert_close(logprobs_of(reply)[part], expected, atol=TOLERANCE, rtol=0)


def test_the_servers_own_route_asks_for_the_key(servers: Servers) -> None:
    assert servers.get("/released_memory") == {"released": []}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(f"{servers.url}/released_memory", timeout=HANG_S)
    assert refusal.value.code == 401
