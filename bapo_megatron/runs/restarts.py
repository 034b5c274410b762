"""Restarts of the trainer ranks within a run: whether one is allowed, and what it records in the attempt's folder.

    attempt N fails --> next_restart() --a Restart--> attempt N + 1 with logs/attempt-<N+1>/restart.json, then its ranks
                                       \\--a reason--> the run ends

Only the folder tells ranks the number of their attempt: they attach to the newest logs/attempt-N/. Whoever starts ranks
asks `next_restart` after an exit code other than 0, 2 (a user has to fix something) and worker.STOPPED. local.py holds
the run's lock for all attempts and calls `start_again`. If each attempt takes the lock again, as trainer rank 0 of a
SLURM step does in RunDir.open, it calls `write_restart` after that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bapo_megatron.errors import plural
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime.files import write_atomically

_FILE = "restart.json"
_MAX_IN_VAIN = 2
_GOOD_STEPS = 3
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """The reason why a run started an attempt by itself."""

    problem: str  # how the previous attempt ended
    failed_at_s: float  # Unix time at which the first failure since the last completed step was noticed
    number: int  # counted from 1, up to run.max_restarts
    num_in_vain: int  # number of attempts in a row, up to the one that failed, that completed no step

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the ranks start: 1, 2, 4, ..., 30."""
        return float(min(_FIRST_DELAY_S * 2 ** min(self.number - 1, 10), _MAX_DELAY_S))


def next_restart(run_dir: RunDir, problem: str, failed_at_s: float, max_restarts: int) -> Restart | str:
    """Return the restart that follows the failure of this attempt, or the reason why there is none.

    Only an attempt that saved three steps or more resets the count, so that no run restarts forever.

    Args:
        problem: how the attempt ended.
        failed_at_s: Unix time at which that was noticed.
        max_restarts: see run.max_restarts.
    """
    before = restart_of(run_dir)
    num_completed, num_saved = _progress(run_dir)
    num_in_vain = 0 if num_completed else 1 + (before.num_in_vain if before else 0)
    number = 1 if before is None or num_saved >= _GOOD_STEPS else before.number + 1
    if num_in_vain >= _MAX_IN_VAIN:
        return f"{_MAX_IN_VAIN} attempts in a row completed no step"
    if number > max_restarts:
        return f"no restart is left (run.max_restarts={max_restarts})"
    began_s = failed_at_s if num_completed or before is None else before.failed_at_s
    return Restart(problem, began_s, number, num_in_vain)


def start_again(run_dir: RunDir, restart: Restart) -> None:
    """Begin the next attempt of a run, under the same lock. Raises UserError if the disk is full."""
    run_dir.begin_next()
    write_restart(run_dir, restart)


def write_restart(run_dir: RunDir, restart: Restart) -> None:
    """Write the reason for this attempt to its folder. Raises UserError if the disk is full."""
    write_atomically(run_dir.log_dir / _FILE, json.dumps(asdict(restart)) + "\n")


def restart_of(run_dir: RunDir) -> Restart | None:
    """Return the reason for this attempt, or None if a command started it or its file is damaged."""
    try:
        return Restart(**json.loads((run_dir.log_dir / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def num_restarts(run_path: Path) -> int:
    """Return how often a run has restarted its ranks, over all commands."""
    return len(list(run_path.glob(f"logs/attempt-*/{_FILE}")))


def first_attempt(run_dir: RunDir) -> RunDir:
    """Return the first attempt of this command; its folder holds the logs of the engines."""
    return first_attempt(RunDir(run_dir.path, run_dir.attempt - 1)) if restart_of(run_dir) else run_dir


def how_often(run_dir: RunDir) -> list[str]:
    """Return lines that say how often and why this command has restarted the ranks; no lines if it has not."""
    attempts = range(first_attempt(run_dir).attempt + 1, run_dir.attempt + 1)
    restarts = [restart for n in attempts if (restart := restart_of(RunDir(run_dir.path, n)))]
    failures = [f"attempt {n - 1}: {restart.problem}" for n, restart in zip(attempts, restarts, strict=True)]
    return [f"the ranks were restarted {plural(len(failures), 'time')}:", *failures] if failures else []


def _progress(run_dir: RunDir) -> tuple[int, int]:
    """Return how many steps this attempt has completed, and how many it has saved."""
    if (first_step := run_dir.first_step) is None:
        return 0, 0
    rows = read_metrics(run_dir.metrics_path)
    last_step = int(rows[-1]["step"]) if rows else 0
    return max(0, last_step - first_step), run_dir.num_steps_saved() - first_step
