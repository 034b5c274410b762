"""The figures of a report: plots as data for the page's script. Plots have no legend: the page writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_megatron.report.style import LINE_WIDTH, Look, look
from bapo_megatron.runs.numbers import short_number

Column = NDArray[np.float64]
Points = tuple[Column, Column]
"""x (ascending) and y of one curve, float64 [N] each; y may hold nan."""

SMOOTH_STEPS = 10
_RIM = 1.7  # extra width, in line widths, for each equal line that covers a line
_MAX_RIMS = 3  # no more covering lines than this count


@dataclass(frozen=True, slots=True)
class Series:
    """A line, a band from `low` to `high`, or both, at the plot's x. Each is float64 [N]; nan makes a gap."""

    label: str
    look: Look
    y: Column
    low: Column | None = None
    high: Column | None = None
    on_right: bool = False
    has_bars: bool = False  # draw a bar at each x instead of the band, for intervals of single values
    joined: bool = False  # the line bridges gaps
    faint: bool = False
    width: float = LINE_WIDTH

    @property
    def is_band(self) -> bool:
        return self.low is not None and not np.isfinite(self.y).any()

    @property
    def latest(self) -> str:
        """The value at the last x, with its interval, as text; "" for a band alone."""
        if self.is_band:
            return ""
        at = max(np.flatnonzero(np.isfinite(self.y)), default=-1) if self.joined else -1
        text = short_number(self.y[at])
        if self.low is None or self.high is None:
            return text
        return f"{text} [{short_number(self.low[at], 3)}, {short_number(self.high[at], 3)}]"

    @property
    def values(self) -> Column:
        """All finite values of the line and of the band's edges."""
        parts = [part for part in (self.y, self.low, self.high) if part is not None]
        return np.concatenate([part[np.isfinite(part)] for part in parts])


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the y axis. `around_zero` aligns the zeros of both axes; `log_if_wide` makes the axis logarithmic
    if the values are positive and span more than two decades."""

    from_zero: bool = False
    around_zero: bool = False
    log_if_wide: bool = False


@dataclass(frozen=True, slots=True)
class XAxis:
    """The x axis of a plot."""

    label: str
    margin: float
    whole: bool  # ticks at whole numbers only


PLAIN = Scale()
STEPS = XAxis("training step", margin=0.5, whole=True)


@dataclass(frozen=True, slots=True)
class Plot:
    """Series over one x axis. If stacked, each lies on top of the ones before it."""

    x: Column
    series: tuple[Series, ...]
    y_label: str
    right_label: str = ""
    over: XAxis = STEPS
    scale: Scale = PLAIN
    stacked: bool = False

    @property
    def is_log(self) -> bool:
        """Whether the y axis starts as logarithmic."""
        values = np.concatenate([series.values for series in self.series if not series.on_right] or [np.zeros(1)])
        is_wide = len(values) > 0 and values.min() > 0 and values.max() > 100 * values.min()
        return self.scale.log_if_wide and bool(is_wide)

    def data(self) -> dict[str, Any]:
        """Return the plot as JSON values, for the page's script."""
        return {
            "x": _numbers(self.x),
            "xLabel": self.over.label,
            "xMargin": self.over.margin,
            "wholeX": self.over.whole,
            "yLabel": self.y_label,
            "rightLabel": self.right_label,
            "from": "around" if self.scale.around_zero else "zero" if self.scale.from_zero or self.stacked else "",
            "log": self.is_log,
            "stacked": self.stacked,
            "series": [
                {
                    "label": series.label,
                    "colour": series.look.variable,
                    "dash": [LINE_WIDTH * dash for dash in series.look.dashes],
                    "y": _numbers(series.y),
                    "low": _numbers(series.low),
                    "high": _numbers(series.high),
                    "latest": series.latest,
                    "bars": series.has_bars,
                    "right": series.on_right,
                    "joined": series.joined,
                    "faint": series.faint,
                    "width": series.width,
                }
                for series in self.series
            ],
        }


def _numbers(values: Column | None) -> list[float | None] | None:
    """Round to five digits; values that are not finite become None."""
    if values is None:
        return None
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def compared(seeds_by_label: Mapping[str, Sequence[Points]], *, window: int = 1) -> tuple[Column, list[Series]]:
    """Return x [N] and one series per label: the mean over its seeds, in a band from the lowest seed to the highest.

    A line covers the steps that all of its seeds have reached. A label without a finite value gets no series, but no
    other label gets its look. Among equal lines, each earlier one is wider, so that its rim shows around later ones.

    Args:
        seeds_by_label: label -> (x, y) of each seed; their lengths may differ.
        window: first average each seed over this many of its latest values.
    """
    drawn = {
        index: (label, len(seeds), mean_and_range([(x, moving_average(y, window)) for x, y in seeds]))
        for index, (label, seeds) in enumerate(seeds_by_label.items())
    }
    x_N = np.unique(np.concatenate([np.empty(0), *(x for _, _, (x, *_) in drawn.values())]))
    found: list[Series] = []
    for index, (label, num_seeds, (x, *columns)) in drawn.items():
        if not len(x):
            continue
        mean, low, high = (_placed(x_N, x, column) for column in columns)
        has_band = num_seeds > 1
        found.append(
            Series(label, look(index), mean, low if has_band else None, high if has_band else None, joined=True)
        )
    return x_N, [_rimmed(series, found[i + 1 :]) for i, series in enumerate(found)]


def _rimmed(series: Series, later: Sequence[Series]) -> Series:
    """Widen a line by the number of equal lines that cover it."""
    num_equal = sum(np.allclose(series.y, other.y, rtol=1e-3, atol=0.0, equal_nan=True) for other in later)
    return replace(series, width=LINE_WIDTH * (1 + _RIM * min(num_equal, _MAX_RIMS)))


def _placed(x_N: Column, x: Column, values: Column) -> Column:
    placed_N = np.full(len(x_N), np.nan)
    placed_N[np.searchsorted(x_N, x)] = values
    return placed_N


def mean_and_range(seeds: Sequence[Points]) -> tuple[Column, Column, Column, Column]:
    """Return x, mean, minimum and maximum over the seeds, where x covers the range that all seeds share.

    Non-finite values are left out: if a seed lacks a value at some x, only the others count there.
    """
    known = [(x[finite], y[finite]) for x, y in seeds if (finite := np.isfinite(y)).any()]
    if not known:
        return (np.empty(0),) * 4
    begin, end = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    steps = np.unique(np.concatenate([x for x, _ in known]))
    table = np.stack([_placed(steps, x, y) for x, y in known])
    shared = (begin <= steps) & (steps <= end)
    table = table[:, shared]
    return steps[shared], np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0)


def moving_average(values: Column, window: int = SMOOTH_STEPS) -> Column:
    """Average the finite values among the latest `window`, or nan if there are none. Keeps the length of `values`."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    num = counts[end] - counts[start]
    return np.where(num > 0, (sums[end] - sums[start]) / np.maximum(num, 1), np.nan)
