"""Ground of every process: its cores here, its rank, heartbeat, times and files in the modules. Imports no torch."""

import os


def num_cores() -> int:
    """Count the cores this process may use: taskset, cpusets and SLURM may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
