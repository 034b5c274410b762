"""How our asyncio servers take connections, so that clients without a key cannot use up a process.

    taken --> waits for a request --let in--> answered; waits again if the server asks for no key
                 |
                 '--> closed: it waited for 20 s, or it is the oldest of too many

A connection whose client has shown a key is never closed. A request counts once its head is whole; without a key, its
body has to be whole too.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from bapo_megatron.errors import UserError, escaped
from bapo_megatron.runtime.web import Guard

SWEEP_S = 0.5
_MAX_AGE = 40  # sweeps, so 20 s: clients that reuse connections give them up after 15 s (aiohttp) or 5 s (httpx)
_FRESH_AGE = 2  # a younger connection may just be about to send: half a second to a second
_MAX_WAITING = 4096
_BACKLOG = 1024  # connections that the kernel holds until they are taken
_BATCH = 32  # connections taken before others get a turn of the event loop
_LOG_INTERVAL_S = 60.0
_MAX_LINE = 500  # characters logged about a malformed request

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of a host that this machine has; port 0 picks free ones.

    Raises:
        UserError: nothing can listen there.
    """
    sockets: list[socket.socket] = []
    absent = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as stack:
            for family, _, _, _, address in dict.fromkeys(found):  # /etc/hosts may name an address twice
                try:
                    sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    absent = error  # such as ::1 of localhost in a container without IPv6
                else:
                    stack.enter_context(sockets[-1])
            if not sockets and absent is not None:
                raise absent
            stack.pop_all()
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UserError(f"cannot listen on {host}:{port}: {why}; choose another --port or --host") from error
    return sockets


class Site:
    """A server in the event loop that starts it, with a bound on connections that wait for a request.

    Args:
        max_waiting: that bound. None means half of the files that the process may open, and no more than 4,096.
    """

    def __init__(self, guard: Guard, max_waiting: int | None = None) -> None:
        self._guard = guard
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        half = _MAX_WAITING if limit == resource.RLIM_INFINITY else limit // 2
        self._max_waiting = min(_MAX_WAITING, half) if max_waiting is None else max_waiting
        # The sweeps that each has waited for, oldest first. Sweeps are counted and not seconds, because a loop that was
        # blocked for a minute has not read what clients have sent meanwhile.
        self._waiting: dict[asyncio.Transport, int] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: Sequence[socket.socket] = ()
        self._runner: web.AppRunner | None = None

    async def start(self, app: web.Application, sockets: Sequence[socket.socket], shutdown_timeout_s: float) -> None:
        """Serve an application that has the middleware `guarded`.

        Args:
            shutdown_timeout_s: how long `close` waits for open requests.
        """
        logging.getLogger("aiohttp.server").addFilter(_QUIET)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s
        )
        await self._runner.setup()
        self._sockets = sockets
        for listening in sockets:
            listening.setblocking(False)
            self._tasks.append(asyncio.create_task(self._accept(listening)))
        self._tasks.append(asyncio.create_task(self._sweep()))

    async def close(self) -> None:
        """Take no more connections, answer open requests, and close all connections."""
        for tasks in (self._tasks, self._starting):  # in this order: what accepts starts more
            ending = [*tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what the guard refuses; otherwise the connection does not wait while its request is answered."""
        if (refusal := self._guard.refusal(request.method, request.headers)) is not None:
            return web.Response(text=refusal.to_json(), status=refusal.status, content_type="application/json")
        if (transport := request.transport) is None:  # the client has left
            return web.Response()
        if self._guard.asks_for_key:
            self._waiting.pop(transport, None)
            return await handler(request)
        await request.read()
        age = self._waiting.pop(transport, None)
        try:
            return await handler(request)
        finally:
            if age is not None and not transport.is_closing():
                self._waiting[transport] = 0

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        told_at = -_LOG_INTERVAL_S
        num_taken = 0
        while True:
            await self._make_room()
            try:
                connection, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # its client has left
                continue
            except OSError as problem:  # such as no descriptor left
                if time.monotonic() - told_at >= _LOG_INTERVAL_S:
                    told_at = time.monotonic()
                    log.warning("cannot take a connection: %s; trying again", problem.strerror)
                await asyncio.sleep(SWEEP_S)
                continue
            task = loop.create_task(self._take(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
            if (num_taken := num_taken + 1) % _BATCH == 0:
                await asyncio.sleep(0)

    async def _take(self, connection: socket.socket) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(self._runner.server, connection)
        self._waiting[transport] = 0  # before its first bytes are read: that takes another turn of the loop

    async def _make_room(self) -> None:
        """Wait until one more connection may wait; close the oldest ones that are not fresh."""
        while len(self._waiting) + len(self._starting) >= self._max_waiting:
            oldest, age = next(iter(self._waiting.items()), (None, 0))
            if oldest is None or (age < _FRESH_AGE and not oldest.is_closing()):
                await asyncio.sleep(SWEEP_S / 10)
                continue
            del self._waiting[oldest]
            oldest.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for transport, age in [*self._waiting.items()]:
                if age < _MAX_AGE and not transport.is_closing():
                    self._waiting[transport] = age + 1
                    continue
                del self._waiting[transport]
                transport.abort()


class _Quiet(logging.Filter):
    """Turns aiohttp's log of a malformed request, with its traceback, into one debug line.

    Of our own faults it keeps a traceback a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told_at = -_LOG_INTERVAL_S

    def filter(self, record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        is_fault = not isinstance(problem, HttpProcessingError | OSError | web.RequestPayloadError)
        if is_fault and time.monotonic() - self._told_at >= _LOG_INTERVAL_S:
            self._told_at = time.monotonic()
            return True
        log.debug("%s", escaped(f"{record.getMessage()}: {problem!r}")[:_MAX_LINE])
        return False


_QUIET = _Quiet()
