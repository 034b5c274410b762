"""The client shares connections, and does not reuse idle ones, which the server may be closing. Its trust ends at
redirects, packed or endless replies, and control characters that a terminal would obey.
"""

import asyncio
import dataclasses
import gzip
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp.connector
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bapo_megatron import trainer
from bapo_megatron.engines import http
from bapo_megatron.engines.base import GenerateRequest, GroupSeat
from bapo_megatron.engines.connected import wait_healthy
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.wire import Bucket, TensorSpec
from bapo_megatron.errors import EngineError, KeyRefusedError
from tests.distributed import HANG_S


def test_requests_share_a_connection_until_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server:
            engine = http.HttpEngine(str(server.make_url("")), request_timeout_s=HANG_S)
            for _ in range(4):
                await engine.resume()
            now_s[0] += 1.01 * http.IDLE_S
            await engine.resume()
            await engine.close()

    now_s = [0.0]  # the client's clock
    monkeypatch.setattr(aiohttp.connector, "monotonic", lambda: now_s[0])
    asyncio.run(run())
    assert len(set(ports[:4])) == 1
    assert ports[4] != ports[0]


# What a reply may not do: send the client elsewhere, need unpacking, or never end.

KEY = "a-key"
REQUEST = GenerateRequest("ask", (3, 4), max_new_tokens=8, temperature=1.0, stop_token_ids=(), seed=1)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(answer: Handler, call: Callable[[http.HttpEngine], Awaitable[Any]], **options: Any) -> Any:
    """Return what a client makes of a server that gives this answer to everything."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server:
            options.setdefault("request_timeout_s", HANG_S)
            engine = http.HttpEngine(str(server.make_url("")), key=KEY, **options)
            try:
                return await call(engine)
            finally:
                await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("call", ["generate", "generate_many", "pause", "server_info"])
def test_a_redirect_is_not_followed(status: int, call: str) -> None:
    """Prompts and the key would go to a host of the server's choice, whose answer would pass for the engine's."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    calls: dict[str, Callable[[http.HttpEngine], Awaitable[Any]]] = {
        "generate": lambda engine: engine.generate(REQUEST),
        "generate_many": lambda engine: engine.generate_many([REQUEST, REQUEST]),
        "pause": lambda engine: engine.pause("retract"),
        "server_info": lambda engine: engine.server_info(),
    }
    with pytest.raises(EngineError, match=f"HTTP {status}: the server redirects to /elsewhere, which is not followed"):
        ask(answer, calls[call])
    assert len(paths) == 1


@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd"])
def test_a_packed_reply_is_refused_unread(packing: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(b"[" * 10**6), headers={"Content-Encoding": packing})

    with pytest.raises(EngineError, match=rf"the reply is compressed \({packing}\)"):
        ask(answer, lambda engine: engine.generate(REQUEST))


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_reply_is_read_no_further_than_a_valid_one_goes(status: int, num_tokens: int) -> None:
    """The rest may have any length: here it never ends, as long as the client listens."""
    sent, hung_up = [0], asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=status)
        await reply.prepare(request)
        try:
            while True:
                await reply.write(b"9" * 1024)
                sent[0] += 1024
        except (ConnectionError, asyncio.CancelledError):
            hung_up.set()
        return reply

    request = dataclasses.replace(REQUEST, max_new_tokens=num_tokens)

    async def call(engine: http.HttpEngine) -> None:
        try:
            await engine.generate(request)
        finally:
            await engine.close()
            await asyncio.wait_for(hung_up.wait(), HANG_S)

    limit = http.max_reply_bytes([request])
    message = f"has at most {limit} bytes" if status == 200 else "HTTP 500: 9999"
    with pytest.raises(EngineError, match=message) as raised:
        ask(answer, call)
    assert len(str(raised.value)) < 1200
    assert sent[0] < limit + 16 * 2**20, "plus what the sockets hold"


def test_the_longest_valid_reply_is_read() -> None:
    """A log-prob has at most 24 characters, an id 10, and SGLang lists the ids of the tokens that a cut keeps."""
    request = dataclasses.replace(REQUEST, max_new_tokens=50, top_k=4096)
    ids, logprob = [2**31 - 1] * 50, -1.2345678901234567e-300
    meta = {
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "9" * 18, "start": i, "end": i + 1} for i in range(50)],
        "output_token_logprobs": [[logprob, i, "x" * 100] for i in ids],
        "output_token_sampling_logprobs": [logprob] * 50,
        "output_token_sampling_mask": [[2**31 - 1] * 4096] * 50,
    }

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"output_ids": ids, "meta_info": meta})

    assert len(ask(answer, lambda engine: engine.generate(request)).token_ids) == 50


def test_every_request_carries_the_key_and_a_server_that_wants_another_ends_the_wait_for_it() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        return web.json_response({"error": "Unauthorized"}, status=401)

    with pytest.raises(KeyRefusedError, match=r"/server_info: HTTP 401: .*Unauthorized.*; set rollout\.api_key to"):
        ask(answer, lambda engine: wait_healthy(engine, HANG_S))


@pytest.mark.parametrize("body", ['{"success": false, "message": "no"}', '{"message": "fine"}', "OK", "", "null", "[]"])
def test_weights_are_not_confirmed_by_a_reply_that_does_not_say_so(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text='{"success": true}' if request.path == "/init_weights_update_group" else body)

    bucket = Bucket((TensorSpec("w", "float32", (2,)),))

    async def take(engine: HttpEngine) -> None:
        await engine.transport.join(GroupSeat("group", "127.0.0.1", 1, 1, 2, "gloo"))
        await engine.transport.take(bucket, version=None)

    with pytest.raises(EngineError, match=r"1 weight from w to w: (HTTP 200: .*|the reply does not confirm them)"):
        ask(answer, take)


def test_escape_codes_of_a_server_become_text() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="\x1b]0;owned\x07\n2026-01-01 INFO all is well", status=500)

    with pytest.raises(EngineError) as raised:
        ask(answer, lambda engine: engine.pause("retract"))
    assert r"\x1b]0;owned\x07\n2026" in str(raised.value)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "fenced: %s", ("\x1b[31mred\nINFO all is well",), None)
    try:
        raise EngineError("\x1b[31mred")
    except EngineError:
        record.exc_info = sys.exc_info()
    first, *rest = trainer.EscapingFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == r"WARNING fenced: \x1b[31mred\nINFO all is well"
    assert rest[-1].endswith(r"EngineError: \x1b[31mred")
