"""Requests share connections; one that has been idle is not used again, since the server may be closing it."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bapo_megatron.engines import http


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
            engine = http.HttpEngine(str(server.make_url("")), request_timeout_s=10)
            for _ in range(4):
                await engine.resume()
            loop = asyncio.get_running_loop()
            deadline = loop.time() + 60
            while len(set(ports)) == 1 and loop.time() < deadline:
                await asyncio.sleep(4 * http._IDLE_S)
                await engine.resume()
            await engine.close()

    monkeypatch.setattr(http, "_IDLE_S", 0.5)
    asyncio.run(run())
    assert len(set(ports[:4])) == 1
    assert ports[-1] != ports[0]
