"""Engine processes that start in a fraction of a second: forked from a process that has imported everything."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Nursery:
    """A starter of embedded engines, each in its own session; they end with it.

    Those that end before it stay zombies, so that no other process gets their ids.
    """

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._lock = threading.Lock()  # several threads start engines
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, arguments: Sequence[str]) -> int:
        """Start an engine server and return its process id; the server is not healthy yet."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(list(arguments)), file=self._process.stdin, flush=True)
            pid = int(self._process.stdout.readline())
            self._pids.append(pid)
        return pid

    def end(self) -> None:
        for pid in self._pids:
            kill_session(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()  # killed


def kill_session(pid: int, number: signal.Signals) -> None:
    """Signal a session's processes, if there are any."""
    assert pid > 0, "0 would be our own session"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def stop(pid: int) -> None:
    """Stop a process; return once all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    while any(state_of(task) not in ("T", "") for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def state_of(task: Path) -> str:
    """Return the state letter in /proc: T is stopped; "" is a thread that has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Return whether a session has processes that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            facts = stat.read_text().rpartition(")")[2].split()
            state, group, num_threads = facts[0], int(facts[2]), int(facts[17])
            if group == pid and (state not in "ZX" or num_threads > 1):  # a thread may outlive the first one
                return True
    return False


def main() -> None:
    from bapo_megatron.engines.embedded import server
    from tests.integration.vain import build_in_engine

    build_in_engine()
    for line in sys.stdin:
        has_session, tell_session = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(has_session)
            os.close(tell_session)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            server.main(json.loads(line))
        os.close(tell_session)
        os.read(has_session, 1)  # until then it could not be killed as a session; now it may have ended by itself
        os.close(has_session)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
