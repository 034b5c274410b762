"""Embedded engine processes for tests."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.assets import demo_model_path


@dataclass
class EngineProcess:
    process: subprocess.Popen[bytes]
    url: str

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdin is not None
        self.process.stdin.close()


def start_engines(folder: Path, count: int, *arguments: str) -> list[EngineProcess]:
    """Embedded engines with the demo model as weight version 0; `arguments` come last and may replace others."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = [folder / f"ready-{i}.json" for i in range(count)]
    command = [sys.executable, "-m", "bapo_megatron.engines.embedded", "--model-path", str(demo_model_path())]
    command += ["--max-context", "64", "--max-running", "64", "--weight-version", "0", "--exit-with-parent"]
    command += arguments
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, "--ready-file", f], stdin=subprocess.PIPE, env=env) for f in ready]
    deadline = time.monotonic() + 120
    while not all(file.exists() for file in ready):
        assert all(p.poll() is None for p in processes), "an engine ended while it started"
        assert time.monotonic() < deadline, "the engines did not start in 120 s"
        time.sleep(0.05)
    ports = [json.loads(file.read_text())["port"] for file in ready]
    return [EngineProcess(p, f"http://127.0.0.1:{port}") for p, port in zip(processes, ports, strict=True)]
