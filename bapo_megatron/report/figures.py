"""The figures of a report: inline SVG that follows the page's colours and fonts.

matplotlib draws them small enough for a phone; the page scales them up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from bapo_megatron.report.style import INK, RC, look

Column = NDArray[np.float64]
Points = tuple[Column, Column]
"""x, ascending, and y of one curve: float64 [N] each; y may hold nan."""

SMOOTH_STEPS = 10
_SIZE_INCHES = (4.2, 2.6)
_ROW_INCHES = 1.75
_MAX_MARKED_STEPS = 40
_MAX_BARS = 300


@dataclass(frozen=True, slots=True)
class Line:
    """One curve over the steps; `smooth` adds its moving average and draws the curve itself faintly.

    With `half_width` (of an interval at each value) the curve joins the finite values and shows the intervals.
    """

    label: str
    values: Column
    smooth: bool = False
    on_right: bool = False
    half_width: Column | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal reference: a line at `low`, or a band up to `high` if given."""

    label: str
    low: float
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the y axis: `around_zero` aligns the zeros of both axes, `log_if_wide` takes a logarithmic axis for
    positive values over two decades."""

    from_zero: bool = False
    around_zero: bool = False
    log_if_wide: bool = False


@dataclass(frozen=True, slots=True)
class XAxis:
    """The x axis of a figure."""

    label: str
    margin: float
    whole: bool  # ticks at whole numbers only


PLAIN = Scale()
STEPS = XAxis("training step", margin=0.5, whole=True)


def draw_curves(axes: Axes, series: Mapping[str, Sequence[Points]], *, window: int = 1) -> list[Any]:
    """Draw one line per label: the mean over its seeds, in a band from the lowest seed to the highest.

    A line covers the steps that all of its seeds have reached. Colours and dashes follow the order of `series`; draw
    within `rc_context(style.RC)` for the looks of the report.

    Args:
        axes: where to draw.
        series: label -> (x, y) of each seed; their lengths may differ.
        window: each seed is first averaged over this many of its latest values.

    Returns:
        The lines, for a legend; none for a label without a finite value, which keeps its colour.
    """
    lines = []
    for index, (label, seeds) in enumerate(series.items()):
        colour, dashes = look(index).colour, look(index).line_style
        x, mean, low, high = mean_and_range([(x, moving_average(y, window)) for x, y in seeds])
        if not len(x):
            continue
        if len(seeds) > 1:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(x) <= _MAX_MARKED_STEPS // 2 else ""
        lines += axes.plot(x, mean, color=colour, linestyle=dashes, marker=marker, label=label)
    return lines


def mean_and_range(seeds: Sequence[Points]) -> tuple[Column, Column, Column, Column]:
    """Return x, mean, lowest and highest over the seeds, from where the last one begins to where the first one ends.

    Non-finite values are left out: at an x that a seed lacks, the others count.
    """
    known = [(x[finite], y[finite]) for x, y in seeds if (finite := np.isfinite(y)).any()]
    if not known:
        return (np.empty(0),) * 4
    begin, end = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    steps = np.unique(np.concatenate([x for x, _ in known]))
    table = np.full((len(known), len(steps)), np.nan)
    for row, (x, y) in zip(table, known, strict=True):
        row[np.searchsorted(steps, x)] = y
    shared = (begin <= steps) & (steps <= end)
    table = table[:, shared]
    return steps[shared], np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0)


def moving_average(values: Column, window: int = SMOOTH_STEPS) -> Column:
    """Average the finite values among the latest `window`; nan without any. Same length as `values`."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    num = counts[end] - counts[start]
    return np.where(num > 0, (sums[end] - sums[start]) / np.maximum(num, 1), np.nan)


def line_figure(
    steps: Column,
    lines: Sequence[Line],
    y_label: str,
    *,
    right_label: str = "",
    levels: Sequence[Level] = (),
    scale: Scale = PLAIN,
    over: XAxis = STEPS,
) -> Figure | None:
    """Draw curves over the training steps, or another axis; None if no line has a finite value."""
    recorded = _recorded(lines)
    if not recorded:
        return None
    with rc_context(RC):
        figure, (axes,) = _new_figure(steps[0], steps[-1], [y_label], over)
        right = axes.twinx() if any(line.on_right for line in recorded.values()) else None
        if right is not None:
            right.set_ylabel(right_label)
            right.grid(False)
        handles: list[Any] = []
        for index, line in recorded.items():
            handles.append(_draw_line(right if line.on_right and right is not None else axes, steps, line, index))
        for index, level in enumerate(levels):
            handles.append(_draw_level(axes, level, look(index).colour))
        _set_scale(axes, [line.values for line in recorded.values() if not line.on_right], scale)
        if right is not None:
            _set_scale(right, [line.values for line in recorded.values() if line.on_right], scale)
        if len(handles) > 1:
            _legend(figure, handles)
        return figure


def stacked_figure(steps: Column, lines: Sequence[Line], y_label: str) -> Figure | None:
    """Stack the values of each step, or block means for long runs; None if no line has a finite value."""
    recorded = _recorded(lines)
    if not recorded:
        return None
    with rc_context(RC):
        figure, (axes,) = _new_figure(steps[0], steps[-1], [y_label], STEPS)
        starts = np.arange(0, len(steps), -(-len(steps) // _MAX_BARS))
        edges = np.append(steps[starts] - 0.5, steps[-1] + 0.5)
        base = np.zeros(len(starts))
        handles: list[Any] = []
        for index, line in recorded.items():
            top = base + _block_means(line.values, starts)
            colour = look(index).colour
            handles.append(axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=line.label))
            base = top
        axes.set_ylim(bottom=0)
        _legend(figure, handles)
        return figure


def curves_figure(
    rows: Mapping[str, Mapping[str, Sequence[Points]]],
    *,
    levels: Sequence[Level] = (),
    window: int = 1,
    scale: Scale = PLAIN,
    over: XAxis = STEPS,
) -> Figure | None:
    """Draw curves of several runs with `draw_curves`, one row per y label; None without a finite value.

    Without a legend: names of runs may be long, so the page shows it.
    """
    rows = {label: series for label, series in rows.items() if _finite_values(series)}
    if not rows:
        return None
    all_x = [x for series in rows.values() for seeds in series.values() for x, _ in seeds if len(x)]
    with rc_context(RC):
        figure, all_axes = _new_figure(min(x[0] for x in all_x), max(x[-1] for x in all_x), list(rows), over)
        for axes, series in zip(all_axes, rows.values(), strict=True):
            draw_curves(axes, series, window=window)
            for level in levels:
                _draw_level(axes, level, INK)
            _set_scale(axes, _finite_values(series), scale)
        return figure


def bars_figure(keys: Sequence[str], layers: Mapping[str, Sequence[float]], x_label: str) -> Figure | None:
    """Draw one bar per key, first on top, stacked from the layers' values; None without a finite value."""
    columns = {label: np.array(values, dtype=float) for label, values in layers.items()}
    recorded = {index: item for index, item in enumerate(columns.items()) if np.isfinite(item[1]).any()}
    if not recorded:
        return None
    with rc_context(RC):
        figure = Figure(figsize=(_SIZE_INCHES[0], max(_SIZE_INCHES[1], 1.2 + 0.2 * len(keys))), layout="constrained")
        axes = figure.add_subplot()
        base, places = np.zeros(len(keys)), np.arange(len(keys))
        handles: list[Any] = []
        for index, (label, values) in recorded.items():
            widths, colour = np.nan_to_num(values), look(index).colour
            handles.append(axes.barh(places, widths, left=base, height=0.7, color=colour, label=label))
            base += widths
        axes.set_yticks(places, labels=list(keys))
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.grid(False, axis="y")
        _legend(figure, handles)
        return figure


def _block_means(values: Column, starts: NDArray[np.int64]) -> Column:
    """Average the values from each of `starts` to the next, counting non-finite values as 0."""
    sizes = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(np.where(np.isfinite(values), values, 0.0), starts) / sizes


def _recorded(lines: Sequence[Line]) -> dict[int, Line]:
    """Return the lines with a finite value by index, so that each keeps its looks if another is missing."""
    return {index: line for index, line in enumerate(lines) if np.isfinite(line.values).any()}


def _finite_values(series: Mapping[str, Sequence[Points]]) -> list[Column]:
    return [y for seeds in series.values() for _, y in seeds if np.isfinite(y).any()]


def _new_figure(first: float, last: float, y_labels: Sequence[str], over: XAxis) -> tuple[Figure, list[Axes]]:
    """Create one row of axes per label, with x from `first` to `last`."""
    height = _SIZE_INCHES[1] if len(y_labels) == 1 else 0.5 + _ROW_INCHES * len(y_labels)
    figure = Figure(figsize=(_SIZE_INCHES[0], height), layout="constrained")
    rows = list(figure.subplots(len(y_labels), sharex=True, squeeze=False)[:, 0])
    for axes, label in zip(rows, y_labels, strict=True):
        axes.set_ylabel(label)
    rows[-1].set_xlabel(over.label)
    rows[-1].set_xlim(first - over.margin, last + over.margin)
    rows[-1].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=over.whole, min_n_ticks=1))
    figure.align_ylabels(rows)
    return figure, rows


def _set_scale(axes: Axes, columns: Iterable[Column], scale: Scale) -> None:
    values = np.concatenate([values[np.isfinite(values)] for values in columns] or [np.zeros(1)])
    largest = 1.06 * float(np.abs(values).max()) or 1.0
    if scale.log_if_wide and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif scale.from_zero or scale.around_zero:
        axes.set_ylim(-largest if scale.around_zero else 0, largest)


def _draw_line(axes: Axes, steps: Column, line: Line, index: int) -> Any:
    colour, dashes = look(index).colour, look(index).line_style
    finite = np.isfinite(line.values)
    marker = "o" if finite.sum() <= _MAX_MARKED_STEPS else ""
    looks: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker, "label": line.label}
    if line.half_width is not None:
        x, y, half = steps[finite], line.values[finite], np.nan_to_num(line.half_width[finite])
        return axes.errorbar(x, y, yerr=half, elinewidth=1, capsize=2, **looks)
    if not line.smooth or len(steps) <= SMOOTH_STEPS:
        return axes.plot(steps, line.values, **looks)[0]
    axes.plot(steps, line.values, color=colour, linewidth=0.9, alpha=0.35)
    looks |= {"label": f"{line.label}, mean of {SMOOTH_STEPS} steps", "marker": ""}
    return axes.plot(steps, moving_average(line.values), **looks)[0]


def _draw_level(axes: Axes, level: Level, colour: str) -> Any:
    if level.high is None:
        return axes.axhline(level.low, color=INK, linewidth=1, linestyle=(0, (3, 2)), label=level.label)
    for edge in (level.low, level.high):
        axes.axhline(edge, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
    return axes.axhspan(level.low, level.high, color=colour, alpha=0.13, linewidth=0, label=level.label)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Place the legend above the plot, in as many columns as fit."""
    for num_columns in range(min(3, len(handles)), 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=num_columns, columnspacing=1.2)
        if num_columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
