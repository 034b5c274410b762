"""The folder of a run: its settings, environment and results.

    runs/<name>/
        config.toml  command.txt  environment.json  git.diff     of the latest attempt
        metrics.jsonl  samples.jsonl  rollouts/  report.html  checkpoints/  of the whole run
        status.json                                              where the run stands, for programs that poll it
        run-id.txt                                               random: whose checkpoints these are
        logs/attempt-N/                                          logs of one attempt, with its own copy of the above
            state.txt                                            its `State`
            first-step.txt                                       finished steps before it, once it trains
            restart.json                                         why the run began it by itself (restarts.py)
            judge.txt                                            first failure of a judge that fails often

Running the same name again starts the next attempt of the same run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from bapo_megatron.assets import hub
from bapo_megatron.config.earlier import RETIRED
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runtime import num_cores
from bapo_megatron.runtime.files import explaining_os_errors, read_jsonl, step_of, write_atomically

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

logger = logging.getLogger(__name__)

# Settings that may change on resuming a run: they affect its length, speed or output, not its results.
RESUMABLE_SETTINGS = (
    "run.dir",
    "run.max_restarts",
    "run.standby",
    "cluster.*",
    "slurm.*",
    "checkpoint.*",
    "monitor.*",
    "sync.*",
    "train.num_steps",
    "train.max_tokens_per_microbatch",
    "train.logprob_chunk_tokens",
    "train.logprob_backend",
    "train.recompute",
    "train.recompute_layers",
    "train.recompute_modules",
    "parallel.*",
    "optimizer.distributed",
    "data.on_bad_prompt",
    "reward.concurrency",
    "rollout.engine",
    "rollout.record",
    "rollout.recorded_from",
    "rollout.overlap",
    "rollout.abort_tail",
    "rollout.max_staleness",
    "rollout.urls",
    "rollout.api_key",
    "rollout.num_servers",
    "rollout.server_tensor_parallel",
    "rollout.max_concurrent_requests",
    "rollout.max_retries",
    "rollout.max_restarts",
    "rollout.engine_threads",
    "sglang.*",
    "*timeout_s",
)
_PACKAGES = (
    "bapo-megatron",
    "torch",
    "megatron-core",
    "transformers",
    "sglang",
    "transformer-engine",
    "numpy",
    "pydantic",
)
_RUN_ID = "run-id.txt"
_STATUS = "status.json"
_MAX_DIFF_BYTES = 1 << 20
_MAX_FLOAT32 = 3.4028235e38
_GIT_TIMEOUT_S = 10.0

State = Literal["starting", "training", "finished", "interrupted", "failed"]
"""What an attempt has come to. One that was killed stays in its last state, without holding the lock."""


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
            patience_s: longest wait for another process to give up the run, as on a node that has just failed.

        Raises:
            UserError: another process holds the run.
            ConfigError: the run was started with other settings, or has done more steps than are wanted. The folder is
                then unchanged.
        """
        from bapo_megatron.config.load import dump_config

        return cls.open_path(Path(config.run.dir) / config.run.name, dump_config(config), patience_s)

    @classmethod
    def open_path(cls, path: Path, config_text: str, patience_s: float = 0.0) -> RunDir:
        """Open a folder as `open` does, for a configuration as TOML text."""
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
            UserError: the disk is full. This attempt is then still the latest one.
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
        self.mark("starting", planned_steps=_num_steps(config_text))

    @classmethod
    def preview(cls, config: Config) -> RunDir:
        """Return what `open` would, and raise the same errors, without the lock and without a change."""
        from bapo_megatron.config.load import dump_config

        path = (Path(config.run.dir) / config.run.name).absolute()
        if is_in_use(path):
            raise _in_use(path)
        if _has_results(path):
            config = with_pinned_models(config)
        return cls._next(path, dump_config(config), None)

    @classmethod
    def _next(cls, path: Path, config_text: str, lock: TextIO | None) -> RunDir:
        _check_resumable(path, config_text)
        is_finished = _num_steps_done(path) == _num_steps(config_text)
        return cls(path, _last_attempt(path) + (not is_finished), lock, is_finished=is_finished)

    @classmethod
    def attach(cls, path: Path) -> RunDir:
        """Open the latest attempt of a run without its lock: for the run's other processes, and for readers."""
        if not path.is_dir():
            raise UserError(f"no run at {path}; the folder names a run, such as runs/demo")
        return cls(path.absolute(), max(1, _last_attempt(path)))

    @property
    def log_dir(self) -> Path:
        return self.path / "logs" / f"attempt-{self.attempt}"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

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
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def rollouts_dir(self) -> Path:
        return self.path / "rollouts"

    @property
    def run_id(self) -> str | None:
        """Random id of the run, which its checkpoints name; None before its first attempt."""
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
    def state(self) -> State | None:
        """State of this attempt; None where none could be recorded."""
        try:
            text = (self.log_dir / "state.txt").read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return next((state for state in get_args(State) if state == text), None)

    def mark(self, state: State, rank: int = 0, **facts: Any) -> None:
        """Record the state of this attempt, and further facts for `tell`, as far as the disk allows: it decides nothing
        that is trained.

        Args:
            rank: the trainer rank that calls. status.json is left to the first one, and to the launcher once no rank
                runs: it has one writer at a time.
        """
        self._note("state.txt", state)
        if rank == 0:
            self.tell(state=state, **facts)

    def tell(self, **facts: Any) -> None:
        """Replace facts in status.json as far as the disk allows: state, step, planned_steps, alarms."""
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
        """Record the number of finished steps with which this attempt begins to train; metrics.jsonl ends there."""
        self._note("first-step.txt", first_step)
        self.mark("training")

    @property
    def first_step(self) -> int | None:
        """Finished steps that this attempt continues after; None before it trains."""
        try:
            return int((self.log_dir / "first-step.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _note(self, name: str, value: object) -> None:
        with contextlib.suppress(UserError):
            write_atomically(self.log_dir / name, f"{value}\n")

    def num_steps_saved(self) -> int:
        """Return the steps behind the checkpoint that a resume begins with, or 0."""
        return _num_steps_saved(self.path) or 0

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
        commit, diff = _git_state(Path(__file__).parent)
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
    """Read the status.json of a run; empty without a readable one."""
    try:
        status = json.loads((run_path / _STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the steps in a metrics.jsonl in ascending order, null as NaN. The later line of a repeated step counts.

    A line without a step is skipped, and logged.
    """
    rows: dict[int, dict[str, float]] = {}
    for record in read_jsonl(path):
        step = step_of(record)
        if step is None:
            logger.warning("%s: skipped a line without a step: %.80r", path, record.get("step"))
        else:
            rows[step] = _as_floats(record) | {"step": float(step)}
    return [rows[step] for step in sorted(rows)]


def _as_floats(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line. One that no metric can have, beyond float32, is NaN like one that is not finite."""
    row = {name: math.nan if value is None else value for name, value in record.items()}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: float(value) if abs(value) <= _MAX_FLOAT32 else math.nan for name, value in numbers.items()}


def describe_environment() -> dict[str, Any]:
    """Describe this process: Python, platform, cores, packages; no environment variables, which may be secret."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "working_directory": str(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "num_cores": num_cores(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def different_settings(old_text: str, new_text: str) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two TOML texts, as {"bapo.rho0": (0.4, 0.5)}; None for an unset one."""
    old, new = (_flatten(tomllib.loads(text)) for text in (old_text, new_text))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _check_resumable(path: Path, config_text: str) -> None:
    """Refuse to mix two experiments in one folder. A run that has not finished a step may start over freely."""
    config_path = path / "config.toml"
    if not config_path.exists() or not _has_results(path):
        return
    num_done, num_steps = _num_steps_done(path), _num_steps(config_text)
    if num_steps is not None and num_done > num_steps:
        raise ConfigError(
            f"cannot resume the run {path}: it has done {num_done} steps, and train.num_steps is {num_steps}. Set "
            f"train.num_steps to {num_done} or more, or choose another run.name."
        )
    different = {
        key: values
        for key, values in different_settings(config_path.read_text(encoding="utf-8"), config_text).items()
        if not (
            any(fnmatch(key, pattern) for pattern in RESUMABLE_SETTINGS)
            or (key in RETIRED and RETIRED[key][0] == values[0])
            or _is_newer(key, *values)
        )
    }
    if different:
        lines = [f"  {key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in different.items()]
        raise ConfigError(
            f"cannot resume the run {path}: it was started with other settings (run -> now):\n"
            + "\n".join(lines)
            + "\nUse the run's settings, choose another run.name, or delete the folder to start over."
        )


def _is_newer(key: str, old: Any, new: Any) -> bool:
    """Return whether a setting is newer than the run, which lacks it, and at its default: the run behaved like that."""
    from bapo_megatron.config import paths

    path = tuple(key.split("."))
    if old is not None or path not in paths.schema() or paths.accepts(path, type(None)):  # then old may mean "none"
        return False
    default = paths.schema()[path].get_default(call_default_factory=True)
    return bool(new == (list(default) if isinstance(default, tuple) else default))


def _num_steps(config_text: str) -> int | None:
    return tomllib.loads(config_text).get("train", {}).get("num_steps")


def _num_steps_saved(path: Path) -> int | None:
    """Return the step of the checkpoint that `latest` names; None if it names no complete one."""
    with contextlib.suppress(OSError):
        named = re.fullmatch(r"step-(\d{6,18})", (path / "checkpoints" / "latest").read_text(errors="replace").strip())
        if named and (path / "checkpoints" / named[0] / "state.json").is_file():
            return int(named[1])
    return None


def _num_steps_done(path: Path) -> int:
    """Return the steps that a resumed run need not repeat; those of metrics.jsonl if none was ever saved."""
    saved = _num_steps_saved(path)
    if saved is not None or any((path / "checkpoints").glob("*")):
        return saved or 0
    rows = read_metrics(path / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def _has_results(path: Path) -> bool:
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def with_pinned_models(config: Config) -> Config:
    """Download the models that have names on the Hugging Face hub, and pin their commits.

    A run that is resumed keeps the commits of its config.toml.

    Raises:
        CheckpointError: see `hub.snapshot`.
    """
    try:
        earlier = tomllib.loads((Path(config.run.dir) / config.run.name / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a new run; RunDir.open says what is wrong with the folder of another
        earlier = {}
    changed = {}
    for section, key in (("model", "path"), ("loss", "reference_path"), ("critic", "path")):
        value = getattr(getattr(config, section), key, None)
        if value is None or not hub.is_hub_name(value) or hub.is_pinned(value):
            continue
        before = earlier.get(section, {}).get(key, "")
        pinned = hub.pin(before if before.startswith(f"{value}@") else value, setting=f"{section}.{key}")
        changed[section] = getattr(config, section).model_copy(update={key: pinned})
    return config.model_copy(update=changed)


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
        except OSError as error:  # some network file systems have no locks; a run there is still better than none
            text = "%s: this file system cannot lock (%s); make sure that one process runs this name"
            logger.warning(text, path, error)
        break
    lock.truncate(0)
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    lock.write(f"process {os.getpid()} on {socket.gethostname()} (since {since})\n")
    lock.flush()
    return lock


def _in_use(path: Path) -> UserError:
    """Return the error of a run that another process holds."""
    holder = (path / ".lock").read_text(encoding="utf-8").strip() or "another process"
    return UserError(f"the run {path} is in use by {holder}; wait for it, stop it, or choose another run.name")


def is_in_use(path: Path) -> bool:
    """Whether a process holds the run, on this machine or on another one that shares the file system's locks."""
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


def _git_state(folder: Path) -> tuple[str | None, str]:
    """Return commit and uncommitted changes of the checkout that holds this package; (None, "") outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, ""
    diff = _git(folder, "diff", "--no-color", "--no-ext-diff", "HEAD") or ""
    encoded = diff.encode()
    if len(encoded) > _MAX_DIFF_BYTES:
        kept = encoded[:_MAX_DIFF_BYTES].decode(errors="ignore")
        diff = f"{kept}\n[cut: the whole diff has {len(encoded)} bytes]\n"
    return commit.strip(), diff


def _git(folder: Path, *args: str) -> str | None:
    if shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, default=str)
