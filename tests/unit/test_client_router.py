"""With a router, requests for tokens go through it, and everything else to the server itself."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.errors import EngineError
from tests.hang import HANG_S


def recorder(asked: list[tuple[str, Any]]) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        asked.append((request.path, body and body.get("rid")))
        if request.path != "/generate":
            return web.json_response({})
        if not isinstance(body["rid"], str):
            return web.Response(status=422)
        if body["rid"] == "bad":
            return web.Response(status=500)
        meta = {
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        return web.json_response({"output_ids": [7], "meta_info": meta})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


def request(rid: str) -> GenerateRequest:
    return GenerateRequest(rid=rid, token_ids=(1, 2), max_new_tokens=1, temperature=1.0, stop_token_ids=(), seed=0)


@pytest.mark.parametrize("with_router", [True, False])
def test_only_generate_goes_through_the_router(with_router: bool) -> None:
    async def run() -> None:
        at_router: list[tuple[str, Any]] = []
        at_server: list[tuple[str, Any]] = []
        async with TestServer(recorder(at_router)) as router, TestServer(recorder(at_server)) as server:
            router_url = str(router.make_url("")) if with_router else None
            engine = HttpEngine(str(server.make_url("")), request_timeout_s=HANG_S, generate_url=router_url)
            assert (await engine.generate(request("a"))).token_ids == (7,)
            if with_router:
                first, second, third = await engine.generate_many([request("b"), request("bad"), request("c")])
                assert [first.rid, third.rid] == ["b", "c"]  # type: ignore[union-attr]
                assert isinstance(second, EngineError)
                assert router_url is not None
                assert router_url in str(second)
            await engine.pause("retract")
            await engine.abort()
            assert await engine.health()
            await engine.close()
        generated = [("/generate", "a")] + [("/generate", rid) for rid in ("b", "bad", "c") if with_router]
        assert sorted(at_router) == (sorted(generated) if with_router else [])
        others = ["/pause_generation", "/abort_request", "/server_info"]
        assert [path for path, _ in at_server] == ([] if with_router else ["/generate"]) + others

    asyncio.run(run())
