"""Ground of every process: its cores here, its rank, heartbeat, times and files in the modules. Imports no torch."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def num_cores() -> int:
    """Count the cores this process may use: taskset, cpusets and SLURM may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def starting() -> Iterator[None]:
    """Import modules without Python's garbage collector, and have it pass over them ever after.

    A collection visits every live object, and torch with Megatron-Core has a million. During imports that takes a
    second; later it would stop a step for a third of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
