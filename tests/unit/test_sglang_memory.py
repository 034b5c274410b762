"""What stands between SGLang and calls that would end it, over a server that answers as it is told."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.engines.base import ALL_MEMORY
from bapo_megatron.engines.http import RELEASED_ROUTE, HttpEngine
from bapo_megatron.engines.sglang_memory import ReleasedMemory
from bapo_megatron.errors import EngineError

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, RESTORE = "/release_memory_occupation", "/resume_memory_occupation"
OF_WEIGHTS = (
    "/begin_weight_update",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/weights_checker",
)


class FakeServer:
    """Records what reaches it, and answers with `status`, once it may."""

    def __init__(self) -> None:
        self.status = 200
        self.received: list[tuple[str, Any]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.app = ReleasedMemory(self.serve)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        self.received.append((scope["path"], body))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"its answer"})

    async def post(self, path: str, body: Any = None) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return await self.post_parts(path, [raw])

    async def post_parts(self, path: str, parts: Sequence[bytes]) -> tuple[int, bytes]:
        messages = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]
        return await self.call(path, messages)

    async def call(self, path: str, messages: list[dict[str, Any]]) -> tuple[int, bytes]:
        sent: list[Any] = []
        incoming = iter(messages)

        async def receive() -> Any:
            return next(incoming)

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({"type": "http", "path": path}, receive, send)
        return (sent[0]["status"], b"".join(m["body"] for m in sent[1:])) if sent else (0, b"")

    async def released(self) -> list[str]:
        status, raw = await self.post(RELEASED_ROUTE)
        assert status == 200
        return json.loads(raw)["released"]

    async def pause(self) -> None:
        assert (await self.post(PAUSE, {"mode": "retract"}))[0] == 200


async def refused(answer: Any, message: str) -> None:
    status, raw = await answer
    assert status == 409
    assert json.loads(raw)["success"] is False
    assert message in json.loads(raw)["message"]


def test_it_remembers_what_the_server_has_done() -> None:
    async def body() -> None:
        server = FakeServer()
        await server.pause()
        for tags, after in ((["kv_cache"], ["kv_cache"]), (None, [*ALL_MEMORY])):
            held = {"tags": tags} if tags else {"tags": [*{*ALL_MEMORY} - {*await server.released()}]}
            assert await server.post(RELEASE, held) == (200, b"its answer")
            assert await server.released() == sorted(after)
        assert (await server.post(RESTORE, {"tags": ["weights"]}))[0] == 200
        assert await server.released() == ["cuda_graph", "kv_cache"]
        assert (await server.post(RELEASE, {"tags": ["weights"]}))[0] == 200
        for without in ({}, {"tags": None}, {"tags": []}):
            assert (await server.post(RESTORE, without))[0] == 200
            assert await server.released() == []
            assert (await server.post(RELEASE, without))[0] == 200
            assert await server.released() == sorted(ALL_MEMORY)
        assert RELEASED_ROUTE not in [path for path, _ in server.received]

    asyncio.run(body())


def test_calls_that_would_end_the_server_do_not_reach_it() -> None:
    async def body() -> None:
        server = FakeServer()
        await refused(server.post(RELEASE, {"tags": ["weights"]}), "call pause_generation with mode=retract")
        await refused(server.post(RESTORE), "is not released")
        assert server.received == []
        await server.pause()
        for tags in (["nonsense"], ["weights", "weights"], "weights", 5, [["weights"]], {"weights": 1}):
            await refused(server.post(RELEASE, {"tags": tags}), "tags must be some of cuda_graph, kv_cache, weights")
        await server.post(RELEASE, {"tags": ["weights"]})
        num_received = len(server.received)
        await refused(server.post(RELEASE), "the memory of weights is released already")
        await refused(server.post(RESTORE, {"tags": ["weights", "kv_cache"]}), "the memory of kv_cache is not released")
        await refused(server.post(RESTORE, {"tags": ["weights", "weights"]}), "each once")
        for path in (CONTINUE, *OF_WEIGHTS):
            await refused(server.post(path), "the memory of weights is released: call resume_memory_occupation first")
        assert len(server.received) == num_received
        await server.post(RESTORE)
        assert await server.released() == ["weights"], "without tags, all: the cache is not released"
        await server.post(RESTORE, {"tags": ["weights"]})
        await server.post(RELEASE, {"tags": ["kv_cache"]})
        for path in OF_WEIGHTS:
            assert (await server.post(path))[0] == 200
        await refused(server.post(CONTINUE), "the memory of kv_cache is released")

    asyncio.run(body())


@pytest.mark.parametrize(
    ("before", "may_release"),
    [
        ([(PAUSE, {"mode": "retract"})], True),
        ([(PAUSE, {"mode": "retract"}), (PAUSE, {"mode": "in_place"})], True),
        ([(PAUSE, {"mode": "retract"}), (PAUSE, {"mode": "abort"})], True),
        ([(PAUSE, {"mode": "in_place"})], False),
        ([(PAUSE, {"mode": "abort"})], False),
        ([(PAUSE, {})], False),
        ([(PAUSE, {"mode": "retract"}), (CONTINUE, {})], False),
    ],
)
def test_only_a_pause_that_retracts_makes_a_server_still(before: list[tuple[str, Any]], may_release: bool) -> None:
    """After mode=abort, the last batch is left to SGLang's schedulers."""

    async def body() -> None:
        server = FakeServer()
        for path, what in before:
            assert (await server.post(path, what))[0] == 200
        assert (await server.post(RELEASE))[0] == (200 if may_release else 409)

    asyncio.run(body())


@pytest.mark.parametrize("status", [400, 422, 500])
def test_what_the_server_has_not_done_is_not_remembered(status: int) -> None:
    async def body() -> None:
        server = FakeServer()
        server.status = status
        assert await server.post(PAUSE, {"mode": "retract"}) == (status, b"its answer")
        await refused(server.post(RELEASE), "while generation is paused")
        server.status = 200
        await server.pause()
        server.status = status
        assert (await server.post(RELEASE))[0] == status
        assert (await server.post(CONTINUE))[0] == status
        server.status = 200
        assert (await server.post(RELEASE))[0] == 200, "still paused, and nothing is released"
        server.status = status
        assert (await server.post(RESTORE))[0] == status
        assert await server.released() == sorted(ALL_MEMORY)

    asyncio.run(body())


def test_a_call_waits_for_the_one_before_even_if_nobody_waits_for_that() -> None:
    async def body() -> None:
        server = FakeServer()
        await server.pause()
        server.may_answer.clear()
        calls = [
            server.post(RELEASE),
            server.post(RELEASED_ROUTE),
            server.post("/weights_checker"),
            server.post(RELEASE),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        other = asyncio.ensure_future(server.post("/server_info"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert [path for path, _ in server.received] == [PAUSE, RELEASE, "/server_info"]
        assert not any(task.done() for task in tasks)
        server.may_answer.set()
        release, released, check, again = await asyncio.gather(*tasks)
        assert (release[0], check[0], again[0]) == (200, 409, 409)
        assert json.loads(released[1])["released"] == sorted(ALL_MEMORY)
        await other

    asyncio.run(body())


def test_a_client_that_leaves_in_its_body_has_said_nothing() -> None:
    async def body() -> None:
        server = FakeServer()
        await server.pause()
        part = {"type": "http.request", "body": b"{}", "more_body": True}
        assert await server.call(RELEASE, [part, {"type": "http.disconnect"}]) == (0, b"")
        assert server.received == [(PAUSE, b'{"mode": "retract"}')]
        assert await server.released() == []

    asyncio.run(body())


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(ALL_MEMORY)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["tags", "mode", "x"]), inner),
    max_leaves=8,
)


@given(
    path=st.sampled_from([PAUSE, CONTINUE, RELEASE, RESTORE, *OF_WEIGHTS, "/generate"]),
    body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    is_still=st.booleans(),
)
def test_any_body_reaches_the_server_as_it_came_or_not_at_all(
    path: str, body: bytes, cuts: list[int], is_still: bool
) -> None:
    async def run() -> None:
        server = FakeServer()
        if is_still:
            await server.pause()
            await server.post(RELEASE, {"tags": ["weights"]})
        server.received.clear()
        server.status = 400
        ends = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
        parts = [body[start:end] for start, end in itertools.pairwise(ends)]
        before = await server.released()
        status, _ = await server.post_parts(path, parts)
        assert server.received == ([(path, body)] if status == 400 else [])
        assert status in (400, 409)
        assert await server.released() == before, "the server has refused"

    asyncio.run(run())


@pytest.mark.parametrize(
    "reply", [None, [], {}, {"released": None}, {"released": ["disk"]}, {"released": [["weights"]]}]
)
def test_a_server_that_does_not_say_what_it_has_released_is_told_nothing(
    reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[str] = []

    async def send_request(method: str, path: str, *_: Any, **__: Any) -> bytes:
        if method == "POST":
            posted.append(path)
        return json.dumps(reply if path == RELEASED_ROUTE else {"enable_memory_saver": True}).encode()

    engine = HttpEngine("http://server", request_timeout_s=1.0)
    monkeypatch.setattr(engine, "send_request", send_request)
    with pytest.raises(EngineError, match="http://server/released_memory: the reply does not say what is released"):
        asyncio.run(engine.hold(frozenset()))
    assert posted == []


def test_other_scopes_pass() -> None:
    async def body() -> None:
        passed: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            passed.append(scope["type"])

        await ReleasedMemory(app)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert passed == ["lifespan"]

    asyncio.run(body())
