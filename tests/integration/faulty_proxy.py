"""A proxy in front of an engine that spoils replies to /generate, in every way that a network or a server might."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

RESULT_FAULTS = {  # faults of one result among many: what is done to it -> what the client must say
    "no tokens": "no output_ids",
    "no log-probs": "no output_token_logprobs",
    "wrong length": "output_ids has length",
    "nan": "log-prob nan at output token 0",
    "bad count": "cached_tokens None is not a count",
    "other tokens": "does not belong to token",
    "foreign token": "is outside the vocabulary",
    "other request": "is for request",
    "other prompt": "prompt tokens?, but",
    "bad version": "weight version inf is not a whole number",
}
CALL_FAULTS = {  # faults of the whole reply
    "status 500": "HTTP 500",
    "garbage": "no output_ids|not a list",
    "deep garbage": "no output_ids|not a list",
    "truncated": "no output_ids|not a list",
    "cut off": "ClientPayloadError|ContentLengthError|Disconnected",
    "closed": "ServerDisconnectedError",
    "silence": "no answer within",
}
FAULTS = RESULT_FAULTS | CALL_FAULTS
ROUTE_FAULTS = {  # faults of a mixture's routes, of which the client says that asking again would not help
    "no routes": "the reply has no rows for it",
    "routes of the wrong length": "bytes are not rows|rows of shape",
    "expert out of range": "has 200, not <= 7",
    "missing expert": "has 255, not <= 7",
    "expert twice": "has . twice",
}

Answer = Callable[[], Awaitable[web.StreamResponse]]
"""Forwards the call and returns what came back."""

Trap = Callable[[Answer], Awaitable[web.StreamResponse]]
"""Handles one call in place of the proxy."""

Spoil = Callable[[Sequence[str]], dict[str, str]]
"""Chooses the faults of one call: its rids -> the fault of each result to spoil."""


@dataclass
class _Trap:
    path: str
    handle: Trap
    num_to_pass: int
    part: bytes


class FaultyProxy:
    """A proxy that forwards all calls; `spoil` picks faults of replies to /generate. A call's fault spoils all results.

    `set_trap` hands a call of a path to another function.

    Example: FaultyProxy(url, lambda rids: {rids[0]: "nan"})
    """

    def __init__(self, target: str, spoil: Spoil = lambda rids: {}) -> None:
        self.spoil = spoil
        self.hits: Counter[str] = Counter()  # calls and results spoilt, by fault
        self.num_spoilt = 0  # results that did not arrive as they were sent
        self.num_sampling = 0  # requests for samples that were forwarded and have no answer yet
        self.num_held = 0  # calls kept back until `release`
        self.url = ""
        self._target = target
        self._traps: list[_Trap] = []
        self._released = asyncio.Event()
        self._released.set()

    def set_trap(self, path: str, handle: Trap, num_to_pass: int = 0, part: bytes = b"") -> None:
        """Trap one call of this path with `part` in its body, after `num_to_pass` such calls have passed."""
        self._traps.append(_Trap(path, handle, num_to_pass, part))

    def is_next(self, path: str) -> bool:
        """Return whether the next call of a path is trapped."""
        return any(trap.path == path and trap.num_to_pass == 0 for trap in self._traps)

    @property
    def is_armed(self) -> bool:
        """Return whether a trap is set, or the next reply is to be spoilt."""
        return bool(self._traps) or bool(self.spoil(["any"]))

    def hold(self) -> None:
        """Hold back all calls except requests for samples."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def disarm(self) -> None:
        """Forward faithfully from now on."""
        self._traps.clear()
        self.spoil = lambda rids: {}
        self.release()

    async def __aenter__(self) -> FaultyProxy:
        app = web.Application(client_max_size=2**26)
        app.add_routes([web.route("*", "/{path:.*}", self._forward)])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.path != "/generate":
            self.num_held += 1
            try:
                await self._released.wait()
            finally:
                self.num_held -= 1

        async def answer() -> web.StreamResponse:
            return await self._answer(request, raw)

        trap = next((t for t in self._traps if t.path == request.path and t.part in raw), None)
        if trap is None:
            return await answer()
        if trap.num_to_pass:
            trap.num_to_pass -= 1
            return await answer()
        self._traps.remove(trap)
        return await trap.handle(answer)

    async def _answer(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"} if raw else {}
        rids = _rids(json.loads(raw)) if request.path == "/generate" else []
        self.num_sampling += len(rids)
        try:
            async with self._session.request(
                request.method, self._target + request.path, data=raw, headers=headers
            ) as response:
                reply, status = await response.read(), response.status
        except aiohttp.ClientError:
            return self._hang_up(request)
        finally:
            self.num_sampling -= len(rids)
        if request.path != "/generate" or status != 200:
            return web.Response(body=reply, status=status)
        return await self._spoilt(request, rids, reply)

    async def _spoilt(self, request: web.Request, rids: list[str], reply: bytes) -> web.StreamResponse:
        faults = self.spoil(rids)
        whole = next((fault for fault in faults.values() if fault in CALL_FAULTS), None)
        if whole is not None:
            self.hits[whole] += 1
            self.num_spoilt += len(rids)
            return await self._spoil_call(request, whole, reply)
        if not faults:
            return web.Response(body=reply)
        body = json.loads(reply)
        for result, name in zip(body if isinstance(body, list) else [body], rids, strict=True):
            if name in faults and result["output_ids"]:  # a request aborted immediately has nothing to spoil
                self.hits[faults[name]] += 1
                self.num_spoilt += 1
                _spoil_result(result, faults[name])
        return web.json_response(body)

    async def _spoil_call(self, request: web.Request, fault: str, reply: bytes) -> web.StreamResponse:
        match fault:
            case "status 500":
                return web.Response(text="out of memory", status=500)
            case "garbage":
                return web.Response(body=b'{"output_ids": [3, \xff')
            case "deep garbage":
                return web.Response(body=b"[" * 16_000)  # no longer than a valid reply
            case "truncated":
                return web.Response(body=reply[: len(reply) // 2])
            case "cut off":
                response = web.StreamResponse(headers={"Content-Length": str(len(reply))})
                await response.prepare(request)
                await response.write(reply[: len(reply) // 2])
                return self._hang_up(request, response)
            case "silence":
                await asyncio.Event().wait()  # until the client has left
        return self._hang_up(request)

    @staticmethod
    def _hang_up(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        with contextlib.suppress(AttributeError):  # the client may have closed it first
            request.transport.close()  # type: ignore[union-attr]
        return response or web.Response()


def _rids(body: dict[str, Any]) -> list[str]:
    return [body["rid"]] if isinstance(body["rid"], str) else body["rid"]


def _spoil_result(result: dict[str, Any], fault: str) -> None:
    meta = result["meta_info"]
    match fault:
        case "no tokens":
            del result["output_ids"]
        case "no log-probs":
            del meta["output_token_logprobs"]
        case "wrong length":
            meta["output_token_logprobs"].pop()
        case "nan":
            meta["output_token_logprobs"][0][0] = float("nan")
        case "bad count":
            meta["cached_tokens"] = None
        case "other tokens":
            result["output_ids"] = [token_id + 1 for token_id in result["output_ids"]]
        case "foreign token":
            result["output_ids"][-1] = meta["output_token_logprobs"][-1][1] = 10**6
        case "other request":
            meta["id"] = "somebody-else"
        case "other prompt":
            meta["prompt_tokens"] -= 1
        case "bad version":
            meta["weight_versions"][0]["version"] = float("inf")
        case "no routes":
            del meta["rows"]["routes"]
        case "routes of the wrong length" | "expert out of range" | "missing expert" | "expert twice":
            routes = bytearray(base64.b64decode(meta["rows"]["routes"]))
            match fault:
                case "routes of the wrong length":
                    del routes[len(routes) // 2 :]
                case "expert out of range":
                    routes[-1] = 200
                case "missing expert":
                    routes[-1] = 255
                case _:
                    routes[-1] = routes[-2]
            meta["rows"]["routes"] = base64.b64encode(routes).decode()
        case _:
            raise AssertionError(fault)
