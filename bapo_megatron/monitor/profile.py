"""Traces of chosen steps (`monitor.profile_steps`), of trainer ranks and engines.

profile/step-000003-trainer-0.json.gz      of trainer rank 0
profile/step-000003-engine-0/              what the first engine writes, on its machine: SGLang a file for each rank
"""

from collections.abc import Callable
from pathlib import Path

from bapo_megatron.config.schema import MonitorConfig
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.errors import EngineError
from bapo_megatron.runtime.trace import Trace

_TIMEOUT_S = 300.0  # SGLang writes its traces before it answers


class StepProfiler:
    """Tracing of this rank's chosen steps; on rank 0 also of the engines'.

    Args:
        engines: None on the other ranks, and without engines.
        warn: is told of an engine that refuses; the run goes on.
    """

    def __init__(
        self,
        config: MonitorConfig,
        folder: Path,
        rank: int,
        engines: ConnectedEngines | None,
        warn: Callable[[str], None],
    ) -> None:
        self._chosen = config.profile_steps
        self._traces_here = rank == 0
        self._folder = folder.absolute()
        self._rank = rank
        self._engines = engines
        self._warn = warn
        self._name = ""  # of the traces in progress
        self._trace: Trace | None = None
        self._tracing_engines: list[int] = []  # their places in the pool

    def begin(self, step: int) -> None:
        """Start the traces of this step, numbered from 0, if it is a chosen one."""
        if step + 1 in self._chosen:
            self._name = f"step-{step + 1:06d}"
            self._tracing_engines = self._start_engines(self._name)
            self._trace = Trace() if self._traces_here else None

    def end(self) -> None:
        """End and write the traces in progress, if any."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.write(self._folder / f"{self._name}-trainer-{self._rank}.json.gz")
        started, self._tracing_engines = self._tracing_engines, []
        for i in started:
            self._ask(i, None)

    def _start_engines(self, name: str) -> list[int]:
        """Return the places, in the pool, of the engines that trace."""
        if self._engines is None:
            return []
        live = self._engines.pool.live()
        chosen = [i for i, engine in enumerate(self._engines.pool.engines) if engine in live]
        return [i for i in chosen if self._ask(i, self._folder / f"{name}-engine-{i}")]

    def _ask(self, index: int, folder: Path | None) -> bool:
        """Ask an engine to start a trace in a folder, or (None) to end it; return whether it did."""
        assert self._engines is not None
        engine = self._engines.pool.engines[index]
        call = engine.stop_profile() if folder is None else engine.start_profile(str(folder))
        verb = "end" if folder is None else "start"
        try:
            self._engines.loop.run(call, _TIMEOUT_S, f"{engine.url} to {verb} its trace")
        except EngineError as error:
            self._warn(f"{engine.url} did not {verb} its trace (monitor.profile_steps): {error}")
            return False
        return True
