"""Which engines take part. A failing engine is fenced off, and returns only with verified weights.

    live --fails--> fenced --healthy again--> back --pushed and verified--> live
                       `--keeps failing without a good reply--> lost

Only live engines are asked for tokens. An engine that is back joins the next weight push, whose check of version and
checksums is the only way to `admit` it. Called from the event loop and from the trainer's main thread.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Literal

from bapo_megatron.engines.base import Engine
from bapo_megatron.errors import EngineError

EngineStatus = Literal["live", "fenced", "back", "lost"]

_MAX_FAILURES = 3  # fences in a row, without a good reply in between, after which an engine is lost
_PROBE_INTERVAL_S = 1.0
_POLL_S = 0.2

log = logging.getLogger(__name__)


class EnginePool:
    """All engines of a run, each with its status. Every engine starts live; the first push gives it weights."""

    def __init__(self, engines: Sequence[Engine], return_limit_s: float = 180.0) -> None:
        self.engines = tuple(engines)
        self.return_limit_s = return_limit_s  # how long an engine may take to be back
        self.num_fenced = 0  # fences since the attempt began
        self.newest_version = -1  # newest weights that an engine may hold: their push may be in progress
        self.verified: list[Engine] = []  # hold the last push, and have not been fenced since
        self._status: dict[str, EngineStatus] = {engine.url: "live" for engine in engines}
        self._live = self.engines
        self._reasons: dict[str, str] = {}
        self.num_failures: dict[str, int] = {engine.url: 0 for engine in engines}  # since its last good reply
        self._lock = threading.Lock()

    def live(self) -> list[Engine]:
        """Return the engines that sample, in a fixed order."""
        return list(self._live)

    def back(self) -> list[Engine]:
        """Return the fenced engines that are healthy again and wait for weights."""
        return self._with_status("back")

    def expect(self, version: int) -> None:
        """Accept replies sampled with weights of this version, whose push begins now."""
        self.newest_version = max(self.newest_version, version)

    def home(self, prompt_id: int) -> Engine | None:
        """Return the live engine that caches the prefixes of this prompt's responses, or None if no engine is live."""
        live = self._live
        return live[prompt_id % len(live)] if live else None

    def is_hopeless(self) -> bool:
        """Return whether no engine is live and none is expected back."""
        return all(status == "lost" for status in self._status.values())

    def is_live(self, engine: Engine) -> bool:
        return self._status[engine.url] == "live"

    def fence(self, engine: Engine, reason: str) -> None:
        """Send the engine no requests until a push has verified its weights. Safe to call again."""
        with self._lock:
            if self._status[engine.url] in ("live", "back"):  # also one that no push can admit
                self.num_fenced += 1
                log.warning("%s is fenced off: %s", engine.url, reason)
                self.num_failures[engine.url] += 1
            self._status[engine.url] = "lost" if self.num_failures[engine.url] >= _MAX_FAILURES else "fenced"
            self._reasons[engine.url] = reason
            self.verified = [other for other in self.verified if other is not engine]
            self._live = self._that_are("live")

    def replied(self, engine: Engine) -> None:
        """Record a good reply of this engine."""
        self.num_failures[engine.url] = 0

    def admit(self, engine: Engine) -> None:
        """Let an engine sample again. The caller has compared its version and checksums."""
        with self._lock:
            if self._status[engine.url] != "live":
                log.warning("%s takes part again", engine.url)
            self._status[engine.url] = "live"
            self._reasons.pop(engine.url, None)
            self._live = self._that_are("live")

    def describe(self) -> str:
        """Explain why engines are missing, one clause each; empty if all are live."""
        with self._lock:
            return "; ".join(f"{url} is {self._status[url]} ({reason})" for url, reason in self._reasons.items())

    async def watch(self) -> None:
        """Poll fenced engines until cancelled; mark one `back` once its health check succeeds."""
        while True:
            await self.probe()
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def probe(self) -> None:
        """Check the health of the fenced engines once."""
        fenced = self._with_status("fenced")
        for engine, is_healthy in zip(fenced, await asyncio.gather(*(e.health() for e in fenced)), strict=True):
            if is_healthy:
                with self._lock:
                    if self._status[engine.url] == "fenced":
                        self._status[engine.url] = "back"

    async def until_one_is_back(self) -> None:
        """Wait for a fenced engine to be healthy again; `watch` must be running.

        Raises:
            EngineError: none is expected back, or none came within `return_limit_s`; says why each engine is missing.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.return_limit_s
        while not self.back():
            if self.is_hopeless() or loop.time() > deadline:
                waited = "" if self.is_hopeless() else f" after {self.return_limit_s:g} s"
                raise EngineError(f"no rollout engine is left{waited}: {self.describe()}")
            await asyncio.sleep(_POLL_S)

    def _with_status(self, status: EngineStatus) -> list[Engine]:
        with self._lock:
            return list(self._that_are(status))

    def _that_are(self, status: EngineStatus) -> tuple[Engine, ...]:
        return tuple(engine for engine in self.engines if self._status[engine.url] == status)
