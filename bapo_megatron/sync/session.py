"""What every channel does around sending: choose and pause the engines, verify them, let them go on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_megatron.engines.base import Engine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import EngineError
from bapo_megatron.sync.base import Clock, Submit, SyncStats
from bapo_megatron.sync.members import Members
from bapo_megatron.sync.verify import check_model, check_version, check_weights, minority

Infos = Mapping[str, Mapping[str, Any]]
"""`server_info` by url."""


class Session:
    """The engines' side of pushes, kept from one push to the next."""

    def __init__(self, pool: EnginePool, submit: Submit, timeout_s: float) -> None:
        self.pool = pool
        self.manifest: tuple[TensorSpec, ...] = ()
        self.is_torn = False  # the last push broke off, and has to be repeated
        self._submit = submit
        self._timeout_s = timeout_s
        self._version: int | None = None  # last pushed
        self._paused_at: float | None = None

    def members(self, engines: Sequence[Engine]) -> Members:
        """Raises EngineError where there are none."""
        return Members(engines, self.pool, self._submit, self._timeout_s)

    def connect(self, manifest: Sequence[TensorSpec]) -> Infos:
        """Check every engine before anything is sent.

        Raises:
            EngineError: an engine is not reachable, or serves another model; says so for each of them.
        """
        self.manifest = tuple(manifest)
        replies = self.members(self.pool.live()).start("say what it serves", self._check)
        infos, failures = replies.collect()
        if failures:
            raise EngineError("\n".join(str(failure) for failure in failures.values()))
        return infos

    def pause(self) -> tuple[Members, Infos, set[str]]:
        """The engines of this push, paused, what they say, and the urls of those that are new in it.

        New are those that are back, and those that hold another version than the last one pushed: they were started
        again unnoticed. A repeated push leaves those that are back to the next one, so that it comes to an end.
        """
        back = [] if self.is_torn else self.pool.back()
        members = self.members([*self.pool.live(), *back])
        infos = members.all("pause", _pause)
        self._paused_at = self._paused_at or time.monotonic()
        new = {engine.url for engine in back}
        if self._version is not None:
            new |= {url for url, info in infos.items() if str(info.get("weight_version")) != str(self._version)}
        members.all("say what it serves", self._check, only=new)
        return members, infos, new & {engine.url for engine in members.engines}

    def finish(
        self, members: Members, digests: Mapping[str, str], version: int, stats: SyncStats, clock: Clock
    ) -> None:
        """Let those go on that hold what was sent, and fence the others."""

        async def verify(engine: Engine) -> dict[str, Any]:
            check_version(engine.url, await engine.server_info(), version)
            checksum = await engine.weights_checksum()
            check_weights(engine.url, digests, checksum)
            return checksum

        members.drop(minority(members.all("confirm its weights", verify)))
        clock.lap("verify")
        members.all("continue", lambda engine: engine.resume())
        clock.lap("resume")
        for engine in members.engines:
            if not self.pool.is_live(engine):
                self.pool.admit(engine)
        assert self._paused_at is not None
        stats.generation_pause_s = time.monotonic() - self._paused_at
        self._paused_at, self._version, self.is_torn = None, version, False

    def abandon(self) -> SyncStats:
        """While a `NoEngineLeftError` is handled: nobody is left who holds other weights, and the push is over.

        The next step waits for an engine to be back, and asks for the push again. Raises where none is expected back.
        """
        if self.pool.is_hopeless():
            raise
        self._paused_at, self.is_torn = None, False
        return SyncStats()

    async def _check(self, engine: Engine) -> dict[str, Any]:
        return await check_model(engine, self.manifest)


async def _pause(engine: Engine) -> dict[str, Any]:
    await engine.pause("retract")
    return await engine.server_info()
