"""The figures of a report: inline SVG that follows the page's colours and fonts.

matplotlib draws them small enough for a phone; the page scales them up. Text stays text, and colours become CSS
variables, so that one figure serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

Column = NDArray[np.float64]

_SIZE_INCHES = (4.2, 2.6)
_SMOOTH_STEPS = 10
_MAX_MARKED_STEPS = 40
# Colours that stand for CSS variables until the SVG is written; matplotlib wants real ones.
_INK, _GRID = "#010101", "#020202"
_SERIES = ("#030303", "#040404", "#050505", "#060606", "#070707")
_CSS_VARIABLES = {_INK: "--ink", _GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(_SERIES, start=1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve over the steps; `smooth` adds its moving average and draws the curve itself faintly."""

    label: str
    values: Column
    smooth: bool = False
    on_right: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal reference: a line at `low`, or a band where `high` is given."""

    label: str
    low: float
    high: float | None = None


def line_figure(
    name: str,
    steps: Column,
    lines: Sequence[Line],
    y_label: str,
    *,
    right_label: str = "",
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    around_zero: bool = False,
    log_if_wide: bool = False,
) -> str | None:
    """Curves over the training steps as SVG; None where no line has a finite value.

    `name` keeps ids apart on a page; `around_zero` puts the zeros of both axes at the same height; `log_if_wide` takes
    a logarithmic axis for positive values over two decades.
    """
    coloured = _recorded(lines)
    if not coloured:
        return None
    lines = list(coloured.values())
    with rc_context(_STYLE):
        figure, axes = _new_axes(steps, y_label)
        right = axes.twinx() if any(line.on_right for line in lines) else None
        if right is not None:
            right.set_ylabel(right_label)
            right.grid(False)
        handles: list[Any] = []
        for colour, line in coloured.items():
            handles += _draw_line(right if line.on_right and right is not None else axes, steps, line, colour)
        for level, colour in zip(levels, _SERIES, strict=False):
            if level.high is None:
                handles.append(axes.axhline(level.low, color=_INK, linewidth=1, linestyle="--", label=level.label))
            else:
                handles.append(axes.axhspan(level.low, level.high, color=colour, alpha=0.13, lw=0, label=level.label))
        if log_if_wide and _is_wide(lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif from_zero or around_zero:
            scale = _centre_at_zero if around_zero else _start_at_zero
            scale(axes, [line for line in lines if not line.on_right])
            if right is not None:
                scale(right, [line for line in lines if line.on_right])
        if len(handles) > 1:
            _legend(axes, handles)
        return _to_svg(figure, name)


def stacked_figure(name: str, steps: Column, lines: Sequence[Line], y_label: str) -> str | None:
    """Values of each step on top of each other, as SVG; None where there is nothing to stack."""
    coloured = _recorded(lines)
    if not coloured:
        return None
    with rc_context(_STYLE):
        figure, axes = _new_axes(steps, y_label)
        edges = np.append(steps - 0.5, steps[-1] + 0.5)
        base = np.zeros(len(steps))
        handles: list[Any] = []
        for colour, line in coloured.items():
            top = base + np.nan_to_num(line.values)
            handles.append(axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=line.label))
            base = top
        axes.set_ylim(bottom=0)
        _legend(axes, handles)
        return _to_svg(figure, name)


def moving_average(values: Column, window: int = _SMOOTH_STEPS) -> Column:
    """Mean of the finite values among the latest `window`; nan where there are none. Same length as `values`."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    num = counts[end] - counts[start]
    return np.where(num > 0, (sums[end] - sums[start]) / np.maximum(num, 1), np.nan)


def _recorded(lines: Sequence[Line]) -> dict[str, Line]:
    """The lines with a finite value under their colours; a line keeps its colour where another one is missing."""
    return {colour: line for colour, line in zip(_SERIES, lines, strict=False) if np.isfinite(line.values).any()}


def _new_axes(steps: Column, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("training step")
    axes.set_ylabel(y_label)
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return figure, axes


def _start_at_zero(axes: Axes, lines: Sequence[Line]) -> None:
    largest = max((float(np.nanmax(line.values)) for line in lines), default=0.0)
    axes.set_ylim(0, 1.06 * largest if largest > 0 else 1.0)


def _centre_at_zero(axes: Axes, lines: Sequence[Line]) -> None:
    largest = max((float(np.nanmax(np.abs(line.values))) for line in lines), default=0.0)
    axes.set_ylim(-1.06 * largest if largest > 0 else -1.0, 1.06 * largest if largest > 0 else 1.0)


def _is_wide(lines: Sequence[Line]) -> bool:
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in lines])
    return bool(values.min() > 0 and values.max() > 100 * values.min())


def _draw_line(axes: Axes, steps: Column, line: Line, colour: str) -> list[Any]:
    marker = "o" if np.isfinite(line.values).sum() <= _MAX_MARKED_STEPS else ""
    style = "--" if line.on_right else "-"
    if not line.smooth or len(steps) <= _SMOOTH_STEPS:
        return axes.plot(steps, line.values, style, color=colour, marker=marker, label=line.label)
    axes.plot(steps, line.values, color=colour, linewidth=0.9, alpha=0.35)
    label = f"{line.label}, mean of {_SMOOTH_STEPS} steps"
    return axes.plot(steps, moving_average(line.values), color=colour, label=label)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """Above the plot, where no curve can be hidden by it."""
    columns = 2 if len(handles) in (2, 4) else 3
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.3, columnspacing=1.2
    )


def _to_svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several figures share one page: their ids must differ.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for colour, variable in _CSS_VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1, flags=re.DOTALL
    )
