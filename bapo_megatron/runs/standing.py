"""The state of a run and its counts of events, read from its folder: what a reader wants to know first."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from bapo_megatron.metrics import METRICS
from bapo_megatron.runs.folder import RunDir, is_in_use
from bapo_megatron.runs.history import History
from bapo_megatron.runs.restarts import first_attempt
from bapo_megatron.runs.summary import increases

_TAIL_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last):\n"
_LOG_LINE = re.compile(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d")
_ERROR_LINE = re.compile(r"(?m)^(?!Traceback|The above|During|\[rank)(\S.*)$")


class Standing(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # neither running nor finished, without an error in its logs


@dataclass(frozen=True, slots=True)
class RunStanding:
    """The state of a run, and the logs of its latest attempt and of the engines that it uses."""

    state: Standing
    error: str  # error of the latest attempt, or ""
    judge_failure: str  # first failure in the latest attempt if the judge failed often, or ""
    attempt: int
    logs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class EventCount:
    """An event that should not happen in a run: how often it did, and at which step last."""

    name: str
    count: int
    latest_step: int  # 0 if there was none
    advice: str


@dataclass(frozen=True, slots=True)
class _Watched:
    """A metric that counts such events, either in one step or up to that step."""

    key: str
    name: str
    is_running_total: bool


_WATCHED = (
    _Watched("reward/errors", "judge errors", is_running_total=True),
    _Watched("reward/timeouts", "judge timeouts", is_running_total=True),
    _Watched("reward/refused_calls", "programs that failed after a refused system call", is_running_total=True),
    _Watched("environment/errors", "environment errors", is_running_total=True),
    _Watched("environment/timeouts", "environment timeouts", is_running_total=True),
    _Watched("mismatch/alarms", "updates with a mismatch", is_running_total=False),
    _Watched("optimizer/grad_alarms", "gradient spikes", is_running_total=False),
    _Watched("optimizer/skipped", "skipped updates", is_running_total=True),
    _Watched("rollout/num_fenced", "engines fenced off", is_running_total=True),
    _Watched("run/restarts", "restarts of the trainer ranks", is_running_total=True),
)


def read_standing(run: History) -> RunStanding:
    """Read the state of a run: finished or interrupted, even if a process still holds it to write the report."""
    latest = RunDir.attach(run.path)
    is_finished = bool(run.rows) and run.num_planned_steps is not None and run.rows[-1]["step"] >= run.num_planned_steps
    error = "" if is_finished or latest.state == "interrupted" else _error(latest.log_dir)
    if is_finished:
        state = Standing.FINISHED
    elif latest.state != "interrupted" and is_in_use(run.path):
        state = Standing.RUNNING
    else:
        state = Standing.FAILED if error or latest.state == "failed" else Standing.INTERRUPTED
    judge = latest.log_dir / "judge.txt"
    judge_failure = judge.read_text(encoding="utf-8", errors="replace").strip() if judge.exists() else ""
    return RunStanding(state, error, judge_failure, latest.attempt, tuple(_logs(latest)))


def _logs(latest: RunDir) -> list[Path]:
    """Return the logs of an attempt, and of engines that an earlier attempt has started for it."""
    logs = sorted(latest.log_dir.glob("*.log"))
    if (first := first_attempt(latest)).attempt < latest.attempt:
        logs += sorted(path for path in first.log_dir.glob("*.log") if not path.name.startswith("trainer-"))
    return logs


def _error(log_dir: Path) -> str:
    """Return the error that ended an attempt: a message for the user, or the first line of an uncaught exception."""
    for path in sorted(log_dir.glob("error-*.txt")):
        if text := path.read_text(encoding="utf-8", errors="replace").strip():
            return text
    for path in sorted(log_dir.glob("trainer-*.log")):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            _, found, end = log.read().decode(errors="replace").rpartition(_TRACEBACK)
        if found and not _LOG_LINE.search(end) and (line := _ERROR_LINE.search(end)):
            return line.group(1)
    return ""


def count_events(run: History) -> list[EventCount]:
    """Count the events of each kind that the run recorded, over all of its attempts."""
    return [_count(run, watched) for watched in _WATCHED if np.isfinite(run.column(watched.key)).any()]


def _count(run: History, watched: _Watched) -> EventCount:
    column = run.column(watched.key)
    known = np.isfinite(column)
    values, steps = column[known], run.steps[known]
    if watched.is_running_total:
        values = np.array(increases([0.0, *values]))
    raised = steps[values > 0]
    return EventCount(
        watched.name,
        count=round(float(values.sum())),
        latest_step=int(raised[-1]) if len(raised) else 0,
        advice=_advice(watched.key),
    )


def _advice(key: str) -> str:
    """Return what to do about a count above 0."""
    remedy = METRICS[key].remedy.replace("`", "")
    return remedy[:1].upper() + remedy[1:]
