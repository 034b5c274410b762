"""Embedded engine processes for tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.assets import demo_model_path
from tests.distributed import HANG_S
from tests.integration.nursery import ROOT


@dataclass
class EngineProcess:
    process: subprocess.Popen[bytes]
    url: str

    def end(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)
        assert self.process.stdin is not None
        self.process.stdin.close()


def start_engines(
    folder: Path,
    count: int,
    *arguments: str,
    ports: Sequence[int] = (),
    module: str = "bapo_megatron.engines.embedded",
) -> list[EngineProcess]:
    """Start embedded engines with the demo model as weight version 0; `arguments` come last and may override others.

    Args:
        ports: one per engine; without them, each engine takes a free port.
        module: the module that Python runs as an engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready = [folder / f"ready-{i}.json" for i in range(count)]
    command = [sys.executable, "-m", module, "--model-path", str(demo_model_path())]
    command += ["--max-context", "64", "--max-running", "64", "--weight-version", "0", "--exit-with-parent"]
    command += arguments
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    own = [["--port", str(port)] for port in ports] or [[]] * count
    processes = [
        subprocess.Popen([*command, *port, "--ready-file", str(file)], stdin=subprocess.PIPE, cwd=ROOT, env=env)
        for port, file in zip(own, ready, strict=True)
    ]
    deadline = time.monotonic() + HANG_S
    while not all(file.exists() for file in ready):
        assert all(p.poll() is None for p in processes), "an engine ended while it started"
        assert time.monotonic() < deadline, "the engines did not start"
        time.sleep(0.05)
    taken = [json.loads(file.read_text())["port"] for file in ready]
    return [EngineProcess(p, f"http://127.0.0.1:{port}") for p, port in zip(processes, taken, strict=True)]
