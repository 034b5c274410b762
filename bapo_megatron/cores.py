"""How many CPU cores there are for this process."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that this process may use: under taskset, a cpuset or SLURM fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
