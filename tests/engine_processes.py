"""Embedded engine processes for tests and benchmarks."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines import processes
from tests.hang import HANG_S

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


@dataclass
class EngineProcess:
    process: subprocess.Popen[bytes]
    url: str

    def end(self) -> None:
        processes.kill(self.process)


def start_engines(
    folder: Path,
    count: int,
    *arguments: str,
    model: Path | None = None,
    ports: Sequence[int] = (),
    module: str = "bapo_megatron.engines.embedded",
    key: str | None = None,
) -> list[EngineProcess]:
    """Start embedded engines with weight version 0; `arguments` come last and may override others.

    Args:
        folder: gets their logs.
        model: None means the demo model.
        ports: one per engine; without them, each engine takes a free port.
        module: the module that Python runs as an engine.
        key: what requests need.

    Raises:
        UserError, EngineError: see `processes.wait_until`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, "--model-path", str(model or demo_model_path())]
    command += ["--max-context", "64", "--max-running", "64", "--weight-version", "0", "--exit-with-parent"]
    started = []
    for i in range(count):
        ready, log = folder / f"ready-{i}.json", folder / f"engine-{i}.log"
        own = ("--port", str(ports[i] if ports else 0), "--ready-file", str(ready), *arguments)
        started.append((processes.start([*command, *own], log, _ENVIRONMENT, key), ready, log))
    engines = []
    for process, ready, log in started:
        processes.wait_until(ready.exists, process, log, HANG_S)
        engines.append(EngineProcess(process, f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"))
    return engines


@contextlib.contextmanager
def started_engines(folder: Path, count: int, *arguments: str, **options: Any) -> Iterator[list[EngineProcess]]:
    """Start engines as `start_engines` does, and end them."""
    engines = start_engines(folder, count, *arguments, **options)
    try:
        yield engines
    finally:
        for engine in engines:
            engine.end()
