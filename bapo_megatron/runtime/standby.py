"""Trainer ranks on standby: processes that have imported everything, and wait to be told which rank they are.

    local.py, once ranks train          StandbyRanks.fill()  --> python -m bapo_megatron.trainer --run-dir RUN --standby
    local.py, when they start again     StandbyRanks.take()  --> one line on its standard input: `Orders` as JSON

A standby holds no GPU memory and no connection. It ends with its launcher: its standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bapo_megatron.runtime import python_module


@dataclass(frozen=True, slots=True)
class Orders:
    """What a standby process needs to become a trainer rank."""

    environment: Mapping[str, str]  # its own variables
    urls: list[str]  # the engines'
    key: str | None = field(default=None, repr=False)  # the engines', for the first rank

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def wait(cls) -> Orders | None:
        """Wait for orders on standard input and return them; None if the launcher has closed it."""
        line = sys.stdin.readline()
        return cls(**json.loads(line)) if line else None


class StandbyRanks:
    """One run's processes on standby: a context manager that ends the unused ones.

    Args:
        count: how many to keep; 0 for none.
        environment: variables that must be set before they import torch.
    """

    def __init__(self, run_path: Path, count: int, environment: Mapping[str, str]) -> None:
        self._command = [*python_module("bapo_megatron.trainer"), "--run-dir", str(run_path), "--standby"]
        self._count = count
        self._environment = os.environ | environment
        self._waiting: list[subprocess.Popen[bytes]] = []

    def fill(self) -> None:
        """Start the missing ones. A start that fails is ignored: a rank can do without a standby."""
        self._waiting = [process for process in self._waiting if process.poll() is None]
        with contextlib.suppress(OSError):
            while len(self._waiting) < self._count:
                self._waiting.append(
                    subprocess.Popen(
                        self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
                    )
                )

    def take(self, orders: Orders) -> subprocess.Popen[bytes] | None:
        """Turn the standby that has waited longest into a rank, and return it; None if there is none."""
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(orders.to_line())
                process.stdin.close()
                return process
            _end(process)
        return None

    def __enter__(self) -> StandbyRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # not reaped yet, so the pid is still its own
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard what this process prints: the terminal belongs to the run, and there is no log yet."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for target in (1, 2):
            os.dup2(nowhere, target)
        yield
    finally:
        for target, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.close(nowhere)
