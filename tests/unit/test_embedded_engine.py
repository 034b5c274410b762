"""What the embedded engine samples depends on the requests of one call and the weights, and on nothing before."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.embedded.engine import BatchingEngine
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.server import Server
from bapo_megatron.engines.embedded.server import serve as serve_http

MAX_RUNNING = 6
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
        fresh.stop()
        used.stop()


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
