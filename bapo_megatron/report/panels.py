"""Descriptions of the report's figures, which become plots of one run or several. `gallery.toml` lists the figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bapo_megatron.estimates import wilson_interval
from bapo_megatron.report.figures import (
    PLAIN,
    SMOOTH_STEPS,
    STEPS,
    Column,
    Plot,
    Scale,
    Series,
    XAxis,
    compared,
    moving_average,
)
from bapo_megatron.report.style import REFERENCE, look
from bapo_megatron.runs.history import History

Values = Callable[[History], Column]
Groups = Mapping[str, Sequence[History]]
"""Runs by the key of their line; the runs of one line differ only by seed."""

_Z_95 = 1.96  # a 95 % interval extends this many standard errors to either side of the mean


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal reference: a line at `low`, or a band from `low` to `high`."""

    label: str
    low: float
    high: float | None = None

    def series(self, x: Column, index: int = 0) -> Series:
        """Return the level over x; a band has the colour of line `index`."""
        low, nothing = np.full(len(x), self.low), np.full(len(x), np.nan)
        if self.high is None:
            return Series(self.label, REFERENCE, low, width=1)
        return Series(self.label, look(index), nothing, low, np.full(len(x), self.high))


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a figure: a metric, or values derived from it and others."""

    label: str
    metric: str
    values: Values | None = None  # derived values; None means the metric itself
    percent: bool = False  # draw the metric, which is a share, in percent
    row: str = ""  # label of its axis in comparisons; "" means that it is not compared
    smooth: bool = False
    on_right: bool = False
    standard_error: str = ""  # metric from which the 95 % interval around each value is drawn

    def of(self, run: History) -> Column:
        values = run.column(self.metric) if self.values is None else self.values(run)
        return 100 * values if self.percent else values

    def series(self, run: History, index: int) -> list[Series]:
        """Return the curve as line `index`, with its moving average if smooth, or [] if it has no finite value."""
        y = self.of(run)
        if not np.isfinite(y).any():
            return []
        if self.standard_error:
            low, high = self._interval(run, y)
            return [Series(self.label, look(index), y, low, high, self.on_right, has_bars=True, joined=True)]
        if not self.smooth or len(y) <= SMOOTH_STEPS:
            return [Series(self.label, look(index), y, on_right=self.on_right)]
        average = Series(f"mean of {SMOOTH_STEPS} steps", look(index), moving_average(y), on_right=self.on_right)
        return [Series(self.label, look(index), y, on_right=self.on_right, faint=True), average]

    def _interval(self, run: History, y: Column) -> tuple[Column, Column]:
        """Return the ends of the 95 % interval around each value: Wilson's if prompts are all right or all wrong."""
        half = _Z_95 * np.nan_to_num(run.column(self.standard_error))
        low, high = y - half, y + half
        prefix = self.standard_error.removesuffix("reward_stderr")
        num_prompts = run.column(f"{prefix}num_samples") / (run.samples_per_prompt(prefix) or 1)
        for i in np.flatnonzero((half == 0) & np.isin(y, (0.0, 1.0)) & (num_prompts >= 1)):
            low[i], high[i] = wilson_interval(y[i], num_prompts[i])
        return low, high


def no_levels(run: History) -> list[Level]:
    return []


def steps(run: History) -> Column:
    return run.steps


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of a run, over its steps or another axis, or of several runs with one line (or stacked bar) each."""

    section: str
    title: str
    y_label: str
    curves: tuple[Curve, ...]
    how_to_read: str
    right_label: str = ""
    stacked: bool = False
    levels: Callable[[History], Sequence[Level]] = no_levels
    scale: Scale = PLAIN
    needs: str = ""  # the setting that records its metrics
    over: XAxis = STEPS
    places: Values = steps  # positions of the curves' values on that axis
    how_to_compare: str = ""  # how to read the figure of several runs, if that differs

    def plot(self, run: History) -> Plot | None:
        """Return the plot of one run, or None if its metrics were not recorded."""
        x = self.places(run)
        series: list[Series] = []
        for index, curve in enumerate(self.curves):  # the layers of a stack get consecutive colours
            series += curve.series(run, len(series) if self.stacked else index)
        if not series:
            return None
        series += [level.series(x, index) for index, level in enumerate(self.levels(run))]
        return Plot(x, tuple(series), self.y_label, self.right_label, self.over, self.scale, self.stacked)

    def compare(self, groups: Groups) -> list[Plot]:
        """Return plots of several runs, one for each quantity that any of them recorded."""
        plots = []
        for curve in self.curves:
            seeds = {key: [(self.places(run), curve.of(run)) for run in runs] for key, runs in groups.items()}
            x, series = compared(seeds, window=self.window(groups))
            if curve.row and series:
                series += [level.series(x) for level in self._shared_levels(groups)]
                plots.append(Plot(x, tuple(series), curve.row, over=self.over, scale=self.scale))
        return plots

    def means(self, groups: Groups) -> dict[str, list[float]]:
        """Return, by label of each recorded curve, its means over steps and seeds, one per group."""
        means = {curve.label: [_mean(curve, runs) for runs in groups.values()] for curve in self.curves}
        return {label: values for label, values in means.items() if np.isfinite(values).any()}

    def window(self, groups: Groups) -> int:
        """Return the number of steps over which to average a line of a comparison."""
        is_long = any(len(run.rows) > SMOOTH_STEPS for runs in groups.values() for run in runs)
        return SMOOTH_STEPS if is_long and any(c.smooth for c in self.curves) else 1

    def remarks(self, groups: Groups) -> str:
        """Explain how to read the figure of several runs."""
        remarks = [self.how_to_compare or self.how_to_read]
        if self.window(groups) > 1:
            remarks.append(f"Means of the last {SMOOTH_STEPS} steps.")
        remarks += [f"Dashed: {level.label}." for level in self._shared_levels(groups)]
        return " ".join(remarks)

    def _shared_levels(self, groups: Groups) -> Sequence[Level]:
        """Return the levels if the runs agree on them and there is only one row to draw them in."""
        levels = [found for runs in groups.values() for run in runs if (found := list(self.levels(run)))]
        is_one_row = sum(bool(c.row) for c in self.curves) == 1
        return levels[0] if is_one_row and levels and all(other == levels[0] for other in levels) else ()


def _mean(curve: Curve, runs: Sequence[History]) -> float:
    values = np.concatenate([curve.of(run) for run in runs])
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan
