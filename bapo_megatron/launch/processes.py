"""Engine processes: started with a log file, ended with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bapo_megatron.errors import EngineError, UserError

_END_TIMEOUT_S = 15.0
_POLL_S = 0.1


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start an engine that ends when its standard input closes, so that even kill -9 of this process leaves none.

    It has a session of its own: Ctrl-C is for this process, which ends the trainer ranks first.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close their standard inputs and wait; kill those that do not end."""
    for process in processes:
        if process.stdin:
            process.stdin.close()
    for process in processes:
        try:
            process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children: the session is its own
            process.wait(timeout=_END_TIMEOUT_S)


@contextlib.contextmanager
def naming_the_dead(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> Iterator[None]:
    """Where the body fails with a UserError, add which engines have ended meanwhile, and their logs."""
    try:
        yield
    except UserError as error:
        dead = [(p.returncode, log) for p, log in zip(processes, logs, strict=True) if p.poll() is not None]
        notes = [f"a rollout engine ended with exit code {code}; its log: {log}" for code, log in dead]
        raise UserError("\n".join([str(error), *notes])) from error


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Return when the engine is ready.

    Raises:
        UserError: it refused its arguments (exit code 2).
        EngineError: it ended, or was not ready in time; names its log.
    """
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        code = process.poll()
        if code == 2:
            raise UserError(f"the rollout engine refused to start: {_last_line(log)} (log: {log})")
        if code is not None:
            raise EngineError(f"the rollout engine ended with exit code {code}; its log: {log}")
        if time.monotonic() > deadline:
            raise EngineError(
                f"the rollout engine was not healthy after rollout.startup_timeout_s = {timeout_s:g} s; its log: {log}"
            )
        time.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
