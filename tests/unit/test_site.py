"""Clients that show no key cannot use up a server: with small bounds, real sockets and connections that say nothing."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
from aiohttp import ClientSession, web
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bapo_megatron.engines.key import KEY_VARIABLE, handed_over
from bapo_megatron.errors import UserError
from bapo_megatron.prompts.continuation import Continuation, TooLongError
from bapo_megatron.prompts.encoding import rendered_ids, surely_exceeds
from bapo_megatron.runtime import site as our_site
from bapo_megatron.runtime.site import Site, listen
from bapo_megatron.runtime.web import Guard, GuardedHandler, GuardedServer
from tests.distributed import HANG_S
from tests.unit.test_continuation import tokenizer_of

KEY = "a-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a head": HEAD,
    "half a head with the key": HEAD + b"Authorization: Bearer a-key\r\n",
    "a wrong key": HEAD + b"Authorization: Bearer another\r\n\r\n",
    "half a body": HEAD.replace(b"GET", b"POST") + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep in a millisecond. A sweep takes a turn of the event loop at least, and a client less than 25 of them."""
    for name, value in {"SWEEP_S": 0.001, "_FRESH_AGE": 25, "_MAX_AGE": 50}.items():
        monkeypatch.setattr(our_site, name, value)


async def _ok(request: web.Request) -> web.Response:
    return web.Response(text="ok")


@contextlib.asynccontextmanager
async def serving(
    guard: Guard, max_waiting: int = 4, handler: Callable[[web.Request], Awaitable[web.Response]] = _ok
) -> AsyncIterator[int]:
    """Run a site; yield its port."""
    site, sockets = Site(guard, max_waiting), listen("127.0.0.1", 0)
    app = web.Application(middlewares=[site.guarded])
    app.add_routes([web.get("/", handler), web.post("/", handler)])
    await site.start(app, sockets, shutdown_timeout_s=HANG_S)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        await site.close()


async def stranger(port: int, words: bytes) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    await writer.drain()
    reader.writer = writer  # type: ignore[attr-defined] - keeps the connection open
    return reader


async def is_hung_up_on(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(HANG_S):
            await reader.read()


async def asked(session: ClientSession, port: int) -> str:
    async with session.get(f"http://127.0.0.1:{port}/", headers=BEARER) as reply:
        return await reply.text()


@pytest.mark.parametrize("words", UNFINISHED.values(), ids=[*UNFINISHED])
@pytest.mark.parametrize("keys", [None, {KEY}])
def test_strangers_wait_in_vain_and_clients_do_not(words: bytes, keys: set[str] | None) -> None:
    """Ten times as many as may wait come at the same time. All that are left are hung up on by the deadline."""

    async def run() -> None:
        async with serving(Guard("localhost", keys)) as port, ClientSession() as session:
            strangers = await asyncio.gather(*(stranger(port, words) for _ in range(40)))
            for _ in range(3):
                assert await asked(session, port) == "ok"
            await asyncio.gather(*map(is_hung_up_on, strangers))

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_who_has_shown_a_key_stays_however_many_strangers_come() -> None:
    async def run() -> None:
        async with serving(Guard("localhost", {KEY})) as port:
            known = await stranger(port, HEAD + b"Authorization: Bearer a-key\r\n\r\n")
            assert (await known.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                await asyncio.gather(*[is_hung_up_on(await stranger(port, b"")) for _ in range(8)])
            known.writer.write(HEAD + b"Authorization: Bearer a-key\r\n\r\n")  # type: ignore[attr-defined]
            assert (await known.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_request_that_is_answered_is_no_idle_connection() -> None:
    """Without keys, a reply that takes longer than the deadline arrives; then its connection waits again, and ends."""

    async def run() -> None:
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.Response:
            is_asked.set()
            await may_answer.wait()
            return web.Response(text="ok")

        async with serving(Guard("localhost"), handler=slow) as port:
            client = await stranger(port, HEAD + b"\r\n")
            await is_asked.wait()
            await asyncio.gather(*[is_hung_up_on(await stranger(port, b"")) for _ in range(20)])
            may_answer.set()
            assert (await client.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            await is_hung_up_on(client)

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_blocked_event_loop_hangs_up_on_nobody_who_has_spoken() -> None:
    """What counts are turns of the loop: a request that came while it was blocked is answered."""

    async def run() -> None:
        async with serving(Guard("localhost", {KEY})) as port:
            client = await stranger(port, b"")
            await asyncio.sleep(0)
            threading.Event().wait(200 * our_site.SWEEP_S)
            client.writer.write(HEAD + b"Authorization: Bearer a-key\r\n\r\n")  # type: ignore[attr-defined]
            assert (await client.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_burst_of_clients_waits_for_room_and_nobody_is_lost() -> None:
    """100 clients connect before one of them speaks, and 4 may wait: the others wait in the kernel."""

    async def run() -> None:
        async with serving(Guard("localhost", {KEY})) as port:
            opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            for client in opened:
                client.sendall(HEAD + b"Authorization: Bearer a-key\r\nConnection: close\r\n\r\n")
            replies = await asyncio.to_thread(lambda: [_all_of(client) for client in opened])
            assert all(reply.startswith(b"HTTP/1.1 200 ") for reply in replies)

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def _all_of(client: socket.socket) -> bytes:
    with client:
        client.settimeout(HANG_S)
        return b"".join(iter(partial(client.recv, 65536), b""))


def test_a_site_that_closes_gives_up_connections_that_are_just_starting() -> None:
    async def run() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        async def starts_for_ever(_: object, connection: socket.socket) -> None:
            with connection:
                begun.set()
                await asyncio.Event().wait()

        loop.connect_accepted_socket = starts_for_ever  # type: ignore[method-assign, assignment]
        async with serving(Guard("localhost", {KEY})) as port:
            before = asyncio.all_tasks()
            client = await stranger(port, b"")
            await begun.wait()
        assert asyncio.all_tasks() < before, "the site has none left, not even new ones"
        await is_hung_up_on(client)

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_process_without_descriptors_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        loop, tries = asyncio.get_running_loop(), []
        accept = loop.sock_accept

        async def failing(listening: socket.socket) -> tuple[socket.socket, object]:
            tries.append(listening)
            if len(tries) <= 5:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await accept(listening)

        loop.sock_accept = failing  # type: ignore[method-assign]
        async with serving(Guard("localhost", {KEY})) as port, ClientSession() as session:
            assert await asked(session, port) == "ok"

    asyncio.run(asyncio.wait_for(run(), HANG_S))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "cannot take a connection: Too many open files; trying again"
    ]


def test_a_host_with_an_address_twice_or_out_of_use_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("100::1", 0, 0, 0)),
        *[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))] * 2,
    ]
    for addresses, num in ((found, 1), (found[:1], 0)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, of=addresses, **__: of)
        with contextlib.ExitStack() as stack, contextlib.nullcontext() if num else pytest.raises(UserError):
            assert len([stack.enter_context(one) for one in listen("localhost", 0)]) == num


def test_a_fault_of_ours_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_site, "_QUIET", our_site._Quiet())

    async def faulty(request: web.Request) -> web.Response:
        raise KeyError("a bug")

    async def run() -> None:
        async with serving(Guard("localhost", {KEY}), handler=faulty) as port, ClientSession() as session:
            for _ in range(5):
                assert "500" in await asked(session, port)

    try:
        asyncio.run(asyncio.wait_for(run(), HANG_S))
    finally:
        logging.getLogger("aiohttp.server").filters.clear()
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.exc_info is not None
    assert isinstance(told.exc_info[1], KeyError)


@pytest.mark.parametrize("num_idle", [1, 4, 5, 6, 7, 13])
def test_idle_connections_do_not_use_up_the_threads_of_the_report(
    num_idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ok(GuardedHandler):
        def do_GET(self) -> None:
            self.send(200, "text/plain", b"ok")

    monkeypatch.setattr(GuardedServer, "max_open", 6)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(GuardedServer("127.0.0.1", 0, Ok))
        idle = []
        for _ in range(num_idle):
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), HANG_S)))
            server.handle_request()
        for gone in idle[:-6]:
            assert gone.recv(1) == b""
        for kept in idle[-6:]:
            kept.sendall(HEAD + b"\r\n")
            assert b"".join(iter(partial(kept.recv, 65536), b"")).endswith(b"ok")


CODE = """
import os, subprocess, sys
from bapo_megatron.engines.key import take_key
print(take_key(), sys.argv[1].encode() in open("/proc/self/environ", "rb").read())
print(any("BAPO_ENGINE_KEY" in name for name in os.environ))
"""


@pytest.mark.parametrize("of_user", [{}, {KEY_VARIABLE: "of-another-engine"}])
def test_a_key_that_is_handed_over_is_in_no_environment(of_user: dict[str, str]) -> None:
    key = "k" * 64
    with handed_over(key) as (secret, descriptors):
        asked = [sys.executable, "-c", CODE, key]
        done = subprocess.run(
            asked, env=os.environ | secret | of_user, pass_fds=descriptors, capture_output=True, text=True
        )
        with pytest.raises(OSError, match="No such device or address"):
            os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDONLY)
    assert done.stdout == f"{key} False\nFalse\n", done.stderr
    assert key not in str(secret)


# long texts


def _with_long_tokens() -> PreTrainedTokenizerFast:
    """Return a tokenizer with tokens of 1, 2, 4, ... 256 of the same character."""
    runs = [character * 2**power for character in "y " for power in range(9)]
    merges = [(run[: len(run) // 2],) * 2 for run in runs if len(run) > 1]
    model = models.BPE({run: i for i, run in enumerate([*runs, "?"])}, merges, unk_token="?", fuse_unk=True)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="?")


def _without_space() -> PreTrainedTokenizerFast:
    """Return a tokenizer to which white space is nothing, and any other word one token."""
    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


TOKENIZERS = {"qwen3": partial(tokenizer_of, "qwen3"), "long": _with_long_tokens, "no space": _without_space}
PARTS = st.sampled_from(["the cat ", "y", " ", "\n", "e\u0301", "1234567890", "字", "<|im_end|>", "\U0001f600", "y "])
TEXTS = st.lists(st.tuples(PARTS, st.integers(1, 2000)), min_size=1, max_size=4).map(
    lambda parts: "".join(part * count for part, count in parts)
)


@pytest.mark.parametrize("name", [*TOKENIZERS])
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, more=st.integers(0, 3))
def test_no_text_is_refused_that_fits(name: str, text: str, more: int) -> None:
    tokenizer = TOKENIZERS[name]()
    limit = len(rendered_ids(tokenizer, text)) + more
    assert not surely_exceeds(tokenizer, text, limit)
    few = limit // 100
    assert surely_exceeds(tokenizer, text, few) <= (limit - more > few)


def test_a_long_text_is_refused_for_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 16 MiB becomes no more tokens than some multiple of the limit."""
    tokenizer, seen = tokenizer_of("qwen3"), [0]
    chat = Continuation(tokenizer, {})
    encode = type(tokenizer).encode

    def counted(self: object, text: str, **options: bool) -> list[int]:
        seen[0] += len(text)
        return encode(self, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    message = {"role": "user", "content": "the cat sat on the mat\n" * (2**24 // 23)}
    turn = [chat.end_id]
    with pytest.raises(TooLongError):
        chat.whole([message], (), 100)
    with pytest.raises(TooLongError):
        chat.all_ids([message], turn, is_cut=False, max_tokens=100)  # type: ignore[arg-type]
    assert seen[0] <= 2 * 16 * 100
    token_ids, is_cut = chat.ids([message], turn, is_cut=False, max_tokens=100)  # type: ignore[arg-type]
    assert is_cut
    assert 95 <= len(token_ids) <= 100
    assert seen[0] < 100_000
