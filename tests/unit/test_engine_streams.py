"""Rows of a model's streams: the embedded engine computes each row once, for the tokens that were asked for."""

import asyncio
import base64
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines import replies
from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.engines.connected import ConnectedEngines, LoopThread
from bapo_megatron.engines.embedded.engine import BatchingEngine, Sequence
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.server import Server
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.errors import EngineError, RequestRefusedError, UserError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import FAMILIES, Family
from bapo_megatron.hf.streams import ModelStream, ServedTokens
from bapo_megatron.tokens import TokenStream
from tests.distributed import HANG_S
from tests.unit.test_embedded_engine import answer_to


def marks(tokens: ServedTokens) -> Tensor:
    """Return token and position, with layer and version: [B, T, 2]."""
    assert tokens.layer is not None
    assert tokens.hidden_BTE is not None
    assert tokens.hidden_BTE.shape[:2] == tokens.token_ids_BT.shape
    first_BT = tokens.token_ids_BT + 16 * tokens.layer
    return torch.stack([first_BT, (100 * (tokens.version + 1) + tokens.positions_BT).expand_as(first_BT)], -1)


def norms(tokens: ServedTokens) -> Tensor:
    assert tokens.hidden_BTE is not None
    return tokens.hidden_BTE.norm(dim=-1)


def surprises(tokens: ServedTokens) -> Tensor:
    """Return the log-probs of sampled tokens."""
    assert tokens.logits_BV is not None
    return tokens.logits_BV.log_softmax(-1).gather(1, tokens.token_ids_BT)


DECLARED = (
    ModelStream(
        lambda shape: TokenStream("marks", "uint8", (shape.num_layers, 2), on="fed", to="owner's stage"), marks
    ),
    ModelStream(lambda shape: TokenStream("norms", "float32", on="fed"), norms),
    ModelStream(lambda shape: TokenStream("surprises", "float32"), surprises),
)


def family_with(*streams: ModelStream) -> Family:
    return replace(FAMILIES["qwen3"], streams=streams)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained(demo_model_path(), max_len=64, own=family_with(*DECLARED))


@pytest.fixture
def engine(model: Model) -> Iterator[BatchingEngine]:
    engine = BatchingEngine(model, max_running=9, max_context=64, version="0")
    yield engine
    engine.call(sys.exit)
    engine.ended.result(HANG_S)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    ids = [torch.randint(2, 16, (length,), generator=generator).tolist() for length in lengths]
    return [*ids, *ids[:3]]  # some appear twice, and are prefilled once


def grow(engine: BatchingEngine, asked: list[tuple[list[int], int]], num_tokens: int) -> list[Sequence]:
    """Continue each list of tokens, for which the rows of the first `num_fed` inputs are known."""
    streams = tuple(engine.model.streams)
    sequences = [
        engine.new_sequence(
            str(i),
            ids,
            SamplingParams(max_new_tokens=num_tokens, sampling_seed=i, ignore_eos=True),
            streams=streams,
            num_fed=num_fed,
        )
        for i, (ids, num_fed) in enumerate(asked)
    ]
    engine.submit(sequences)
    for sequence in sequences:
        sequence.done.result(HANG_S)
    return sequences


def versions_of(sequence: Sequence) -> list[int]:
    """Return the version that read each input: it sampled the next token, or ran the prefill before the first."""
    sampled = [int(s["version"]) for s in sequence.spans for _ in range(s["start"], s["end"])]
    return [sampled[0]] * (len(sequence.prompt_ids) - 1) + sampled


def check(sequence: Sequence, num_fed: int) -> None:
    rows = {stream.name: torch.cat(parts) for stream, parts in sequence.rows.items()}
    ids, versions = sequence.token_ids, versions_of(sequence)
    expected = [
        [[ids[i] + 16 * layer, (100 * (versions[i] + 1) + i) % 256] for layer in range(rows["marks"].shape[1])]
        for i in range(num_fed, len(ids) - 1)
    ]
    assert rows["marks"].tolist() == expected
    assert rows["norms"].shape == (len(expected),)
    assert (rows["norms"] > 0).all()
    assert rows["surprises"].tolist() == pytest.approx(sequence.logprobs, abs=1e-6)


def test_each_input_has_one_row_whatever_happens_to_its_request(
    engine: BatchingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests continue from what was kept; weights change in the middle, and the cache is dropped."""
    asked = [(ids, 0) for ids in prompts(9)]
    for num_tokens in (4, 7):
        sequences = grow(engine, asked, num_tokens)
        for sequence, (_, num_fed) in zip(sequences, asked, strict=True):
            check(sequence, num_fed)
        asked = [(s.token_ids, s.num_tokens - 1) for s in sequences]
    assert any(s.num_cached_tokens for s in sequences), "some were continued from the cache"

    appended, append = [], engine.model.append
    monkeypatch.setattr(engine.model, "append", lambda ids, *a: appended.append(len(ids)) or append(ids, *a))
    streams = tuple(engine.model.streams)
    sequences = [
        engine.new_sequence(
            str(i),
            [*ids, *[3, 4, 5][: 1 + i % 3]],  # given tokens
            SamplingParams(max_new_tokens=9, sampling_seed=i, ignore_eos=True),
            streams=streams,
            num_fed=num_fed,
        )
        for i, (ids, num_fed) in enumerate(asked[:4])
    ]

    def change_weights() -> None:
        if len(sequences[0].output_ids) == 4:
            engine.call(lambda: engine.pause("retract"))
            engine.call(lambda: engine.publish("1"))
            engine.call(engine.resume)

    sequences[0].on_token = change_weights
    engine.submit(sequences)
    for sequence, (_, num_fed) in zip(sequences, asked, strict=False):
        check(sequence.done.result(HANG_S), num_fed)
        assert [span["version"] for span in sequence.spans] == ["0", "1"]
        assert sequence.num_retractions == 1
    assert appended, "some were continued from the cache, after given tokens"


def test_rows_that_a_client_has_lost_are_computed_again(engine: BatchingEngine) -> None:
    (first,) = grow(engine, [([5, 9, 4], 0)], 6)
    (again,) = grow(engine, [(first.token_ids, 2)], 3)
    assert again.num_cached_tokens == 0, "the kept cache has no rows"
    check(again, 2)


class Scripted(HttpEngine):
    """A client that always gets the same replies, and notes what it was asked for."""

    def __init__(self, reply: Any, info: dict[str, Any] | None = None) -> None:
        super().__init__("http://engine:1", request_timeout_s=HANG_S, vocab_size=16)
        self.reply, self.info = reply, info
        self.asked: list[tuple[str, Any]] = []

    async def send_request(self, method: str, path: str, body: Any = None, **_: Any) -> bytes:
        self.asked.append((path, body))
        return json.dumps(self.reply if path == "/generate" else self.info).encode()


def test_a_reply_brings_the_rows_that_were_asked_for(engine: BatchingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test sees the rows as the client reads them."""
    server, streams = Server(engine, model_path="", update_timeout_s=HANG_S), tuple(engine.model.streams)
    submit, submitted = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda sequences: submitted.extend(sequences) or submit(sequences))
    request = GenerateRequest("r", (5, 9, 4, 7), 5, 1.0, (), 0, streams=streams, num_fed=3)
    names = [stream.name for stream in streams]
    body = {"rid": "r", "input_ids": [5, 9, 4, 7], "return_logprob": True, "return_rows": names, "num_fed": 3}
    body |= {"sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    status, reply = answer_to(server, body)
    assert status == 200
    (sequence,) = submitted
    client = Scripted(reply)
    rows = asyncio.run(client.generate(request)).rows
    for stream, found in rows.items():
        assert np.array_equal(found, torch.cat(sequence.rows[stream]).numpy())
    assert [len(found) for found in rows.values()] == [6, 6, 5]

    for changed, said in (
        ({"return_rows": ["routes"]}, "no stream 'routes'"),
        ({"num_fed": 0}, "num_fed"),
        ({"num_fed": 5}, "num_fed"),
    ):
        status, refusal = answer_to(server, {**body, **changed})
        assert status == 400
        assert said in refusal["message"]
    fields = reply["meta_info"]["rows"]
    for name, value, said in (
        ("marks", None, "stream marks: the reply has no rows for it"),
        ("marks", fields["marks"][:32], r"stream marks: rows of shape \[3, 4, 2\], not \[6, 4, 2\]"),
        ("norms", [1.0], r"stream norms: rows of shape \[1\], not \[6\]"),
        ("surprises", fields["marks"], "stream surprises: must be a list of numbers"),
    ):
        reply["meta_info"]["rows"] = {n: v for n, v in {**fields, name: value}.items() if v is not None}
        with pytest.raises(RequestRefusedError, match=f"http://engine:1, request r: {said}"):
            asyncio.run(client.generate(request))


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (lambda: TokenStream("mask", "bool"), "stream mask: the name is taken"),
        (lambda: TokenStream("marks", "bool"), "stream marks: the name is taken"),
        (lambda: TokenStream("mine", "uint8", on="token"), "stream mine: engines return rows of sampled or fed tokens"),
        (lambda: TokenStream("mine", "uint8", kept=False), "stream mine: engines return rows of sampled or fed tokens"),
        (lambda: TokenStream("mine", "uint9"), "stream mine: numpy and torch do not both have the type uint9"),
        (
            lambda: TokenStream("mine", "uint8", to="owner's stage"),
            "stream mine: the shape of a row must begin with the layers",
        ),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(stream, said: str) -> None:
    family = family_with(*DECLARED, ModelStream(lambda shape: stream(), marks))
    with pytest.raises(UserError, match=f"model family qwen3: {said}"):
        _ = ModelFacts.of(demo_model_path(), family).streams
    assert ModelFacts.of(demo_model_path()).streams == {}


ROUTED = TokenStream(
    "routes", "uint8", (3, 2), missing=255, on="fed", least=0, most=199, distinct=True, on_request=True
)
SGLANG = {"weight_version": "3", "enable_return_routed_experts": True}


def routed(rid: str, num_prompt: int, num_fed: int) -> GenerateRequest:
    return GenerateRequest(rid, tuple(range(num_prompt)), 2, 1.0, (), 0, streams=(ROUTED,), num_fed=num_fed)


def of_sglang(request: GenerateRequest, rows: Any) -> dict[str, Any]:
    """Return SGLang's reply of two tokens, with these routes; None means without the server's flag."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(request.token_ids),
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
    }
    if rows is not None:
        meta["routed_experts"] = base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()
    return {"output_ids": [7, 9], "meta_info": meta}


class Served(Scripted):
    """A client of an SGLang server with these routes for the inputs of each request, by rid."""

    def __init__(self, routes: dict[str, Any]) -> None:
        super().__init__(None, SGLANG)
        self.routes = routes
        self.versions = dict.fromkeys(routes, "3")  # by rid
        self.failing: set[str] = set()  # rids

    async def send_request(self, method: str, path: str, body: Any = None, **_: Any) -> bytes:
        if path == "/generate":
            several = isinstance(body["rid"], list)
            rids, prompts = (body[name] if several else [body[name]] for name in ("rid", "input_ids"))
            replies = []
            for rid, prompt in zip(rids, prompts, strict=True):
                reply = of_sglang(routed(rid, len(prompt), 1), self.routes[rid][body["routed_experts_start_len"] :])
                reply["meta_info"]["weight_versions"][0]["version"] = self.versions[rid]
                replies.append({} if rid in self.failing else reply)
            self.reply = replies if several else replies[0]
        return await super().send_request(method, path, body)

    def calls(self) -> list[tuple[Any, int]]:
        """Return the requests of each call, and the input token from which it wants routes."""
        return [(body["rid"], body["routed_experts_start_len"]) for path, body in self.asked if path == "/generate"]


def any_routes(num_inputs: int) -> Any:
    return np.random.default_rng(num_inputs).permuted(np.tile(np.arange(200), (num_inputs, 3, 1)), axis=2)[..., :2]


def test_the_routes_of_sglang_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows that the client lacks are sent: requests that have different numbers of rows are in different calls."""
    monkeypatch.setattr(replies, "_ROUTES_PIECE", 16)  # 3 numbers
    requests = [routed("whole", 4, 1), routed("grown", 6, 5), routed("as long", 5, 1)]
    client = Served({"whole": any_routes(5), "grown": any_routes(7), "as long": any_routes(6)})
    results = asyncio.run(client.generate_many(requests))
    for request, result in zip(requests, results, strict=True):
        assert result.rows[ROUTED].tolist() == client.routes[request.rid][request.num_fed - 1 :].tolist()
        assert result.rows[ROUTED].dtype == np.uint8
    assert asyncio.run(client.generate(requests[1])).rows[ROUTED].tolist() == results[1].rows[ROUTED].tolist()
    assert [path for path, _ in client.asked] == ["/server_info", "/model_info"] + ["/generate"] * 3
    assert client.calls() == [(["whole", "as long"], 0), (["grown"], 4), ("grown", 4)]
    assert all("return_rows" not in body for path, body in client.asked if path == "/generate")


def test_the_rows_of_a_groups_prompt_come_once() -> None:
    group = [routed(f"1.{i}", 6, 1) for i in range(3)]
    others = [routed("2.0", 5, 1), routed("1.3", 8, 7)]
    routes = {request.rid: any_routes(len(request.token_ids) + 1) for request in (*group, *others)}
    for request in group[1:]:
        routes[request.rid] = np.concatenate([routes["1.0"][:5], any_routes(9)[:2]])
    client = Served(routes)
    results = asyncio.run(client.generate_many([*group, *others]))
    for request, result in zip([*group, *others], results, strict=True):
        assert result.rows[ROUTED].tolist() == routes[request.rid][request.num_fed - 1 :].tolist()
    assert client.calls() == [(["1.0", "2.0"], 0), (["1.1", "1.2"], 5), (["1.3"], 6)]


@pytest.mark.parametrize("is_newer", [False, True])
def test_rows_of_a_prompt_are_not_shared_over_weight_versions_or_a_failure(is_newer: bool) -> None:
    """The dispatcher repeats a request whose result is an error."""
    group = [routed(f"1.{i}", 6, 1) for i in range(3)]
    client = Served(dict.fromkeys(["1.0", "1.1", "1.2"], any_routes(7)))
    client.versions["1.1"] = "4"
    client.failing = set() if is_newer else {"1.0"}
    first, *others = asyncio.run(client.generate_many(group))
    assert isinstance(first, EngineError) is not is_newer
    for other in others[: 1 if is_newer else 2]:
        assert isinstance(other, EngineError)
        assert re.search("request 1.[12]: no reply has its prompt's rows from the same weights", str(other))
    if is_newer:
        assert others[1].rows[ROUTED].tolist() == client.routes["1.2"].tolist()


def test_a_call_that_fails_ends_the_others_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request may outlive the calls: it is about to be repeated."""
    client, ended = Served({"whole": any_routes(5), "grown": any_routes(7)}), []
    send = client.send_request

    async def send_some(method: str, path: str, body: Any = None, **limits: Any) -> bytes:
        if path == "/generate" and body["rid"] == ["whole"]:
            raise EngineError("lost")
        await asyncio.sleep(0)
        ended.append(path)
        return await send(method, path, body, **limits)

    monkeypatch.setattr(client, "send_request", send_some)
    with pytest.raises(EngineError, match="lost"):
        asyncio.run(client.generate_many([routed("whole", 4, 1), routed("grown", 6, 5)]))
    assert ended.count("/generate") == 1


GOOD = np.tile([4, 9], (3, 3, 1))


def changed(token: int, layer: int, experts: list[int]) -> Any:
    rows = GOOD.copy()
    rows[token, layer] = experts
    return rows


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "the reply has no routed_experts: start SGLang with --enable-return-routed-experts (sglang.extra.enab"),
        (GOOD[:2], "routed_experts has 12 numbers instead of 18, for 3 tokens from 4 on x 3 x 2 (layers x chosen exp"),
        (np.tile(GOOD, (1, 2, 1)), "routed_experts has 36 numbers instead of 18"),
        (
            changed(1, 2, [200, 0]),
            "input token 5 has expert 200 in layer 2, but the last of the model's experts is 199",
        ),
        (changed(2, 0, [7, -1]), "input token 6 has expert -1 in layer 0"),
        (changed(2, 1, [260, 4]), "input token 6 has expert 260 in layer 1"),
        (changed(1, 1, [5, 5]), "stream routes: row 1 has 5 twice"),
    ],
)
def test_routes_that_do_not_fit_are_named(rows: Any, said: str) -> None:
    request = routed("r", 6, 5)
    with pytest.raises(RequestRefusedError, match=rf"^http://engine:1, request r: .*{re.escape(said)}"):
        asyncio.run(Scripted(of_sglang(request, rows), SGLANG).generate(request))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (SGLANG, None),
        ({"weight_version": "3"}, "start an SGLang server with --enable-return-routed-experts"),
        ({"weight_version": "3", "streams": []}, "http://engine:1 does not return the stream routes"),
        ({"weight_version": "3", "streams": ["routes"]}, None),
    ],
)
def test_a_server_without_a_stream_on_request_is_refused_at_the_start(info: dict[str, Any], said: str | None) -> None:
    client = Scripted(None, info)
    engines = ConnectedEngines([client], HANG_S, LoopThread())
    try:
        if said is None:
            engines._check_streams(client, [ROUTED])
        else:
            with pytest.raises(UserError, match=said):
                engines._check_streams(client, [ROUTED])
    finally:
        engines.close()
