"""Ground of every process: its cores and the command `bapo` here; its rank, heartbeat, times and files in the modules.

Imports no torch.
"""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def num_cores() -> int:
    """Count the cores this process may use: taskset, cpusets and SLURM may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def program() -> list[str]:
    """Return the words that start `bapo` in a shell here: its name if the environment of this Python is active."""
    own = Path(sys.executable).with_name("bapo")
    found = shutil.which("bapo")
    if not own.exists():
        return [sys.executable, "-m", "bapo_megatron"]
    if found is not None and os.path.samefile(found, own):
        return ["bapo"]
    with suppress(ValueError, OSError):  # the working folder may have been deleted
        return [os.path.join(os.curdir, own.relative_to(Path.cwd()))]
    return [str(own)]


_NEW_OBJECTS_PER_COLLECTION = 10_000  # Python's 700 come with 50 responses that start together


@contextmanager
def starting() -> Iterator[None]:
    """Import modules without Python's garbage collector; from then on it passes over them, and collects less often.

    A collection visits every live object, and torch with Megatron-Core has a million. During imports that takes a
    second; later it would stop a step for a third of a second. What waits longer for a collection is small: neither an
    update nor an engine leaves a tensor in a cycle.
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
