"""The folder of a run: its settings, environment and results.

    runs/<name>/
        config.toml  command.txt  environment.json  git.diff     facts about the latest attempt
        metrics.jsonl  samples.jsonl  rollouts/  report.html  checkpoints/  results of the whole run
        parent.json                                              of a branch: its parent, step and changed settings
        inputs.json                                              digests of prompts and of the user's modules
        status.json                                              where the run stands, for programs that poll it
        run-id.txt                                               random id that its checkpoints name
        logs/attempt-N/                                          logs of one attempt, and its copy of the facts
            state.txt                                            its `AttemptState`
            first-step.txt                                       number of steps finished before it, once it trains
            restart.json                                         why the run started it by itself (restarts.py)
            judge.txt                                            first failure of a judge that fails often

Running the same name again starts the next attempt of the same run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from bapo_megatron.errors import UserError, did_you_mean, plural
from bapo_megatron.runs.provenance import describe_environment, git_state
from bapo_megatron.runs.resuming import (
    check_resumable,
    has_results,
    num_steps_done,
    num_steps_planned,
    num_steps_saved,
    with_pins,
)
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime.files import explaining_os_errors, similar_paths, write_atomically

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

log = logging.getLogger(__name__)

_RUN_ID = "run-id.txt"
_STATUS = "status.json"

AttemptState = Literal["starting", "training", "finished", "interrupted", "failed"]
"""State of an attempt. A killed attempt keeps its last state but does not hold the lock."""


class RunDir:
    """Paths and lock of one run. A context manager that releases the lock."""

    def __init__(self, path: Path, attempt: int, lock: TextIO | None = None, *, is_finished: bool = False) -> None:
        self.path = path
        self.attempt = attempt  # counted from 1
        self.is_finished = is_finished  # all steps were done by earlier attempts
        self._lock = lock

    @classmethod
    def open(cls, config: Config, *, patience_s: float = 0.0) -> RunDir:
        """Lock runs/<name>/ for this process, check that it may be resumed, and record the new attempt.

        A finished run is left unchanged.

        Args:
            patience_s: how long to wait for another process to give up the run, for example on a node that just failed.

        Raises:
            UserError: another process holds the run.
            ConfigError: the run was started with other settings, or has done more steps than the configuration asks
                for. The folder is then unchanged.
        """
        from bapo_megatron.config.load import dump_config

        return cls.open_path(Path(config.run.dir) / config.run.name, dump_config(config), patience_s)

    @classmethod
    def open_path(cls, path: Path, config_text: str, patience_s: float = 0.0) -> RunDir:
        """Open a folder like `open`, with the configuration given as TOML text."""
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the run directory {path}: {error.strerror}; set run.dir") from error
        with explaining_os_errors(path):
            lock = _take_lock(path, patience_s)
        try:
            run = cls._next(path, config_text, lock)
            if run.is_finished:
                return run
            run._begin(config_text)
        except BaseException:
            lock.close()
            raise
        return run

    def begin_next(self) -> None:
        """Begin the next attempt with the same settings, under the same lock.

        Raises:
            UserError: the disk is full. This attempt then stays the latest one.
        """
        config_text = self.config_path.read_text(encoding="utf-8")
        self.attempt += 1
        try:
            self._begin(config_text)
        except UserError:
            shutil.rmtree(self.log_dir, ignore_errors=True)
            self.attempt -= 1
            raise

    def _begin(self, config_text: str) -> None:
        with explaining_os_errors(self.path):
            self.log_dir.mkdir(parents=True)
            self.checkpoints_dir.mkdir(exist_ok=True)
        self._record_facts(config_text)
        if self.run_id is None:
            write_atomically(self.path / _RUN_ID, f"{secrets.token_hex(8)}\n")
        self.mark("starting", planned_steps=num_steps_planned(config_text))

    @classmethod
    def preview(cls, config: Config) -> RunDir:
        """Return what `open` would, and raise the same errors, but take no lock and change nothing."""
        from bapo_megatron.config.load import dump_config

        path = (Path(config.run.dir) / config.run.name).absolute()
        if is_in_use(path):
            raise _in_use(path)
        if has_results(path):
            config = with_pins(config)
        return cls._next(path, dump_config(config), None)

    @classmethod
    def _next(cls, path: Path, config_text: str, lock: TextIO | None) -> RunDir:
        check_resumable(path, config_text)
        is_finished = num_steps_done(path) == num_steps_planned(config_text)
        return cls(path, _last_attempt(path) + (not is_finished), lock, is_finished=is_finished)

    @classmethod
    def attach(cls, path: Path) -> RunDir:
        """Open the latest attempt of a run without its lock: for the run's other processes, and for readers."""
        if not path.is_dir():
            advice = did_you_mean(*similar_paths(path)) or "give the folder of a run, such as runs/demo"
            raise UserError(f"there is no run at {path}; {advice}")
        return cls(path.absolute(), max(1, _last_attempt(path)))

    @property
    def log_dir(self) -> Path:
        return self.path / "logs" / f"attempt-{self.attempt}"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def turn_file(self) -> Path:
        """File whose lock tells who may take the memory of shared GPUs, in all attempts (runtime/turn.py)."""
        return self.path / ".turn"

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def own_metrics_path(self) -> Path:
        return self.path / "own_metrics.json"

    @property
    def inputs_path(self) -> Path:
        """Digests of the prompts' files and the user's modules when the latest attempt began."""
        return self.path / "inputs.json"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    @property
    def run_id(self) -> str | None:
        """Random id of the run, which its checkpoints name, or None before the first attempt."""
        try:
            return (self.path / _RUN_ID).read_text(encoding="utf-8", errors="replace").strip() or None
        except FileNotFoundError:
            return None

    def log_path(self, role: str, rank: int) -> Path:
        """Return the log file of one process of this attempt, such as logs/attempt-2/trainer-0.log."""
        return self.log_dir / f"{role}-{rank}.log"

    @property
    def stop_file(self) -> Path:
        """File whose existence asks the trainer ranks of this attempt to save and stop at the end of the step."""
        return self.log_dir / "stop"

    @property
    def state(self) -> AttemptState | None:
        """State of this attempt, or None if none could be recorded."""
        try:
            text = (self.log_dir / "state.txt").read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return next((state for state in get_args(AttemptState) if state == text), None)

    def mark(self, state: AttemptState, rank: int = 0, **facts: Any) -> None:
        """Record the state of this attempt, and further facts for status.json, as far as the disk allows.

        Training does not depend on it.

        Args:
            rank: the trainer rank that calls. Only rank 0 writes status.json, and the launcher once no rank runs, so
                that it has one writer at a time.
        """
        self._note("state.txt", state)
        if rank == 0:
            self.write_status(state=state, **facts)

    def write_status(self, **facts: Any) -> None:
        """Replace facts in status.json as far as the disk allows: state, step, planned_steps, alarms.

        Nothing else writes it. Trainer rank 0 calls this when it records a step; rank 0 and the launcher call it
        through `mark`.
        """
        empty: dict[str, Any] = {
            "state": None,
            "attempt": 0,
            "step": 0,
            "planned_steps": None,
            "time": "",
            "alarms": [],
        }
        now = datetime.now(UTC).isoformat(timespec="seconds")
        status = empty | _read_status(self.path) | facts | {"attempt": self.attempt, "time": now}
        with contextlib.suppress(UserError):
            write_atomically(self.path / _STATUS, json.dumps(status, indent=2, default=asdict) + "\n")

    def mark_training(self, first_step: int) -> None:
        """Record how many steps were finished when this attempt began to train; metrics.jsonl ends there."""
        self._note("first-step.txt", first_step)
        self.mark("training")

    @property
    def first_step(self) -> int | None:
        """Number of finished steps after which this attempt continues, or None before it trains."""
        try:
            return int((self.log_dir / "first-step.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _note(self, name: str, value: object) -> None:
        with contextlib.suppress(UserError):
            write_atomically(self.log_dir / name, f"{value}\n")

    def num_steps_saved(self) -> int:
        """Return the step of the checkpoint from which a resume would start, or 0."""
        return num_steps_saved(self.path) or 0

    def what_is_saved(self, num_steps: int) -> str:
        """Say from where a resume would start, and what is lost. Example: "saved: step 20 of 60; 5 later steps lost".

        Args:
            num_steps: train.num_steps.
        """
        rows, num_saved = read_metrics(self.metrics_path), self.num_steps_saved()
        num_lost = max(0, int(rows[-1]["step"]) - num_saved) if rows else 0
        saved = f"saved: step {num_saved} of {num_steps}"
        told = saved if num_saved else "nothing is saved yet; the next start begins at step 1"
        return f"{told}; {plural(num_lost, 'later step' if num_saved else 'step')} lost" if num_lost else told

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_facts(self, config_text: str) -> None:
        commit, diff = git_state(Path(__file__).parent)
        texts = {
            "config.toml": config_text,
            "command.txt": shlex.join(sys.argv) + "\n",
            "environment.json": json.dumps(describe_environment() | {"git_commit": commit}, indent=2) + "\n",
            "git.diff": diff,
        }
        for name, text in texts.items():
            write_atomically(self.log_dir / name, text)
            write_atomically(self.path / name, text)


def _read_status(run_path: Path) -> dict[str, Any]:
    """Read the status.json of a run; return {} if it cannot be read."""
    try:
        status = json.loads((run_path / _STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


_READER_S = 0.3  # longer than `is_in_use` holds the lock


def _take_lock(path: Path, patience_s: float) -> TextIO:
    """Take an exclusive lock, which the system releases when this process ends for any reason."""
    lock = (path / ".lock").open("a+", encoding="utf-8")
    deadline = time.monotonic() + max(patience_s, _READER_S)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            lock.close()
            raise _in_use(path) from None
        except OSError as error:  # some network file systems have no locks; running without one is still useful
            text = "%s: this file system cannot lock (%s); make sure that one process runs this name"
            log.warning(text, path, error)
        break
    lock.truncate(0)
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    lock.write(f"process {os.getpid()} on {socket.gethostname()} (since {since})\n")
    lock.flush()
    return lock


def _in_use(path: Path) -> UserError:
    """Return the error for a run that another process holds."""
    holder = (path / ".lock").read_text(encoding="utf-8").strip() or "another process"
    return UserError(f"the run {path} is in use by {holder}; wait for it, stop it, or choose another run.name")


def is_in_use(path: Path) -> bool:
    """Return whether a process holds the run, here or on another machine that shares the file system's locks."""
    try:
        with (path / ".lock").open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock was ever taken, or the file system has none
        return False
    return False


def _last_attempt(path: Path) -> int:
    numbers = [folder.name.removeprefix("attempt-") for folder in (path / "logs").glob("attempt-*")]
    return max((int(text) for text in numbers if text.isdigit()), default=0)
