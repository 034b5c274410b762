"""What the embedded engine samples depends on the requests of one call and the weights, and on nothing before; a
request that continues an earlier one finds what the earlier one left in the cache."""

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.base import ALL_MEMORY
from bapo_megatron.engines.embedded import protocol
from bapo_megatron.engines.embedded.engine import BatchingEngine, Sequence
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.server import Server
from bapo_megatron.engines.embedded.server import serve_engine as serve_http
from bapo_megatron.engines.embedded.weights import WeightUpdater
from bapo_megatron.runtime.bodies import BadRequestError, parse
from tests.distributed import HANG_S
from tests.garbage import tensors_in_cycles
from tests.hybrid_model import save_hybrid

MAX_RUNNING = 6
GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}
Sampled = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=["full", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with full attention, or with linear attention too."""
    folder = demo_model_path()
    if request.param == "hybrid":
        folder = tmp_path_factory.mktemp("hybrid")
        save_hybrid(folder, 0, 64, vocab_size=16)
    return Model.from_pretrained(folder, max_len=64)


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return more requests than can run together, of many lengths: they wait, move rows and are prefilled in groups."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(2, 16) for _ in range(rng.randrange(2, 40))],
            SamplingParams(max_new_tokens=rng.randrange(1, 20), sampling_seed=rng.randrange(2**31)),
        )
        for _ in range(20)
    ]


def serve_engine(engine: BatchingEngine, asked: list[tuple[list[int], SamplingParams]]) -> Sampled:
    sequences = [engine.new_sequence(str(i), ids, params) for i, (ids, params) in enumerate(asked)]
    engine.submit(sequences)
    for sequence in sequences:
        sequence.done.result(HANG_S)
    return [(s.output_ids, s.logprobs) for s in sequences]


def answer_to(server: Server, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and reply of a server that is asked to generate."""

    async def post() -> tuple[int, dict[str, Any]]:
        async with TestClient(TestServer(server.app())) as client, client.post("/generate", json=body) as response:
            return response.status, await response.json()

    return asyncio.run(post())


def stop(engine: BatchingEngine) -> None:
    """End the engine thread, as an error in it does."""
    engine.call(sys.exit)
    engine.ended.result(HANG_S)


def test_log_probs_do_not_depend_on_what_was_served_before(model: Model) -> None:
    """The bits are equal: a resumed run meets a new engine, or one that a killed trainer left behind."""
    fresh = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    used = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        expected = serve_engine(fresh, requests(0))
        assert any(len(ids) > 1 for ids, _ in expected)
        serve_engine(used, requests(1))
        left = [used.new_sequence(f"left {i}", ids, params) for i, (ids, params) in enumerate(requests(2))]
        used.submit(left)
        used.call(lambda: used.pause("retract")).result(HANG_S)
        used.call(lambda: used.abort(None)).result(HANG_S)
        used.call(used.resume).result(HANG_S)
        assert serve_engine(used, requests(0)) == expected
        assert serve_engine(fresh, requests(0)) == expected
    finally:
        stop(fresh)
        stop(used)


def test_no_tensor_waits_for_the_garbage_collector(model: Model) -> None:
    """Garbage collections are rare in an engine."""
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        assert tensors_in_cycles(lambda: serve_engine(engine, requests(0))) == []
    finally:
        stop(engine)


def test_a_request_that_continues_another_needs_no_prefill(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, as in a partial rollout, give the same tokens as one request, while others end and free their rows."""
    prefilled: list[tuple[int, int]] = []
    prefill = model.prefill
    monkeypatch.setattr(model, "prefill", lambda ids, *a: prefilled.append(tuple(ids.shape)) or prefill(ids, *a))
    engine = BatchingEngine(model, max_running=32, max_context=64)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 16) for _ in range(rng.randrange(4, 12))] for _ in range(12)]

    def grow(ids: list[list[int]], num_tokens: int) -> list[Sequence]:
        params = [SamplingParams(max_new_tokens=num_tokens, sampling_seed=i, ignore_eos=True) for i in range(12)]
        sequences = [engine.new_sequence(str(i), tokens, params[i]) for i, tokens in enumerate(ids)]
        engine.submit(sequences)
        for sequence in sequences:
            sequence.done.result(HANG_S)
        return sequences

    try:
        whole = grow(prompts, 24)
        engine.call(engine.flush_cache).result(HANG_S)
        prefilled.clear()
        ids = prompts
        logprobs: list[list[float]] = [[] for _ in prompts]
        for num_tokens in (5, 1, 18):
            num_rows = sum(count for count, _ in prefilled)
            sequences = grow(ids, num_tokens)
            if ids is not prompts:
                assert sum(count for count, _ in prefilled) == num_rows, "nothing is computed again"
                assert [s.num_cached_tokens for s in sequences] == [len(tokens) - 1 for tokens in ids]
            ids = [s.token_ids for s in sequences]
            for kept, sequence in zip(logprobs, sequences, strict=True):
                kept += sequence.logprobs
        assert ids == [s.token_ids for s in whole]
        for kept, sequence in zip(logprobs, whole, strict=True):
            assert kept == pytest.approx(sequence.logprobs, abs=1e-5)
        engine.call(lambda: engine.set_weights([])).result(HANG_S)
        engine.call(lambda: engine.publish("1")).result(HANG_S)
        assert not any(s.num_cached_tokens for s in grow(ids, 1)), "other weights"
    finally:
        stop(engine)


def test_a_turn_after_an_answer_computes_only_what_is_new(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns end by a stop token or their limit; the next one follows none to six given tokens."""
    computed: list[int] = []
    for name in ("prefill", "append"):
        original = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda ids, lengths, *a, f=original: computed.append(int(lengths.sum())) or f(ids, lengths, *a)
        )
    engine, rng = BatchingEngine(model, max_running=16, max_context=64), random.Random(2)
    ids = [[rng.randrange(2, 16) for _ in range(rng.randrange(4, 12))] for _ in range(10)]
    ids += [ids[0]] * 3  # greedy, so that they remain equal
    lengths, ends = [0] * len(ids), set()
    try:
        for _ in range(3):
            temperatures = [1.0] * 10 + [0.0] * 3
            params = [
                SamplingParams(max_new_tokens=7, sampling_seed=i, stop_token_ids=[3, 4, 5], temperature=t)
                for i, t in enumerate(temperatures)
            ]
            computed.clear()
            sampled = serve_engine(engine, list(zip(ids, params, strict=True)))
            behind = {tuple(tokens): len(tokens) - length for tokens, length in zip(ids, lengths, strict=True)}
            assert sum(computed) == sum(num for num in behind.values() if num > 1), "one token is decoded with others"
            for i, (output_ids, logprobs) in enumerate(sampled):
                whole = ids[i] + output_ids
                scores, _, _ = model.score(torch.tensor(whole), len(ids[i]), 1)
                assert logprobs == pytest.approx(scores.tolist(), abs=1e-5)
                has_stopped = output_ids[-1] in (1, 3, 4, 5)
                given = [rng.randrange(2, 16) for _ in range(rng.randrange(7) if has_stopped else 0)]
                ends.add(has_stopped)
                lengths[i], ids[i] = len(whole) - 1, whole + (given if i < 10 else [6, 7])
            assert ids[10] == ids[11] == ids[12]
        assert ends == {True, False}
    finally:
        stop(engine)


def test_a_row_is_continued_by_its_own_seed_alone_and_stopped_ones_leave_first(model: Model) -> None:
    engine = BatchingEngine(model, max_running=4, max_context=64)

    def ended(ids: list[int], seed: int | None, **params: Any) -> Sequence:
        params = {"max_new_tokens": 2, "sampling_seed": seed, "temperature": 0.0, **params}
        sequence = engine.new_sequence("", ids, SamplingParams(**params))
        engine.submit([sequence])
        return sequence.done.result(HANG_S)

    try:
        cut = [ended([7 + i, 8, 9], seed, ignore_eos=True) for i, seed in enumerate((1, None))]
        stops = [ended([i, 8, 9], i, stop_token_ids=[*range(16)]) for i in (12, 13)]
        assert [s.finish_reason["type"] for s in (*cut, *stops)] == ["length"] * 2 + ["stop"] * 2  # type: ignore[index]
        assert ended([*cut[0].token_ids, 4], seed=2).num_cached == 0, "another sample's"
        assert ended([*stops[0].token_ids, 4], seed=12).num_cached == 0, "it has left for that request"
        assert ended([*cut[1].token_ids, 4], seed=None).num_cached == 4
        assert ended([*cut[0].token_ids, 4], seed=1).num_cached == 4
    finally:
        stop(engine)


def test_what_outlives_its_weights_is_not_continued(model: Model) -> None:
    engine = BatchingEngine(model, max_running=2, max_context=64)
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    is_paused = threading.Event()

    def pause() -> None:
        engine.pause("in_place")
        is_paused.set()

    def sample(ids: list[int], on_token: Callable[[], Any] | None = None) -> Sequence:
        sequence = engine.new_sequence(str(len(ids)), ids, params)
        sequence.on_token = on_token
        engine.submit([sequence])
        return sequence

    try:
        cut = sample([2, 3, 4, 5], lambda: is_paused.is_set() or engine.call(pause))
        assert is_paused.wait(HANG_S)
        engine.call(lambda: engine.set_weights([])).result(HANG_S)
        for command in (lambda: engine.publish("new"), lambda: engine.abort(None), engine.resume):
            engine.call(command).result(HANG_S)
        ids = cut.done.result(HANG_S).token_ids
        assert 4 < len(ids) < 34
        again = sample(ids)
        assert again.done.result(HANG_S).num_cached_tokens == 0
    finally:
        stop(engine)


def test_rows_that_are_needed_are_taken_from_what_could_be_continued(model: Model) -> None:
    """Aborted requests also leave something; the next ones move into other rows, and take them over."""
    engine = BatchingEngine(model, max_running=8, max_context=64)
    rng = random.Random(1)

    def submit(ids: list[list[int]], num_tokens: int, abort_after: int | None = None) -> list[Sequence]:
        params = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
        sequences = [engine.new_sequence(str(rng.random()), tokens, params) for tokens in ids]

        def abort() -> None:
            if len(sequences[0].output_ids) == abort_after:
                engine.call(lambda: engine.abort(None))  # before the next token

        sequences[0].on_token = abort
        engine.submit(sequences)
        return sequences

    def results(sequences: list[Sequence]) -> list[list[int]]:
        return [s.done.result(HANG_S).token_ids for s in sequences]

    try:
        prompts = sorted([rng.randrange(2, 16) for _ in range(6)] for _ in range(8))  # in the order of their rows
        whole = results(submit(prompts, 40))
        engine.call(engine.flush_cache).result(HANG_S)
        begun = results(submit(prompts, 3))
        others = [[rng.randrange(2, 16) for _ in range(7)] for _ in range(3)]
        results(submit(others, 2))
        mixed = submit([begun[7], others[0], begun[2], begun[5]], 9)
        grown = results(mixed)
        assert [s.num_cached_tokens > 0 for s in mixed] == [True, False, False, True], "rows 0 to 2 were taken"
        assert [grown[0], grown[2], grown[3]] == [whole[i][:18] for i in (7, 2, 5)]
        cut = results(submit([grown[3], grown[0]], 28, abort_after=5))
        assert [len(ids) for ids in cut] == [23, 23]
        rest = submit(cut, 23)
        assert results(rest) == [whole[5], whole[7]]
        assert [s.num_cached_tokens for s in rest] == [22, 22]
    finally:
        stop(engine)


def test_samples_of_one_prompt_share_its_prefill(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    prefill = model.prefill
    monkeypatch.setattr(model, "prefill", lambda ids, *a: shapes.append(tuple(ids.shape)) or prefill(ids, *a))
    engine = BatchingEngine(model, max_running=16, max_context=64)
    try:
        prompts = [[3, 4, 5, 6], [3, 4, 5, 7], [3, 4, 5]]
        asked = [(prompts[i % 3], SamplingParams(max_new_tokens=12, sampling_seed=i)) for i in range(15)]
        together = serve_engine(engine, asked)
        assert shapes == [(3, 4)]
        for request, (ids, logprobs) in zip(asked, together, strict=True):
            ((alone, alone_logprobs),) = serve_engine(engine, [request])
            assert ids == alone
            assert logprobs == pytest.approx(alone_logprobs, abs=1e-5)
    finally:
        stop(engine)


def test_a_server_whose_engine_fails_answers_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would hold its port and answer 500 forever, and nothing would restart it."""
    engine = BatchingEngine(Model.from_pretrained(demo_model_path(), max_len=64), max_running=4, max_context=64)

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(engine.model, "decode", out_of_memory)
    ready = tmp_path / "ready.json"

    async def run() -> tuple[int, str]:
        server = Server(engine, model_path="demo", update_timeout_s=HANG_S)
        serving = asyncio.create_task(
            serve_http(server, host="127.0.0.1", port=0, ready_file=ready, exit_with_parent=False)
        )
        while not ready.exists():
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}/generate"
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            answer = response.status, await response.text()
        await asyncio.wait_for(serving, HANG_S)
        return answer

    status, message = asyncio.run(run())
    assert status == 500
    assert "no room for the cache" in message
    assert isinstance(engine.failure, MemoryError)


def prompt_and(**params: object) -> dict[str, object]:
    return {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4, **params}}


SCORED: dict[str, Any] = {
    "input_ids": [3, 4],
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (protocol.GenerateBody, prompt_and(top_k=2**63), "sampling_params.top_k"),
        (protocol.GenerateBody, {"input_ids": [[3]] * 5000}, "input_ids"),
        (protocol.GenerateBody, prompt_and(max_new_tokens=0), "max_new_tokens=0 and a logprob_start_len go together"),
        (
            protocol.GenerateBody,
            SCORED | {"sampling_params": {}},
            "max_new_tokens=0 and a logprob_start_len go together",
        ),
        (protocol.GenerateBody, prompt_and() | {"top_logprobs_num": 2}, "top_logprobs_num needs return_logprob"),
        (protocol.GenerateBody, SCORED | {"input_ids": [[3, 4]]}, "needs the input_ids of one prompt"),
        (protocol.GenerateBody, SCORED | {"return_logprob": False}, "and return_logprob"),
        (protocol.GenerateBody, {"input_ids": [3.5] * 100_000}, "input_ids.0: must be a valid integer"),
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
        parse(kind, json.dumps(body).encode())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_json_of_many_levels_is_a_bad_request() -> None:
    with pytest.raises(BadRequestError, match="recursion limit"):
        parse(protocol.GenerateBody, b'{"input_ids":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_body_with_too_many_samples_is_refused(model: Model) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        server = Server(engine, model_path="demo", update_timeout_s=HANG_S)
        body = {"input_ids": [[3, 4]] * 300, "sampling_params": {"max_new_tokens": 4, "n": 1024}}
        status, reply = answer_to(server, body)
        assert status == 400
        assert "307200 samples in a request, more than 4096" in reply["message"]
    finally:
        stop(engine)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(model: Model, temperature: float) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        asked = [([3, 4], SamplingParams(max_new_tokens=8, temperature=t)) for t in (0.0, temperature)]
        greedy, tiny = serve_engine(engine, asked)
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
            sequences[1].done.result(HANG_S)
        first, last = (sequences[i].done.result(HANG_S) for i in (0, 2))
        assert first.output_ids == last.output_ids
        assert engine.failure is None
    finally:
        stop(engine)


def test_many_requests_are_aborted_at_once(model: Model) -> None:
    engine = BatchingEngine(model, max_running=MAX_RUNNING, max_context=64)
    try:
        engine.call(lambda: engine.pause("in_place")).result(HANG_S)
        sequences = [engine.new_sequence(str(i), [3, 4], SamplingParams(max_new_tokens=2)) for i in range(4000)]
        kept = engine.new_sequence("kept", [3, 4], SamplingParams(max_new_tokens=2))
        engine.submit([*sequences, kept])
        rids = {s.rid for s in sequences}
        assert engine.call(lambda: engine.abort(rids)).result(HANG_S) == 4000
        assert all(s.done.result(HANG_S).finish_reason["type"] == "abort" for s in sequences)
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
            WeightUpdater(engine, timeout_s=HANG_S).update_from_disk(
                protocol.UpdateFromDiskBody(model_path=str(tmp_path))
            )
        assert torch.equal(model.named_weights[name], before)
    finally:
        stop(engine)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list a process's threads")
def test_the_engine_thread_alone_has_the_threads() -> None:
    """With a second pool, OpenMP counts more threads than cores, and puts waiting threads to sleep."""
    code = f"""if True:
        import os, torch
        torch.set_num_threads(1)
        from bapo_megatron.engines.embedded.engine import BatchingEngine
        from bapo_megatron.engines.embedded.model import Model
        from bapo_megatron.engines.embedded.protocol import SamplingParams
        def num_tasks():
            return len(os.listdir("/proc/self/task"))
        model = Model.from_pretrained({str(demo_model_path())!r}, max_len=64)
        before = num_tasks()
        engine = BatchingEngine(model, max_running=64, max_context=64, num_threads=3)
        sequences = [engine.new_sequence(str(i), [3, 4], SamplingParams(max_new_tokens=2)) for i in range(64)]
        engine.submit(sequences)
        for sequence in sequences:
            sequence.done.result({HANG_S})
        torch.randn(1 << 20).exp()  # the main thread works alone
        of_engine = engine.call(torch.get_num_threads).result({HANG_S})
        print(torch.get_num_threads(), of_engine, num_tasks() - before, flush=True)
        os._exit(0)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.stdout.split() == ["1", "3", "3"], run.stderr


@pytest.mark.parametrize(
    ("token_ids", "start", "top_k", "message"),
    [
        ([3, 4], 1, 0, "logprob_start_len: 1 leaves none of 2 tokens to score"),
        ([3, 4], 0, 17, "top_logprobs_num: 17 exceeds the vocabulary of 16"),
        ([3, 16], 0, 0, "token ids must be in"),
        ([3] * 65, 0, 0, "exceed the context of 64 tokens"),
    ],
)
def test_scores_that_are_not_there_are_refused(
    model: Model, token_ids: list[int], start: int, top_k: int, message: str
) -> None:
    engine = BatchingEngine(model, max_running=1, max_context=64)
    server = Server(engine, model_path="demo", update_timeout_s=HANG_S)
    try:
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top_k,
        }
        status, reply = answer_to(server, body)
        assert status == 400
        assert message in reply["message"]
    finally:
        stop(engine)


def test_released_memory_is_given_back() -> None:
    """The operating system then provides zeros."""
    model = Model.from_pretrained(demo_model_path(), max_len=64)
    engine = BatchingEngine(model, max_running=1, max_context=64)
    try:
        serve_engine(engine, [([3, 4, 5], SamplingParams(max_new_tokens=4))])
        assert engine.cache.data.any()
        assert all(weight.any() for name, weight in model.named_weights.items() if "proj" in name)
        for command in (lambda: engine.pause("retract"), lambda: engine.release(ALL_MEMORY)):
            engine.call(command).result(HANG_S)
        assert not engine.cache.data.any()
        assert not any(weight.any() for weight in model.named_weights.values())
        engine.call(lambda: engine.restore(ALL_MEMORY)).result(HANG_S)
        with pytest.raises(BadRequestError, match="memory of cuda_graph and kv_cache and weights is not released"):
            engine.call(lambda: engine.restore(ALL_MEMORY)).result(HANG_S)
        with pytest.raises(BadRequestError, match="not pushed again"):
            engine.call(lambda: engine.publish("2")).result(HANG_S)
    finally:
        stop(engine)
