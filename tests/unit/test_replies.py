"""Replies of many tokens, decoded and checked as arrays, mean what their fields say."""

import asyncio
import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given
from hypothesis import strategies as st
from reply_meaning import FaultyReplyError, meaning

from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.replies import REPLY, decode, parse_reply, parse_scores
from bapo_megatron.engines.replies import SCORES as REPLY_WITH_SCORES
from bapo_megatron.errors import EngineError, RequestRefusedError
from bapo_megatron.tokens import sampler_streams
from tests.hang import HANG_S

REQUEST = GenerateRequest("r", (1, 2), max_new_tokens=6, temperature=1.0, stop_token_ids=(), seed=0)

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from(
        [
            -(10**400),
            10**18,
            "1_0",
            " 3 ",
            "٣",
            "9" * 18,
            "9" * 19,
            "-1",
            2**64,
            2**63,
            -1,
            "7",
            "",
            [],
            {},
            [None],
            -0.0,
            1e-5,
            2e-4,
            1e-400,
        ]
    ),
    st.floats(),
)
odd_logprobs = st.sampled_from([2e-4, 1.01e-4, 0.5, 1e-4, math.nan, math.inf, -math.inf, True, "0"]) | odd
logprobs = st.floats(max_value=1e-4, allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 0)


@st.composite
def replies(draw: st.DrawFn) -> Any:
    """Return a good reply in which at most two values are replaced by odd ones."""
    ids = draw(st.lists(st.integers(0, 9), max_size=7))  # one more than requested
    ends = sorted({*draw(st.lists(st.integers(0, len(ids)), max_size=2)), len(ids)})
    starts = [0, *ends][: len(ends)]
    versions = st.sampled_from(["default", "0", "12", 3])
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": draw(st.sampled_from(["stop", "length", "abort"])), "matched": 7},
        "prompt_tokens": 2,
        "cached_tokens": draw(st.integers(0, 2)),
        "output_token_logprobs": [[draw(logprobs), i, *draw(st.sampled_from([(), (None,), ("text", 1)]))] for i in ids],
        "weight_versions": [
            {"version": draw(versions), "start": s, "end": e} for s, e in zip(starts, ends, strict=True)
        ],
        "e2e_latency": 0.5,
    }
    reply: dict[str, Any] = {"text": "]],", "output_ids": ids, "meta_info": meta}
    places: list[tuple[Any, Any]] = [(reply, key) for key in reply] + [(meta, key) for key in meta]
    places += [(ids, i) for i in range(len(ids))]
    places += [(meta["output_token_logprobs"], i) for i in range(len(ids))]
    places += [(entry, i) for entry in meta["output_token_logprobs"] for i in range(len(entry))]
    places += [(span, key) for span in meta["weight_versions"] for key in span]
    for container, key in draw(st.lists(st.sampled_from(places), max_size=2)):
        is_logprob = key == 0 and any(container is entry for entry in meta["output_token_logprobs"] or ())
        container[key] = draw(odd_logprobs if is_logprob else odd)
    return draw(odd) if draw(st.integers(0, 30)) == 30 else reply


def bits(result: GenerateResult) -> Any:
    """Return a key that is equal for equal results, and tells -0.0 from 0.0."""
    values = (getattr(result, field.name) for field in fields(result))
    return [(value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values]


def right(num_tokens: int, *, logprob: float = -0.5, ends: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return a right reply, except for a log-prob above 0 if asked, with adjacent ranges that end at `ends`."""
    ends = ends or (num_tokens,)
    spans = [{"version": "3", "start": start, "end": end} for start, end in zip((0, *ends), ends, strict=False)]
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": 2, "weight_versions": spans}
    return {
        "output_ids": [7] * num_tokens,
        "meta_info": meta | {"output_token_logprobs": [[logprob, 7] for _ in range(num_tokens)]},
    }


@given(replies(), st.sampled_from([10, 5, None]), st.sampled_from([(",", ":"), (", ", ": ")]))
@example({"output_ids": [7], "meta_info": None}, 10, (",", ":"))
@example(right(6), 10, (",", ":"))
@example(right(7), 10, (",", ":"))
@example(right(2, logprob=9e-5), 10, (",", ":"))
@example(right(2, logprob=1.1e-4), 10, (",", ":"))
@example(right(3, ends=(2,)), 10, (",", ":"))
@example(right(3, ends=(4,)), 10, (",", ":"))
@example(right(3, ends=(2, 1, 3)), 10, (",", ":"))
def test_a_reply_is_read_by_its_meaning_or_refused_for_a_fault(
    reply: Any, vocab_size: int | None, separators: tuple[str, str]
) -> None:
    raw = json.dumps(reply, separators=separators).encode()
    try:
        expected = meaning(json.loads(raw), REQUEST, vocab_size)
    except FaultyReplyError as faulty:
        with pytest.raises(ValueError, match="|".join(map(re.escape, faulty.faults))):
            parse_reply(decode(raw, REPLY), REQUEST, vocab_size)
    else:
        assert bits(parse_reply(decode(raw, REPLY), REQUEST, vocab_size)) == bits(expected)


@given(st.binary(max_size=40) | st.text(alphabet='[]{}":,0-9a.\\u', max_size=30).map(str.encode))
def test_a_body_that_is_no_reply_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the reply has no output_ids$"):
        parse_reply(decode(raw, REPLY), REQUEST, 10)


def test_one_bad_reply_of_a_call_spares_the_others() -> None:
    def reply(index: int, logprob: float | None) -> dict[str, Any]:
        meta = {
            "id": f"r{index}",
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "output_token_logprobs": [[logprob, 7, None]],
        }
        return {"output_ids": [7], "meta_info": meta}

    async def answer(request: web.Request) -> web.Response:
        sent = await request.json()
        assert sent["input_ids"] == [[1, 2]] * 4
        assert sent["sampling_params"][0]["max_new_tokens"] == 6
        body = json.dumps([reply(0, -0.25), reply(1, None), reply(2, math.nan), reply(3, -0.125)])
        return web.Response(text=body, content_type="application/json")

    async def run() -> list[GenerateResult | EngineError]:
        app = web.Application()
        app.router.add_post("/generate", answer)
        async with TestServer(app) as server:
            engine = HttpEngine(str(server.make_url("")), request_timeout_s=HANG_S, vocab_size=10)
            requests = [
                GenerateRequest(f"r{i}", (1, 2), max_new_tokens=6, temperature=1.0, stop_token_ids=(), seed=0)
                for i in range(4)
            ]
            results = await engine.generate_many(requests)
            await engine.close()
            return results

    first, none, nan, last = asyncio.run(run())
    assert isinstance(first, GenerateResult)
    assert isinstance(last, GenerateResult)
    assert (*first.behaviour_logprobs, *last.behaviour_logprobs) == (-0.25, -0.125)
    for error, shown in ((none, "None"), (nan, "nan")):
        assert f"log-prob {shown} at output token 0 is not a finite number <= 0" in str(error)


SCORES = [None, [-0.5, 7, None], [-1, 8, None]]
LIKELIEST = [None, [[-0.5, 7], [-2.0, 1]], [[-0.25, 3], [-1, 8]]]


def test_scores_are_read() -> None:
    meta = {"input_token_logprobs": [[None, 5, None], *SCORES[1:]], "input_top_logprobs": LIKELIEST}
    plain = {"meta_info": meta | {"weight_version": "4"}}
    for reply in (plain, decode(json.dumps(plain).encode(), REPLY_WITH_SCORES)):
        scores = parse_scores(reply, (7, 8), 2)
        assert scores.logprobs_N.tolist() == [-0.5, -1.0]
        assert scores.top_ids_NK.tolist() == [[7, 1], [3, 8]]
        assert scores.top_logprobs_NK.tolist() == [[-0.5, -2.0], [-0.25, -1.0]]
        assert parse_scores(reply, (7, 8), 0).top_ids_NK.shape == (2, 0)
        assert scores.version == 4
    last = {"meta_info": {"input_token_logprobs": [None, [-0.5, 7], [-1, 0]]}}
    assert parse_scores(last, (7, 15), 0).logprobs_N.tolist() == [-0.5, -1.0], "SGLang's name of the last token"
    for version in ({}, {"weight_version": "default"}, {"weight_version": "mine, of Monday"}):
        assert parse_scores({"meta_info": meta | version}, (7, 8), 2).version == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_token_logprobs": None}, "input_token_logprobs is not a list of 3 entries; does the server score"),
        ({"input_token_logprobs": SCORES[:2]}, "input_token_logprobs is not a list of 3 entries"),
        ({"input_token_logprobs": [None, None, [-1, 8]]}, "input_token_logprobs: Expected `array`, got `null`"),
        ({"input_token_logprobs": [None, [-math.inf, 7], [-1, 8]]}, "not a finite number <= 0"),
        ({"input_token_logprobs": [None, [0.5, 7], [-1, 8]]}, "not a finite number <= 0"),
        ({"input_token_logprobs": [None, [None, 7], [-1, 8]]}, "not a finite number <= 0"),
        ({"input_token_logprobs": [None, [-0.5, 7], [-1, 9]]}, "of other tokens than those that were sent"),
        ({"input_top_logprobs": [None, [[-0.5, 7]], [[-0.25, 3]]]}, "does not have 2 entries for each token"),
        ({"input_top_logprobs": [None, [[-0.5, 7], [-2, "a"]], LIKELIEST[2]]}, "input_top_logprobs: Expected `int`"),
    ],
)
def test_bad_scores_are_refused(change: dict[str, Any], message: str) -> None:
    meta = {"input_token_logprobs": SCORES, "input_top_logprobs": LIKELIEST} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_scores({"meta_info": meta}, (7, 8), 2)


CUT = replace(REQUEST, top_p=0.9, top_k=5)


def cut_reply(**meta: Any) -> dict[str, Any]:
    spans = [{"version": "3", "start": 0, "end": 2}]
    fields: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "weight_versions": spans,
        "output_token_logprobs": [[-3.5, 7], [-1, 8]],
    }
    return {"output_ids": [7, 8], "meta_info": fields | meta}


def read(reply: dict[str, Any]) -> GenerateResult:
    return parse_reply(decode(json.dumps(reply).encode(), REPLY), CUT, 10)


def test_log_probs_of_a_cut_are_those_of_what_it_leaves() -> None:
    assert read(cut_reply(output_token_sampling_logprobs=[-1.25, 0])).behaviour_logprobs.tolist() == [-1.25, 0.0]
    nothing = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_versions": []}}
    assert read(nothing).behaviour_logprobs.tolist() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([-1.0], "output_token_sampling_logprobs has length 1, output_ids has length 2"),
        ([-1.0, math.nan], "nan at output token 1 is not a finite number <= 0"),
        ([0.5, -1.0], "0.5 at output token 0 is not"),
        ([-1.0, -math.inf], "-inf at output token 1"),
        ([-1.0, None], "Expected `float`, got `null`"),
        (["a", -1.0], "Expected `float`, got `str`"),
        ({"7": -1.0}, "Expected `array`, got `object`"),
        ([-1.0, -(10**400)], "output_token_sampling_logprobs"),
    ],
)
def test_bad_log_probs_of_a_cut_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(cut_reply(output_token_sampling_logprobs=given))


@pytest.mark.parametrize("together", [True, False])
def test_a_server_without_log_probs_of_a_cut_is_refused_at_once(together: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        sent = await request.json()
        assert sent["return_sampling_mask"] is True
        sampling = sent["sampling_params"][0] if together else sent["sampling_params"]
        assert (sampling["top_p"], sampling["top_k"]) == (0.9, 5)
        return web.json_response([cut_reply()] if together else cut_reply())

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        async with TestServer(app) as server:
            engine = HttpEngine(str(server.make_url("")), request_timeout_s=HANG_S, vocab_size=10)
            asking: Any = engine.generate_many([CUT]) if together else engine.generate(CUT)
            with pytest.raises(RequestRefusedError, match=rf"{engine.url}, request r: .*that top_p and top_k need"):
                await asking
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("foreign", [10, -1])
def test_a_token_outside_the_vocabulary_is_not_sent(foreign: int) -> None:
    engine = HttpEngine("http://127.0.0.1:1", request_timeout_s=1, vocab_size=10)
    request = GenerateRequest("r", (1, foreign), max_new_tokens=1, temperature=1.0, stop_token_ids=(), seed=0)
    with pytest.raises(EngineError, match=f"token id {foreign} is outside the vocabulary of 10; do tokenizer"):
        asyncio.run(engine.generate(request))


TOP = replace(REQUEST, streams=sampler_streams(2, 10))
ROW = [[-0.1, 7, None], [-2.5, 3, None]]


def with_tops(given: Any, num_tokens: int = 1) -> dict[str, Any]:
    reply = right(num_tokens)
    reply["meta_info"]["output_top_logprobs"] = given
    return reply


@pytest.mark.parametrize("kind", ["typed", "plain"])
def test_likeliest_tokens_are_read(kind: str) -> None:
    raw = json.dumps(with_tops([ROW, [[5e-5, 0], [-1e30, 9]]], 2)).encode()
    found = parse_reply(decode(raw, REPLY) if kind == "typed" else json.loads(raw), TOP, 10)
    ids, logprobs = found.rows.values()
    assert (ids.tolist(), ids.dtype) == ([[7, 3], [0, 9]], np.int32)
    assert logprobs[0].tolist() == [np.float32(-0.1), -2.5]
    assert logprobs[1, 0] == 0, "rounding may put a log-prob above 0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "output_top_logprobs is not a list for each of 1 output token"),
        ([], "output_top_logprobs is not a list for each of 1 output token"),
        ([ROW, ROW], "output_top_logprobs is not a list for each of 1 output token"),
        ([None], "output_top_logprobs is not a list for each of 1 output token"),
        ([ROW[:1]], "output_top_logprobs does not have 2 entries for each token"),
        ([[]], "output_top_logprobs does not have 2 entries for each token"),
        ([[*ROW, ROW[0]]], "output_top_logprobs does not have 2 entries for each token"),
        ([[ROW[0], [0.5, 3]]], "output_top_logprobs: a log-prob is not a finite number <= 0"),
        ([[ROW[0], [None, 3]]], "output_top_logprobs: Expected `float`, got `null`"),
        ([[ROW[0], ["x", 3]]], "output_top_logprobs: Expected `float`, got `str`"),
        ([[ROW[0], [-1.0]]], "output_top_logprobs: "),
        ([[ROW[0], [-1.0, 2**40]]], "output_top_logprobs: a token id is outside the vocabulary"),
        ([[ROW[0], [-1.0, 2**70]]], "output_top_logprobs: "),
        ([[ROW[0], [-1.0, 10]]], "stream sampler_top_ids: row 0 has 10, not <= 9"),
        ([[ROW[0], [-1.0, -1]]], "output_top_logprobs: a token id is outside the vocabulary"),
        ([[ROW[0], [-1.0, 7]]], "stream sampler_top_ids: row 0 has 7 twice"),
    ],
)
def test_bad_likeliest_tokens_are_refused(given: Any, message: str) -> None:
    raw = json.dumps(with_tops(given)).encode()
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_reply(decode(raw, REPLY), TOP, 10)
