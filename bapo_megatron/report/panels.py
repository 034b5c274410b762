"""Descriptions of the report's figures, drawn for one run or several. The figures: `gallery.toml`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from bapo_megatron.report.figures import (
    PLAIN,
    SMOOTH_STEPS,
    STEPS,
    Column,
    Level,
    Line,
    Scale,
    XAxis,
    bars_figure,
    curves_figure,
    line_figure,
    stacked_figure,
)
from bapo_megatron.report.history import History

Values = Callable[[History], Column]
Groups = Mapping[str, Sequence[History]]
"""Runs by the key of their line; runs of one line differ by seed only."""


_Z_95 = 1.96  # standard errors on either side of a mean that make a 95 % interval


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a figure: a metric, or values derived from it and others."""

    label: str
    metric: str
    values: Values | None = None  # derived values; None: the metric itself
    percent: bool = False  # draw the metric, a share, in percent
    row: str = ""  # label of its axis in comparisons; "": not compared
    smooth: bool = False
    on_right: bool = False
    standard_error: str = ""  # the metric whose 95 % interval is drawn around each value

    def of(self, run: History) -> Column:
        values = run.column(self.metric) if self.values is None else self.values(run)
        return 100 * values if self.percent else values

    def half_width(self, run: History) -> Column | None:
        """Return half the width of the 95 % interval around each value."""
        return _Z_95 * run.column(self.standard_error) if self.standard_error else None


def no_levels(run: History) -> list[Level]:
    return []


def steps(run: History) -> Column:
    return run.steps


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of a run, over its steps or another axis, or of several runs with one line (stacked: one bar) each."""

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
    places: Values = steps  # of the curves' values on that axis
    how_to_compare: str = ""  # how to read the figure of several runs, if different

    def draw(self, run: History) -> Figure | None:
        """Draw the figure of one run; None if its metrics were not recorded."""
        lines = [Line(c.label, c.of(run), c.smooth, c.on_right, c.half_width(run)) for c in self.curves]
        if self.stacked:
            return stacked_figure(run.steps, lines, self.y_label)
        return line_figure(
            self.places(run),
            lines,
            self.y_label,
            right_label=self.right_label,
            levels=self.levels(run),
            scale=self.scale,
            over=self.over,
        )

    def compare(self, groups: Groups) -> Figure | None:
        """Draw the figure of several runs; None if none of them recorded its metrics.

        Stacked quantities are averaged over steps and seeds; the others are drawn in one row each.
        """
        if self.stacked:
            layers = {c.label: [_mean(c, runs) for runs in groups.values()] for c in self.curves}
            return bars_figure(list(groups), layers, f"{self.y_label}, mean over the run")
        rows = {
            c.row: {key: [(self.places(run), c.of(run)) for run in runs] for key, runs in groups.items()}
            for c in self.curves
            if c.row
        }
        levels, window = self._shared_levels(groups), self.window(groups)
        return curves_figure(rows, levels=levels, window=window, scale=self.scale, over=self.over)

    def window(self, groups: Groups) -> int:
        """Return the number of steps over which a line of a comparison is averaged."""
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
        """Return the levels if the runs agree on them and there is a single row to draw them in."""
        levels = [found for runs in groups.values() for run in runs if (found := list(self.levels(run)))]
        is_one_row = sum(bool(c.row) for c in self.curves) == 1
        return levels[0] if is_one_row and levels and all(other == levels[0] for other in levels) else ()


def _mean(curve: Curve, runs: Sequence[History]) -> float:
    values = np.concatenate([curve.of(run) for run in runs])
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else np.nan
