"""What the embedded engine samples depends on the requests of one call and the weights, and on nothing before."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.embedded import protocol
from bapo_megatron.engines.embedded.engine import BatchingEngine
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import BadRequestError, SamplingParams
from bapo_megatron.engines.embedded.server import Server
from bapo_megatron.engines.embedded.server import serve as serve_http
from bapo_megatron.engines.embedded.weights import WeightUpdater

MAX_RUNNING = 6
GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}
Sampled = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained(demo_model_path(), max_len=64)


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """More than can run at once, of many lengths: they wait, move to other rows and are prefilled in groups."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(2, 16) for _ in range(rng.randrange(2, 40))],
            SamplingParams(max_new_tokens=rng.randrange(1, 20), sampling_seed=rng.randrange(2**31)),
        )
        for _ in range(20)
    ]


def serve(engine: BatchingEngine, asked: list[tuple[list[int], SamplingParams]]) -> Sampled:
    sequences = [engine.new_sequence(str(i), ids, params) for i, (ids, params) in enumerate(asked)]
    engine.submit(sequences)
    for sequence in sequences:
        sequence.done.result(60)
    return [(s.output_ids, s.logprobs) for s in sequences]


def stop(engine: BatchingEngine) -> None:
    """End the engine thread, as an error in it does."""
    engine.call(sys.exit)
    engine.ended.result(30)


def test_log_probs_do_not_depend_on_what_was_served_before(model: Model) -> None:
    """To the bit: a resumed run meets a new engine, or one that a killed trainer has left."""
    fresh = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    used = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        expected = serve(fresh, requests(0))
        assert any(len(ids) > 1 for ids, _ in expected)
        serve(used, requests(1))
        left = [used.new_sequence(f"left {i}", ids, params) for i, (ids, params) in enumerate(requests(2))]
        used.submit(left)
        used.call(lambda: used.pause("retract")).result(10)
        used.call(lambda: used.abort(None)).result(10)
        used.call(used.resume).result(10)
        assert serve(used, requests(0)) == expected
        assert serve(fresh, requests(0)) == expected
    finally:
        stop(fresh)
        stop(used)


def test_a_server_whose_engine_fails_answers_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hold its port, answer 500 for ever, and nobody would start it again."""
    engine = BatchingEngine(Model.from_pretrained(demo_model_path(), max_len=64), max_running=4, max_context=64)

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(engine.model, "decode", out_of_memory)
    ready = tmp_path / "ready.json"

    async def run() -> tuple[int, str]:
        server = Server(engine, model_path="demo", update_timeout_s=5)
        serving = asyncio.create_task(
            serve_http(server, host="127.0.0.1", port=0, ready_file=ready, exit_with_parent=False)
        )
        while not ready.exists():
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}/generate"
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            answer = response.status, await response.text()
        await asyncio.wait_for(serving, 30)
        return answer

    status, message = asyncio.run(run())
    assert status == 500
    assert "no room for the cache" in message
    assert isinstance(engine.failure, MemoryError)


def prompt_and(**params: object) -> dict[str, object]:
    return {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4, **params}}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (protocol.GenerateBody, prompt_and(top_k=2**63), "sampling_params.top_k"),
        (protocol.GenerateBody, {"input_ids": [[3]] * 5000}, "input_ids"),
        (protocol.GenerateBody, {"input_ids": [3.5] * 100_000}, "input_ids.0: Input should be a valid integer"),
        (
            protocol.InitGroupBody,
            GROUP | {"world_size": 10**30},
            "world_size",
        ),
        (
            protocol.InitGroupBody,
            GROUP | {"rank_offset": 10**30},
            "rank_offset",
        ),
    ],
)
def test_a_request_out_of_bounds_is_refused(kind: type[Any], body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        protocol.parse(kind, json.dumps(body).encode())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_json_of_many_levels_is_a_bad_request() -> None:
    with pytest.raises(BadRequestError, match="recursion limit"):
        protocol.parse(protocol.GenerateBody, b'{"input_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_body_with_too_many_samples_is_refused(model: Model) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        server = Server(engine, model_path="demo", update_timeout_s=5)
        body = {"input_ids": [[3, 4]] * 300, "sampling_params": {"max_new_tokens": 4, "n": 1024}}
        with pytest.raises(BadRequestError, match="307200 samples in a request, more than 4096"):
            server._sequences(protocol.parse(protocol.GenerateBody, json.dumps(body).encode()))
    finally:
        stop(engine)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(model: Model, temperature: float) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        asked = [([3, 4], SamplingParams(max_new_tokens=8, temperature=t)) for t in (0.0, temperature)]
        greedy, tiny = serve(engine, asked)
        assert tiny == greedy
    finally:
        stop(engine)


def test_a_row_that_is_not_finite_fails_its_own_request(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    prefill = model.prefill

    def broken(token_ids_BT: Tensor, *args: object) -> Tensor:
        logits_BV = prefill(token_ids_BT, *args)
        return torch.where((token_ids_BT[:, :1] == 7), torch.nan, logits_BV)

    monkeypatch.setattr(model, "prefill", broken)
    try:
        params = SamplingParams(max_new_tokens=4, sampling_seed=1)
        sequences = [engine.new_sequence(str(i), ids, params) for i, ids in enumerate(([3, 4], [7, 4], [3, 4]))]
        engine.submit(sequences)
        with pytest.raises(FloatingPointError, match="the weights are broken"):
            sequences[1].done.result(60)
        first, last = (sequences[i].done.result(60) for i in (0, 2))
        assert first.output_ids == last.output_ids
        assert engine.failure is None
    finally:
        stop(engine)


def test_many_requests_are_aborted_at_once(model: Model) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        engine.call(lambda: engine.pause("in_place")).result(10)
        sequences = [engine.new_sequence(str(i), [3, 4], SamplingParams(max_new_tokens=2)) for i in range(4000)]
        kept = engine.new_sequence("kept", [3, 4], SamplingParams(max_new_tokens=2))
        engine.submit([*sequences, kept])
        rids = {s.rid for s in sequences}
        assert engine.call(lambda: engine.abort(rids)).result(5) == 4000
        assert all(s.done.result(5).finish_reason["type"] == "abort" for s in sequences)
        assert not kept.done.done()
    finally:
        stop(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_broken_weights_on_disk_are_refused(tmp_path: Path, value: float) -> None:
    for file in Path(demo_model_path()).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = min(weights)
    weights[name].view(-1)[-1] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Model.from_pretrained(demo_model_path(), max_len=64)
    before = model.named_weights[name].clone()
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        with pytest.raises(BadRequestError, match=f"{re.escape(name)} holds nan, or a value beyond 1e\\+15"):
            WeightUpdater(engine, timeout_s=5).update_from_disk(protocol.UpdateFromDiskBody(model_path=str(tmp_path)))
        assert torch.equal(model.named_weights[name], before)
    finally:
        stop(engine)
