"""Values and reference levels that the report's figures derive from a run's metrics and settings."""

import re

import numpy as np

from bapo_megatron.metrics import METRICS
from bapo_megatron.report.figures import Column, moving_average
from bapo_megatron.report.panels import Level, Values
from bapo_megatron.runs.history import History

_BINS = tuple(key.removesuffix("_share") for key in METRICS if re.fullmatch(r"profile/p\d0_share", key))
"""Metric prefixes of the token profile's bins, such as "profile/p00", found without importing torch."""


def share_of(part: str, *others: str) -> Values:
    """Compute a metric's share of the sum of itself and others, or nan if the sum is 0."""

    def values(run: History) -> Column:
        whole = sum((run.column(name) for name in others), run.column(part))
        return _ratio(run.column(part), whole)

    return values


def clipped_part(name: str) -> Values:
    """Compute the clipped part of a class of tokens in percent, or nan if there are no such tokens."""
    return lambda run: 100 * _ratio(run.column(f"entropy_rule/{name}_clipped"), run.column(f"entropy_rule/{name}"))


def stage_time(stage: str) -> Values:
    """Return the seconds of a stage in each step, or nan if the run lacks the stage."""

    def values(run: History) -> Column:
        seconds = run.column(f"time/{stage}_s")
        return seconds if (seconds > 1e-3).any() else np.full_like(seconds, np.nan)

    return values


def undivided_training(run: History) -> Column:
    """Return the seconds of training in steps that did not record its parts; older runs did not."""
    return np.where(np.isnan(run.column("time/backward_s")), run.column("time/train_s"), np.nan)


def by_probability(name: str) -> Values:
    """Average one of `diagnostics.MEANS` over the run's trained tokens in each probability bin, [num_bins]."""

    def values(run: History) -> Column:
        tokens, means = (
            np.stack([np.nan_to_num(run.column("train/tokens"), nan=1.0) * run.column(f"{b}_share") for b in _BINS]),
            np.stack([run.column(f"{b}_{name}") for b in _BINS]),
        )
        tokens = np.where(np.isfinite(means), tokens, 0.0)
        return _ratio(np.nansum(tokens * np.nan_to_num(means), axis=1), np.nansum(tokens, axis=1))

    return values


def bin_centres(run: History) -> Column:
    return (np.arange(len(_BINS)) + 0.5) / len(_BINS)


def best_of_group(prefix: str) -> Values:
    """Return the best reward of a group in the evaluation set with metrics `prefix`..., or nan for single responses."""

    def values(run: History) -> Column:
        best = run.column(f"{prefix}best_of_group")
        return best if run.samples_per_prompt(prefix) != 1 else np.full_like(best, np.nan)

    return values


def predicted_entropy_change(run: History) -> Column:
    """Average the change of entropy that Eq. 6 predicts (up to the step size) over some steps."""
    return moving_average(-run.column("entropy_rule/covariance"))


def measured_entropy_change(run: History) -> Column:
    """Average the change of entropy to the next step over some steps; steps without a prediction become nan."""
    changes = np.append(np.where(np.diff(run.steps) == 1, np.diff(run.column("loss/entropy")), np.nan), np.nan)
    changes[np.isnan(run.column("entropy_rule/covariance"))] = np.nan
    return moving_average(changes)


def saturated_not_inert(run: History) -> Column:
    """Return the saturated share without inert updates: if a range has zero width, an update is both."""
    return np.minimum(run.column("bapo/saturated_share"), 1 - run.column("bapo/inert_share"))


def interior(run: History) -> Column:
    return 1 - run.column("bapo/inert_share") - saturated_not_inert(run)


def search_ranges(run: History) -> list[Level]:
    """Return the search ranges, upper bound first, in the order of the lines."""
    if run.settings.get("loss.name") != "bapo":
        return []
    ends = [[run.settings.get(f"bapo.{side}.{end}") for end in ("start", "stop")] for side in ("high", "low")]
    return [
        Level(f"range {low:g} to {high:g}", low, high) for low, high in ends if low is not None and high is not None
    ]


def rho_target(run: History) -> list[Level]:
    target = run.settings.get("bapo.rho0") if run.settings.get("loss.name") == "bapo" else None
    return [] if target is None else [Level(f"target {target:g}", target)]


def kl_target(run: History) -> list[Level]:
    target = run.settings.get("loss.kl_target")
    return [] if target is None else [Level(f"target {target:g}", target)]


def balance_level(run: History) -> list[Level]:
    return [Level("balance", 0.5)]


def _ratio(part: Column, whole: Column) -> Column:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole != 0)
