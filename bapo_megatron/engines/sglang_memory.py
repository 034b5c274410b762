"""A middleware for SGLang servers: it says what the server has released, and refuses calls that would end it.

SGLang's schedulers end on an assertion if memory is released while requests run, and with a KeyError if memory that is
not released is restored (srt/managers/scheduler_components/weight_updater.py). Kernels that touch released memory end
them too. Each process of a server begins with nothing released, so it knows best.

Only a pause with mode=retract stops the schedulers: one with mode=abort ends when the server has told its
clients, and leaves the last batch to the schedulers.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bapo_megatron.engines.base import ALL_MEMORY, Memory, listed
from bapo_megatron.engines.http import RELEASED_ROUTE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_PAUSE, _CONTINUE = "/pause_generation", "/continue_generation"
_RELEASE, _RESTORE = "/release_memory_occupation", "/resume_memory_occupation"
_OF_WEIGHTS = (
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/end_weight_update",
    "/weights_checker",
)
_ROUTES = (RELEASED_ROUTE, _PAUSE, _CONTINUE, _RELEASE, _RESTORE, *_OF_WEIGHTS)


class ReleasedMemory:
    """ASGI middleware around a server's routes. Belongs to one event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._released: set[Memory] = set()
        self._is_still = False  # paused without a request in the cache
        self._lock = asyncio.Lock()  # one such call at a time: its client may have stopped waiting for an earlier one

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path not in _ROUTES:
            await self._app(scope, receive, send)
            return
        if (body := await _body(receive)) is None:
            return
        async with self._lock:
            if path == RELEASED_ROUTE:
                await _answer(send, 200, {"released": sorted(self._released)})
            elif (problem := self._problem(path, body)) is not None:
                await _answer(send, 409, {"success": False, "message": problem})
            elif await self._pass_on(scope, body, receive, send) == 200:
                self._note(path, body)

    def _problem(self, path: str, body: bytes) -> str | None:
        """Return why a call would end the server, or None."""
        if path in (_RELEASE, _RESTORE) and not _are_known(_json(body).get("tags")):
            return f"tags must be some of {', '.join(sorted(ALL_MEMORY))}, each once"
        if path == _RELEASE:
            if not self._is_still:
                return "memory can be released while generation is paused: call pause_generation with mode=retract"
            if again := self._released & _tags(body):
                return f"the memory of {listed(again)} is released already"
        elif path == _RESTORE:
            if held := _tags(body) - self._released:
                return f"the memory of {listed(held)} is not released"
        elif (path == _CONTINUE and self._released) or (path in _OF_WEIGHTS and "weights" in self._released):
            return f"the memory of {listed(self._released)} is released: call resume_memory_occupation first"
        return None

    def _note(self, path: str, body: bytes) -> None:
        if path == _RELEASE:
            self._released |= _tags(body)
        elif path == _RESTORE:
            self._released -= _tags(body)
        elif path == _PAUSE:
            self._is_still |= _json(body).get("mode") == "retract"
        elif path == _CONTINUE:
            self._is_still = False

    async def _pass_on(self, scope: Message, body: bytes, receive: Receive, send: Send) -> int:
        """Let the server answer, and return the status of its answer."""
        status, unread = 500, [body]

        async def receive_again() -> Message:
            return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive_again, note_status)
        return status


def _are_known(tags: Any) -> bool:
    """Return whether SGLang knows the tags, if any. It would end when it restores one twice."""
    return not tags or (isinstance(tags, list) and len(ALL_MEMORY.intersection(map(str, tags))) == len(tags))


def _tags(body: bytes) -> frozenset[Memory]:
    """Return the memory that a call names; SGLang takes no tags for all."""
    return frozenset(_json(body).get("tags") or ALL_MEMORY)


def _json(body: bytes) -> dict[str, Any]:
    """Return a JSON object, and {} for anything else, which SGLang refuses."""
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client has left."""
    parts, is_whole = [], False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        is_whole = not message.get("more_body", False)
    return b"".join(parts)


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
