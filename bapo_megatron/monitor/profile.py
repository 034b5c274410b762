"""Traces of trainer rank 0 and the engines in chosen steps (`monitor.profile_steps`).

profile/step-000003-trainer-0.json.gz      written by trainer rank 0
profile/step-000003-engine-0/              written by the first engine on its machine; SGLang writes a file per rank
"""

from collections.abc import Callable
from pathlib import Path

from bapo_megatron.config.schema import MonitorConfig
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.errors import EngineError
from bapo_megatron.runtime.trace import Trace

_TIMEOUT_S = 300.0  # SGLang writes its traces before it answers


class StepProfiler:
    """Tracing of the chosen steps on rank 0 and its engines; other ranks trace nothing.

    Args:
        engines: None on other ranks, and if there are no engines.
        warn: called if an engine refuses; the run continues.
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
        self._name = ""  # name of the traces in progress
        self._trace: Trace | None = None
        self._tracing_engines: list[int] = []  # their places in the pool

    def begin(self, step: int) -> None:
        """Start the traces of this step (counted from 0) if it was chosen."""
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
        """Start a trace on each live engine; return the pool indices of those that do."""
        if self._engines is None:
            return []
        live = self._engines.pool.live()
        chosen = [i for i, engine in enumerate(self._engines.pool.engines) if engine in live]
        return [i for i in chosen if self._ask(i, self._folder / f"{name}-engine-{i}")]

    def _ask(self, index: int, folder: Path | None) -> bool:
        """Ask an engine to start a trace in `folder` (None means to end the trace); return whether it did."""
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
