"""The engines' side of a push: choose and pause them, call them together, fence those that fail, verify, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence, Set
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar

from bapo_megatron.engines.base import Capabilities, Engine, PauseMode
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import (
    BroadcastLostError,
    EngineError,
    NoEngineLeftError,
    RequestRefusedError,
    UnreachableEngineError,
)
from bapo_megatron.sync.base import Submit, SyncStats
from bapo_megatron.sync.verify import check_model, check_weights, minority

_T = TypeVar("_T")
Call = Callable[[Engine], Coroutine[Any, Any, _T]]
Infos = Mapping[str, Mapping[str, Any]]
"""`server_info` by URL."""

_OF_THE_TRAINER = (RequestRefusedError, BroadcastLostError)  # replies that blame the push itself if all engines agree


class Session:
    """State of the engines from one push to the next."""

    def __init__(
        self, pool: EnginePool, submit: Submit, timeout_s: float, pause_mode: PauseMode, transports: Set[str]
    ) -> None:
        """Require that each engine has one of these `Transport`s."""
        self.pool = pool
        self.pause_mode = pause_mode
        self.manifest: tuple[TensorSpec, ...] = ()
        self.is_torn = False  # the last push broke off and must be repeated
        self.submit = submit
        self.timeout_s = timeout_s
        self._transports = transports
        self._version: int | None = None  # last version pushed
        self._paused_at: float | None = None

    @property
    def keeps_cache(self) -> bool:
        """Whether requests continue with what they have computed with older weights."""
        return self.pause_mode == "in_place"

    def connect(self, manifest: Sequence[TensorSpec]) -> Infos:
        """Check every engine before anything is sent.

        Raises:
            EngineError: an engine is not reachable or serves another model; one line for each.
        """
        self.manifest = tuple(manifest)
        replies = Members(self.pool.live(), self).start("say what it serves", self._check)
        infos, failures = replies.collect()
        if failures:
            raise EngineError("\n".join(str(failure) for failure in failures.values()))
        return infos

    def pause(self, version: int) -> tuple[Members, Infos, set[str]]:
        """Pause the engines for a push of `version`. Return them, their `server_info`, and the URLs new to the group.

        New engines are back after a failure, or hold another version than the last one pushed because they restarted
        unnoticed. A repeated push leaves engines that are back to the next push, so that it ends.
        """
        self.pool.expect(version)
        back = [] if self.is_torn else self.pool.back()
        members = Members([*self.pool.live(), *back], self)
        infos = members.all("pause", self._pause)
        self._paused_at = self._paused_at or time.monotonic()
        new = {engine.url for engine in back}
        if self._version is not None:
            new |= {url for url, info in infos.items() if str(info.get("weight_version")) != str(self._version)}
        members.all("say what it serves", self._check, only=new)
        return members, infos, new & {engine.url for engine in members.engines}

    def verify(self, members: Members, digests: Mapping[str, str], version: int, stats: SyncStats) -> None:
        """Remember the engines that hold the weights sent for `resume`, and fence the others."""

        async def verify(engine: Engine) -> dict[str, Any]:
            info, checksum = await engine.server_info(), await engine.transport.digests()
            check_weights(engine.url, version, digests, info, checksum)
            return checksum

        members.fence(minority(members.all("confirm its weights", verify)))
        stats.lap("verify")
        self.pool.verified = members.engines
        self._version, self.is_torn = version, False

    def resume(self, stats: SyncStats) -> None:
        """Let the verified engines sample again, and complete the stats; nothing after a push that was abandoned.

        An engine that fails is fenced; see `abandon` for the last one.
        """
        if self._paused_at is None:
            return
        stats.lap(None)
        try:
            members = Members(self.pool.verified, self)  # one that was fenced may have restarted without them
            members.all("continue", lambda engine: engine.resume())
        except NoEngineLeftError:
            self.abandon()
            return
        stats.lap("resume")
        for engine in members.engines:
            if not self.pool.is_live(engine):
                self.pool.admit(engine)
        stats.generation_pause_s = time.monotonic() - self._paused_at
        self._paused_at = None

    def abandon(self) -> SyncStats:
        """End a push that lost its last engine; call it while handling `NoEngineLeftError`.

        The next step waits for an engine to be back and asks for the push again. Raises if none is expected back.
        """
        if self.pool.is_hopeless():
            raise
        self._paused_at, self.is_torn = None, False
        return SyncStats()

    async def _check(self, engine: Engine) -> dict[str, Any]:
        info = await check_model(engine, self.manifest)
        if not self._transports & (offered := Capabilities.of(info).transports):
            raise EngineError(
                f"{engine.url} takes weights over {_listed(offered)}, not over {_listed(self._transports)}: set "
                "sync.channel to fit it"
            )
        return info

    async def _pause(self, engine: Engine) -> dict[str, Any]:
        await engine.pause(self.pause_mode)
        return await engine.server_info()


def _listed(transports: Set[str]) -> str:
    return " or ".join(sorted(transports)) or "nothing"


class Replies(Generic[_T]):
    """Calls in progress, one per engine, with one deadline."""

    def __init__(self, what: str, futures: dict[str, Future[_T]], timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._what = what  # completes "waited for <url> to ..."
        self._timeout_s = timeout_s
        self._futures = futures
        self._replied_at: list[float] = []
        for future in futures.values():
            future.add_done_callback(lambda _: self._replied_at.append(time.monotonic()))

    @property
    def is_done(self) -> bool:
        return not self.unanswered()

    @property
    def done_at(self) -> float | None:
        """Time of the last reply, or None before it."""
        return self._replied_at[-1] if len(self._replied_at) == len(self._futures) else None

    def failed(self) -> set[str]:
        """Return the URLs whose reply so far is an error."""
        return {u for u, f in self._futures.items() if f.done() and (f.cancelled() or f.exception() is not None)}

    def unanswered(self) -> set[str]:
        """Return the URLs that have not replied so far."""
        return {url for url, future in self._futures.items() if not future.done()}

    def wait_until(self, deadline: float, *, first_failure: bool = False) -> None:
        """Wait for all replies, or until the deadline; with `first_failure`, an error also ends the wait."""
        timeout_s = max(0.0, deadline - time.monotonic())
        wait(self._futures.values(), timeout_s, FIRST_EXCEPTION if first_failure else ALL_COMPLETED)

    def collect(self) -> tuple[dict[str, _T], dict[str, EngineError]]:
        """Wait for all replies or the deadline. Return results and failures by URL; a late engine has failed."""
        self.wait_until(self.deadline)
        results: dict[str, _T] = {}
        failures: dict[str, EngineError] = {}
        for url, future in self._futures.items():
            if not future.done():
                future.cancel()
                failures[url] = UnreachableEngineError(f"waited {self._timeout_s:g} s for {url} to {self._what}")
            elif (problem := future.exception()) is None:
                results[url] = future.result()
            elif isinstance(problem, EngineError):
                failures[url] = problem
            else:
                raise problem
        return results, failures


class Members:
    """Engines that are called together; those that fail are fenced and leave `engines`."""

    def __init__(self, engines: Sequence[Engine], session: Session) -> None:
        """Raise NoEngineLeftError if there are none."""
        self.engines = list(engines)
        self.session = session
        self.fence({})

    def start(self, what: str, call: Call[_T], only: Collection[str] | None = None) -> Replies[_T]:
        """Start the same call to every engine, or only to those at the URLs in `only`."""
        asked = [engine for engine in self.engines if only is None or engine.url in only]
        futures = {engine.url: self.session.submit(call(engine)) for engine in asked}
        return Replies(what, futures, self.session.timeout_s)

    def all(self, what: str, call: Call[_T], only: Collection[str] | None = None) -> dict[str, _T]:
        """Return results by URL and fence the engines that fail. Raises as `fence` does."""
        results, failures = self.start(what, call, only).collect()
        self.fence(failures)
        return results

    def fence(self, failures: Mapping[str, EngineError]) -> None:
        """Fence the engines at these URLs.

        Raises:
            RequestRefusedError, BroadcastLostError: all engines refuse for the same reason, so the trainer is at fault.
            NoEngineLeftError: none is left.
        """
        complaints = [error for error in failures.values() if isinstance(error, _OF_THE_TRAINER)]
        if failures and len(complaints) == len(self.engines):
            raise complaints[0]
        for engine in self.engines:
            if engine.url in failures:
                self.session.pool.fence(engine, str(failures[engine.url]))
        self.engines = [engine for engine in self.engines if engine.url not in failures]
        if not self.engines:
            raise NoEngineLeftError(f"no rollout engine is left: {self.session.pool.describe()}")
