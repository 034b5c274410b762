"""A run read from its folder for reports: metrics, settings, environment. Works while the run is in progress."""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_megatron.errors import UserError, did_you_mean
from bapo_megatron.metrics import Metric
from bapo_megatron.runs.branching import Parent, read_parent
from bapo_megatron.runs.resuming import different_settings
from bapo_megatron.runs.steps import StepRow, read_metrics
from bapo_megatron.runtime.files import reading, similar_paths


@dataclass(frozen=True, slots=True)
class History:
    """The records of a run so far; `settings` and `environment` are empty if it did not record them."""

    path: Path
    name: str
    rows: Sequence[StepRow]  # one per finished step, ascending
    config_text: str
    settings: Mapping[str, Any]  # flat, such as "bapo.rho0"
    environment: Mapping[str, Any]
    diff_digest: str  # digest of uncommitted changes to the code; "" if there are none
    own_metrics: tuple[Metric, ...] = ()  # metrics of the user's own loss
    parent: Parent | None = None  # the first rows of a branch are its parent's

    @property
    def steps(self) -> NDArray[np.float64]:
        return self.column("step")

    @property
    def num_planned_steps(self) -> int | None:
        return self.settings.get("train.num_steps")

    def entries(self, setting: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the tables of a list such as "eval.sets" by their names, or {} if the run has none."""
        return {one["name"]: one for one in self.settings.get(setting) or ()}

    def samples_per_prompt(self, prefix: str) -> int | None:
        """Return the number of responses per prompt of the evaluation set with metrics `prefix`..., or None if unknown.

        Example: "eval/aime/" is the prefix of the set "aime".
        """
        own = self.entries("eval.sets").get(prefix.removeprefix("eval/").removesuffix("/"))
        return self.settings.get("eval.samples_per_prompt") if own is None else own["samples_per_prompt"]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a metric of every step, [num_steps], with nan for steps that did not record it."""
        return np.array([row.get(name, math.nan) for row in self.rows], dtype=np.float64)


def entry_names(runs: Sequence[History], setting: str) -> list[str]:
    """Return the names that any run uses in a list of tables, such as "eval.sets"."""
    return list(dict.fromkeys(name for run in runs for name in run.entries(setting)))


def read_history(path: Path) -> History:
    """Read a run directory. A run without finished steps has no rows.

    Raises UserError if `path` is not the folder of a run, or its facts cannot be read.
    """
    config_path, metrics_path, diff_path = path / "config.toml", path / "metrics.jsonl", path / "git.diff"
    if not config_path.exists() and not metrics_path.exists():
        what = "is not the folder of a run" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        advice = "give the folder of a run, such as runs/demo, or start one with `bapo train`"
        raise UserError(f"{path} {what}; {did_you_mean(*similar_paths(path)) or advice}")
    config_text = text_of(config_path)
    try:
        settings = {key: value for key, (_, value) in different_settings("", config_text).items()}
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{config_path} is damaged ({error}); restore it from logs/attempt-N/config.toml") from error
    diff = text_of(diff_path)
    return History(
        path=path,
        name=path.absolute().name,
        rows=[row for row in read_metrics(metrics_path) if math.isfinite(row["step"])],
        config_text=config_text,
        settings=settings,
        environment=_read_environment(path / "environment.json"),
        own_metrics=_read_own_metrics(path / "own_metrics.json"),
        parent=read_parent(path),
        diff_digest=hashlib.sha256(diff.encode()).hexdigest()[:8] if diff.strip() else "",
    )


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if it is missing."""
    with reading(path):
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read_environment(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(text_of(path)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it from logs/attempt-N/environment.json") from error


def _read_own_metrics(path: Path) -> tuple[Metric, ...]:
    if not path.exists():
        return ()
    try:
        return tuple(Metric(**declared) for declared in json.loads(text_of(path)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it to continue without its figures") from error
