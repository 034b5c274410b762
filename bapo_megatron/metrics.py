"""The metrics of a run, each declared once, in metrics.toml or by its loss: its meaning, unit, reductions and panel.

    bapo help metrics

A loss returns a record of per-token values. The learner reduces them over tokens, micro-batches and ranks (`tokens`);
the recorder reduces the updates of a step to one number (`updates`); the report draws it (`panel`). An undeclared
metric is averaged over the updates and kept in metrics.jsonl.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

MAX_REWARD_PARTS = 32  # a run has no more
METRIC_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*", re.ASCII)
MAX_METRIC_CHARS = 100
_REWARD_PART = re.compile(r"reward/[A-Za-z0-9][\w.-]{0,63}/mean", re.ASCII)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a training step: a table of metrics.toml, or one of `LossConfig.metrics`."""

    key: str  # in metrics.jsonl, such as "loss/entropy"
    unit: str  # "share" lies in 0..1
    meaning: str  # one sentence
    advice: str = ""  # how to read it
    remedy: str = ""  # what to do if it is not as advice says, after "Otherwise"
    tokens: Literal["mean", "max"] | None = None  # reduction over an update's trained tokens; None if there is none
    of: str = ""  # field of the loss's record that is reduced; "": the sum comes from a table (`learner.token_metrics`)
    updates: Literal["mean", "max", "sum", "last"] = "mean"  # reduction over the updates of a step
    per: str = ""  # metric that divides this one, once both are reduced
    squared_per: str = ""  # metric of the same update that divides the square of this one
    panel: str = ""  # "section / title" of the figure that draws it; "": none

    @property
    def how_to_read(self) -> str:
        """The advice with its remedy."""
        return f"{self.advice} Otherwise {self.remedy}" if self.remedy else self.advice


@dataclass(frozen=True, slots=True)
class MetricSection:
    """The metrics below one prefix, as `bapo help metrics` shows them."""

    title: str
    metrics: tuple[Metric, ...]  # in a key that holds a placeholder, one metric stands for several
    intro: str = ""
    placeholders: Mapping[str, Sequence[str]] | None = None
    """{"NN": ["00", "10"]} means p00 and p10 instead of pNN; {"NAME": []} means any name from the run's settings."""


def declared(key: str) -> Metric | None:
    """Return the declaration of a metric, under its own key; None if there is none.

    Example: declared("eval/aime/reward") has the meaning of "eval/NAME/reward".
    """
    parts = key.split("/")
    family = METRIC_FAMILIES.get(f"{parts[0]}/NAME/{parts[2]}") if len(parts) == 3 else None
    return METRICS.get(key) or (family and replace(family, key=key))


class RewardParts:
    """The names of reward parts that a run keeps: words of an environment or a program, so bounded here.

    Args:
        rows: the metrics of the steps so far, whose parts are kept.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._kept: set[str] = set()
        for row in rows:
            self.left_out(row)

    def left_out(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the metrics of parts whose names are malformed or too many."""
        names = [name for name in metrics if name.startswith("reward/") and name not in METRICS]
        for name in names:
            if len(self._kept) < MAX_REWARD_PARTS and _REWARD_PART.fullmatch(name):
                self._kept.add(name)
        return [name for name in names if name not in self._kept]


def reduce_updates(collected: Mapping[str, Sequence[float]], own: Sequence[Metric] = ()) -> dict[str, float]:
    """Reduce each metric's values from the updates of a step to one; nan if none is finite.

    Args:
        own: declarations of the loss's own metrics.
    """
    known = METRICS | {metric.key: metric for metric in own}
    declared = {key: known.get(key, _UNDECLARED) for key in collected}
    reduced = {key: _reduced(values, declared[key].updates) for key, values in collected.items()}
    for key, metric in declared.items():
        if metric.per:
            reduced[key] = reduced[key] / reduced[metric.per] if reduced[metric.per] else math.nan
    return reduced


def _reduced(values: Sequence[float], how: str) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    if how == "max":
        return max(finite)
    if how == "last":
        return finite[-1]
    return math.fsum(finite) if how == "sum" else math.fsum(finite) / len(finite)


def _sections(declared: Mapping[str, Any]) -> list[MetricSection]:
    """Read the sections in order: ["loss/"] holds loss/entropy, ["/"] holds the keys without a slash."""
    members: dict[str, list[Metric]] = {key: [] for key in declared if key.endswith("/")}
    for key, table in declared.items():
        if key not in members:
            members[key[: key.find("/") + 1] or "/"].append(Metric(key, **table))
    return [MetricSection(metrics=tuple(metrics), **declared[key]) for key, metrics in members.items()]


def _expanded(section: MetricSection) -> list[Metric]:
    metrics = list(section.metrics)
    for name, values in (section.placeholders or {}).items():
        metrics = [
            replace(m, key=m.key.replace(name, value), per=m.per.replace(name, value))
            for m in metrics
            for value in (values if name in m.key else [name])
        ]
    return metrics


_DECLARED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
INTRO = _DECLARED.pop("intro")
SECTIONS = _sections(_DECLARED)
_UNDECLARED = Metric("", "", "")
METRICS = {metric.key: metric for section in SECTIONS for metric in _expanded(section)}
METRIC_FAMILIES = {metric.key: metric for section in SECTIONS for metric in section.metrics if "/NAME/" in metric.key}
"""Metrics whose keys contain a name from the run's settings, such as an evaluation set's."""
