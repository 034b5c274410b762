"""Deadlines of tests. This module imports nothing, because some processes must import torch themselves."""

HANG_S = 3600.0  # only a hang misses it: over ten times the longest wait on two cores at load 20

PATIENT = (
    "rollout.startup_timeout_s=3600",
    "rollout.request_timeout_s=3600",
    "rollout.hang_timeout_s=7200",
    "sync.timeout_s=3600",
    "parallel.timeout_s=14400",
    "reward.timeout_s=3600",
)
"""Deadlines that no busy machine misses, for runs that do not test deadlines."""
