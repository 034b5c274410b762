"""What every process needs: here its cores, memory and the command `bapo`; in modules its rank, heartbeat and files.

Start at `together.failing_together`. This file does not import torch.
"""

import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bapo_megatron.runtime.cgroups import cgroup_limits

LOOPBACK = "127.0.0.1"


def num_cores() -> int:
    """Count the cores this process may use: taskset, SLURM and containers may allow fewer than the machine has.

    A part of a core does not count, because a thread would wait for it.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_limits().cores)))


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or less in a container."""
    return int(min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup_limits().memory_bytes))


_MAX_OPEN_FILES = 2**16  # programs that a process starts inherit its limit, and some visit every number below it


def raise_open_files() -> int:
    """Let this process have as many files and connections open as the system allows it, up to 65,536; return how many.

    Most systems begin with a soft limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_OPEN_FILES
    allowed = max(soft, _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def python_module(name: str) -> list[str]:
    """Return the words that start a module of this package in a new process.

    With -P the working folder is not on its search path, where a file such as random.py would hide Python's own module.
    `config/dotted.py` appends the folder for the user's own functions.
    """
    return [sys.executable, "-P", "-m", name]


def stamp() -> str:
    """Return date, time and process id for the name of a new folder: two may be made in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def program() -> list[str]:
    """Return the words that start `bapo` in a shell here: just its name if this Python's environment is active."""
    own = Path(sys.executable).with_name("bapo")
    found = shutil.which("bapo")
    if not own.exists():
        return [sys.executable, "-m", "bapo_megatron"]
    if found is not None and os.path.samefile(found, own):
        return ["bapo"]
    with suppress(ValueError, OSError):  # the working folder may have been deleted
        return [os.path.join(os.curdir, own.relative_to(Path.cwd()))]
    return [str(own)]


_NEW_OBJECTS_PER_COLLECTION = 10_000  # 50 responses that start together reach Python's default of 700


@contextmanager
def starting() -> Iterator[None]:
    """Import modules without Python's garbage collector; afterwards it skips their objects, and runs less often.

    A collection visits every live object, and torch with Megatron-Core has a million. During imports that takes a
    second; later it would stop a step for a third of a second. Only small objects wait longer for a collection: neither
    an update nor an engine leaves a tensor in a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
        if was_enabled:
            gc.enable()


_PYTHON_TIMEOUT_S = 60.0  # for a process that imports Transformer Engine


def run_python(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = _PYTHON_TIMEOUT_S
) -> tuple[str, str]:
    """Run code in a new process; return the last lines of its output and of its traceback ("" on success)."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    variables = os.environ | (environment or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=variables)
    except subprocess.TimeoutExpired:
        return "", f"not done after {timeout_s:g} s"
    said, told = (text.strip().splitlines() or ["it ended without output"] for text in (done.stdout, done.stderr))
    return (said[-1], "") if done.returncode == 0 else ("", told[-1])
