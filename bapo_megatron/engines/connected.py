"""The engines of a run, as its first process holds them: clients, their pool, and the event loop that runs both.

The event loop has its own thread, so that HTTP replies are read while the trainer works.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bapo_megatron.config.engines import ENGINE_CLIENT, EngineKind
from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import Engine, EngineState, WeightTransport
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.replies import ROUTES_FLAG
from bapo_megatron.errors import EngineError, KeyRefusedError, UserError
from bapo_megatron.hf.streams import ROUTES
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.tokens import TokenStream

_T = TypeVar("_T")

_STATES_INTERVAL_S = 5.0
_INFO_TIMEOUT_S = 60.0
_DOWN_S = 30.0  # an engine that ran before and stays silent this long is down
_MEMBERS = ("url", *(name for name in vars(Engine) if not name.startswith("_")))
_OF_TRANSPORT = tuple(name for name in vars(WeightTransport) if not name.startswith("_"))


class LoopThread:
    """An asyncio event loop in a daemon thread; `run` gives it a coroutine and waits, with a deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        HEARTBEAT.loops["rollout"] = self._loop

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start the coroutine and return immediately."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self,
        coroutine: Coroutine[Any, Any, _T],
        timeout_s: float,
        what: str = "the rollout engines",
        progress: Callable[[], tuple[int, ...]] = tuple,
    ) -> _T:
        """Return the coroutine's result.

        Args:
            timeout_s: the deadline; with `progress`, the longest time during which no count may change.
            what: named in timeout errors.
            progress: returns counts that change while the coroutine runs. Polled every `timeout_s`, so a hang is found
                after one to two of these.

        Raises:
            EngineError: nothing came back, and nothing changed, within `timeout_s`.
        """
        future, seen = self.submit(coroutine), progress()
        while not concurrent.futures.wait([future], timeout_s).done:
            if (now := progress()) == seen:
                future.cancel()
                sign = "progress" if seen else "answer"
                raise EngineError(f"waited {timeout_s:g} s for {what}: no {sign}; see the engines' logs")
            seen = now
        return future.result()

    def close(self) -> None:
        HEARTBEAT.loops.pop("rollout", None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


class ConnectedEngines:
    """Clients of all engines on one event loop, with their pool; close it after use."""

    def __init__(self, clients: Sequence[Engine], startup_limit_s: float, loop: LoopThread) -> None:
        self.pool = EnginePool(clients, startup_limit_s)
        self.loop = loop
        self.states: list[EngineState] = []  # as `watch` last saw them; any thread may read them
        self._clients = clients
        self._watches: list[concurrent.futures.Future[None]] = []

    @classmethod
    def connect(
        cls,
        config: RolloutConfig,
        kind: EngineKind,
        urls: Sequence[str],
        vocab_size: int,
        key: str | None,
        streams: Sequence[TokenStream] = (),
        *,
        may_have_failed: bool = False,
    ) -> ConnectedEngines:
        """Return the engines at these URLs once all are healthy.

        Args:
            key: what the engines ask for.
            streams: the model's streams, which the engines must return.
            may_have_failed: the engines have run for a while; those that are down are fenced off.

        Raises:
            EngineError: an engine refuses the key, or is not healthy within rollout.startup_timeout_s, or none is left.
            UserError: the engine's kind names a client that does not fit, or an engine lacks a stream.
        """
        timeout_s, path = kind.startup_limit_s(config.startup_timeout_s), kind.client
        make_client = ENGINE_CLIENT.load(path)
        try:
            clients = [make_client(url, config, vocab_size, key) for url in urls]
        except UserError:
            raise
        except Exception as error:  # a user's function may fail in any way
            raise ENGINE_CLIENT.error(path, f"it failed: {type(error).__name__}: {error}") from error
        for client in clients:
            if lacking := _lacking(client):
                problem = f"it returned an object of type {type(client).__name__}, which has no {', '.join(lacking)}"
                raise ENGINE_CLIENT.error(path, problem)
        engines = cls(clients, timeout_s, LoopThread())
        try:
            if may_have_failed:
                engines.loop.run(engines._fence_those_down(timeout_s), 2 * timeout_s + 10, "an engine to be healthy")
            for num_ready, client in enumerate(live := engines.pool.live()):
                HEARTBEAT.beat(TRAINER, f"engines ready: {num_ready}/{len(live)}")
                engines.loop.run(wait_healthy(client, timeout_s), 2 * timeout_s + 10, f"{client.url} to be healthy")
                engines._check_streams(client, streams)
        except BaseException:
            engines.close()
            raise
        return engines

    def watch(self, *, with_states: bool) -> None:
        """Start to watch for fenced engines that recover, and to ask every engine for its state every few seconds."""
        self._watches = [self.loop.submit(self.pool.watch())]
        if with_states:
            self._watches.append(self.loop.submit(self._ask_states()))

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for client in self._clients:
            self.loop.run(client.close(), 10.0, f"{client.url} to close")
        self.loop.close()

    async def _fence_those_down(self, timeout_s: float) -> None:
        """Fence the engines that stay silent for a while. One that answers later comes back with the next push.

        Raises:
            EngineError: none answers within `timeout_s`, or one refuses the key.
        """
        tasks = {asyncio.ensure_future(wait_healthy(client, timeout_s)): client for client in self._clients}
        done, silent = await asyncio.wait(tasks, timeout=_DOWN_S)
        while silent and all(task.exception() for task in done):
            newly_done, silent = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            done |= newly_done
        for task in silent:
            task.cancel()
            self.pool.fence(tasks[task], f"it has not answered for {_DOWN_S:g} s")
        for task in done:
            if problem := task.exception():
                if not isinstance(problem, EngineError) or isinstance(problem, KeyRefusedError):
                    raise problem
                self.pool.fence(tasks[task], str(problem))
        if not self.pool.live():
            raise EngineError(f"no rollout engine is left: {self.pool.describe()}")

    def _check_streams(self, client: Engine, streams: Sequence[TokenStream]) -> None:
        """Raise UserError if an engine lacks a stream that training needs."""
        if needed := [stream.name for stream in streams if stream.is_needed]:
            found = self.loop.run(client.capabilities(), _INFO_TIMEOUT_S, f"the capabilities of {client.url}")
            if lacking := [name for name in needed if name not in found.streams]:
                server = f"an SGLang server {ROUTES_FLAG}" if lacking[0] == ROUTES else "it with the same model.family"
                problem = f"does not return the stream {lacking[0]}, which the model's family declares"
                raise UserError(f"{client.url} {problem}: start {server}")

    async def _ask_states(self) -> None:
        while True:
            self.states = list(await asyncio.gather(*map(self._state, self._clients)))
            await asyncio.sleep(_STATES_INTERVAL_S)

    async def _state(self, client: Engine) -> EngineState:
        is_live = self.pool.is_live(client)
        try:
            version, num_running, num_waiting = await client.load()
        except EngineError:
            return EngineState(client.url, False, is_live, -1, 0, 0)
        return EngineState(client.url, True, is_live, version, num_running, num_waiting)


def _lacking(client: object) -> list[str]:
    """Return the members of `Engine` and its transport that an object does not have."""
    transport = getattr(client, "transport", None)
    of_transport = [f"transport.{name}" for name in _OF_TRANSPORT if not hasattr(transport, name)]
    return [name for name in _MEMBERS if not hasattr(client, name)] + of_transport


def http_client(url: str, config: RolloutConfig, vocab_size: int, key: str | None) -> HttpEngine:
    """Return the client of one server that speaks SGLang's API.

    Args:
        key: what the server asks for. None means nothing.
    """
    return HttpEngine(
        url,
        request_timeout_s=config.request_timeout_s,
        vocab_size=vocab_size,
        key=key,
        whole_cache=config.shares_gpus,
    )


async def wait_healthy(engine: Engine, timeout_s: float) -> None:
    """Return once the engine answers its health check.

    Raises:
        EngineError: it is not healthy within `timeout_s`, or refuses the key.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await engine.check_health()
        except KeyRefusedError:
            raise
        except EngineError as problem:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{engine.url} is not healthy after rollout.startup_timeout_s = {timeout_s:g} s ({problem})"
                ) from None
        await asyncio.sleep(0.2)
