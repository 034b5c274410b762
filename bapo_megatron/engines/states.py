"""The state of every engine, polled every few seconds beside the sampling, for those who watch a run."""

from __future__ import annotations

import asyncio

from bapo_megatron.engines.base import EngineState
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError

_INTERVAL_S = 5.0


class EngineStates:
    """The latest states. `watch` runs on the engines' event loop; any thread may read `latest`."""

    def __init__(self, pool: EnginePool, engines: list[HttpEngine]) -> None:
        self.latest: list[EngineState] = []
        self._pool = pool
        self._engines = engines

    async def watch(self) -> None:
        """Poll until cancelled."""
        while True:
            self.latest = list(await asyncio.gather(*map(self._ask, self._engines)))
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self, engine: HttpEngine) -> EngineState:
        is_live = self._pool.is_live(engine)
        try:
            version, num_running, num_waiting = await engine.load()
        except EngineError:
            return EngineState(engine.url, False, is_live, -1, 0, 0)
        return EngineState(engine.url, True, is_live, version, num_running, num_waiting)
