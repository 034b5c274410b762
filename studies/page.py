"""A study's files besides its rows: NAME.csv (all figures), NAME.svg (the plots) and NAME.md (the page)."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bapo_megatron.errors import plural
from bapo_megatron.metrics import METRICS
from bapo_megatron.report.style import INK, LINE_WIDTH, look
from bapo_megatron.runtime.files import write_atomically
from studies.code import is_commit
from studies.results import (
    COMPARISONS,
    DERIVED,
    FINALS,
    PROFILE,
    PROFILE_PARTS,
    Comparison,
    FinalFigure,
    StudyResult,
)
from studies.rows import Row
from studies.study import Plot, Study

_GRID = "#d5dae2"
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": LINE_WIDTH,
    "lines.markersize": 3.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
}
"""matplotlib's settings for figures of docs, in the colours of the report."""
_RC: dict[Any, Any] = RC | {"svg.hashsalt": "bapo"}  # so that the same figures give the same file
_PANEL_INCHES = (4.6, 3.0)
_COMPARISON_INCHES = 0.19
_ERRORS_SHOWN = 2  # standard errors on each side of a difference
_MAX_BANDS = 6  # with more variants, the bands hide each other
_PROFILE_LABELS = {
    f"{PROFILE}/share": "share of tokens",
    f"{PROFILE}/ratio": "mean ratio",
    f"{PROFILE}/abs_log_ratio": "mean |log ratio| [nats]",
    f"{PROFILE}/entropy": "mean entropy [nats]",
    f"{PROFILE}/clip_high_share": "clipped at the upper bound [share]",
    f"{PROFILE}/clip_low_share": "clipped at the lower bound [share]",
}
_PACKAGES = ("torch", "megatron-core", "transformers")


def write(name: str, study: Study, rows: Sequence[Row], result: StudyResult, *, folder: Path, command: str) -> None:
    """Write the three files, each atomically, but none if one of them cannot be made."""
    origin = {"command": command, **_origin(rows)}
    texts = {
        "csv": result.as_csv(),
        "svg": _draw(study, result),
        "md": _markdown(name, study, result, origin),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        write_atomically(folder / f"{name}.{ending}", text)


def line_style(index: int) -> Any:
    """Return the dashes of line `index` in matplotlib's form."""
    return (0, dashes) if (dashes := look(index).dashes) else "-"


def _origin(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the dates, machines, code and package versions of the rows."""

    def all_of(values: Iterable[str], separator: str = " and ") -> str:
        return separator.join(sorted(set(values)))

    dates = sorted({row.time[: len("2026-01-31")] for row in rows})
    return {
        "date": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        "machine": all_of((row.machine for row in rows), "; "),
        "code": all_of(f"`{row.code[:12]}`" if is_commit(row.code) else "not committed" for row in rows),
        "versions": {name: all_of(row.packages.get(name, "unknown") for row in rows) for name in _PACKAGES},
    }


def _markdown(name: str, study: Study, result: StudyResult, origin: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, result.seeds))
    versions = ", ".join(f"{package} {version}" for package, version in origin["versions"].items())
    facts = [
        f"`{origin['command']}`, {origin['date']}, {origin['machine']}",
        f"seeds {seeds}",
        f"code {origin['code']}",
    ]
    lines = [
        f"# {study.title}",
        "",
        f"{study.figure}: {study.question}",
        "",
        f"{'; '.join([*facts, versions])}.",
        "Written by the command; what the figures mean for BAPO: [docs/reproduction.md](../../docs/reproduction.md).",
        "",
        f"![{study.title}]({name}.svg)",
        "",
        *_legend_of(study),
        "",
        *_table(result),
        *_failures(result),
    ]
    lines += _regret(study, result)
    for is_explored in (False, True):
        if chosen := [c for c in result.comparisons if c.is_exploratory == is_explored]:
            lines += ["", _about(study.headline, chosen, is_explored), "", *_comparison_table(chosen)]
    return "\n".join(lines) + "\n"


def _about(headline: str, comparisons: Sequence[Comparison], is_explored: bool) -> str:
    """Say what a table of comparisons has, and how far its p-values go."""
    number, differences = len(comparisons), f"ifferences in {headline}, seed by seed, with their standard error"
    if is_explored:
        return f"Exploratory d{differences}. {plural(number, 'comparison')} can suggest, but not decide."
    if all(c.p is None for c in comparisons):
        return f"D{differences}."
    corrected = f" Holm's p corrects it for all {number} comparisons." if number > 1 else ""
    return f"D{differences}. p is of a paired t-test.{corrected}"


def _failures(result: StudyResult) -> list[str]:
    """List the runs that failed, under their table."""
    failed = [(variant.name, *failure) for variant in result.variants for failure in variant.failures.items()]
    lines = [f"- {name}, seed {seed}: {' '.join(reason.split())}" for name, seed, reason in failed]
    return ["", "Failed runs, which no figure above includes:", "", *lines] if lines else []


def _regret(study: Study, result: StudyResult) -> list[str]:
    """Tabulate regrets, and the differences of their means."""
    if not result.regrets:
        return []
    regimes = [*result.regrets[0].by_regime]
    lines = [
        "",
        f"Regret: {study.headline} of the best in a regime minus the row's own; a failed run has 0 there. The mean "
        f"is over {plural(len(regimes), 'regime')}, with a 95 % interval by bootstrap over seeds.",
        "",
        f"| | mean | 95 % | {' | '.join(regimes)} |",
        "|---" * (len(regimes) + 3) + "|",
    ]
    for regret in sorted(result.regrets, key=lambda regret: regret.mean):
        cells = [regret.method, f"{regret.mean:.3f}", f"{regret.low:.3f} to {regret.high:.3f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{value:.3f}' for value in regret.by_regime.values())])} |")
    lines += ["", "Differences of mean regrets, with their standard error by the same bootstrap; lower is better:", ""]
    lines += [
        f"- {d.first} minus {d.second}: {d.difference:+.3f} ± {d.standard_error:.3f}" for d in result.regret_differences
    ]
    return lines


def _comparison_table(comparisons: Sequence[Comparison]) -> list[str]:
    columns = ["", "against", "difference", "higher in"]
    if any(c.holm_p is not None for c in comparisons):
        columns += ["p", "Holm's p"] if len(comparisons) > 1 else ["p"]
    lines = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|---" * len(columns) + "|"]
    for c in comparisons:
        error = "" if c.standard_error is None else f" ± {c.standard_error:.3f}"
        cells = [c.first, c.second, f"{c.difference:+.3f}{error}", f"{c.num_higher} of {plural(c.num_seeds, 'seed')}"]
        cells += ["" if p is None else f"{p:.2g}" for p in (c.p, c.holm_p)][: len(columns) - len(cells)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _legend_of(study: Study) -> list[str]:
    """Explain the plots."""
    lines = []
    curves = [plot for plot in study.plots if plot.metric != COMPARISONS]
    if any(not plot.seeds for plot in curves):
        lines.append(
            "Lines are means over seeds; bands, drawn if lines are few, reach from the lowest to the highest seed."
        )
    if any(plot.seeds for plot in curves):
        lines.append("Thin lines are single seeds.")
    if any(plot.metric == COMPARISONS for plot in study.plots):
        points = f"Points are mean differences in {study.headline}, seed by seed"
        lines.append(f"{points}; bars reach {_ERRORS_SHOWN} standard errors to each side.")
    return lines


def _table(result: StudyResult) -> list[str]:
    """Tabulate mean and standard deviation over seeds, one row per variant."""
    columns = [column for column in FINALS if any(column in variant.finals for variant in result.variants)]
    rows = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for variant in result.variants:
        cells = [_cell(variant.finals.get(column)) for column in columns]
        failed = f" ({len(variant.failures)} of {plural(len(result.seeds), 'seed')} failed)" if variant.failures else ""
        rows.append(f"| {variant.name}{failed} | {' | '.join(cells)} |")
    return rows


def _cell(number: FinalFigure | None) -> str:
    if number is None:
        return ""
    size = abs(number.mean)
    form = ".2g" if 0 < size < 0.01 else ".3f" if size < 10 else ".1f"
    return f"{number.mean:{form}}" + (f" ± {number.std:{form}}" if number.std else "")


def _draw(study: Study, result: StudyResult) -> str:
    """Draw the plots as SVG."""
    panels = [plot for plot in study.plots if plot.metric != PROFILE]
    if PROFILE in (plot.metric for plot in study.plots):
        panels += [Plot(metric=f"{PROFILE}/{part}", log=part == "share") for part in PROFILE_PARTS]
    width = min(2, len(panels))
    height = math.ceil(len(panels) / width)
    panel_inches = _PANEL_INCHES
    if COMPARISONS in (plot.metric for plot in panels):
        panel_inches = (
            2 * _PANEL_INCHES[0] / width,
            max(_PANEL_INCHES[1], _COMPARISON_INCHES * len(result.comparisons)),
        )
    with rc_context(_RC):
        canvas = Figure(figsize=(panel_inches[0] * width, panel_inches[1] * height + 0.6), layout="constrained")
        axes = canvas.subplots(height, width, squeeze=False).flatten()
        for axis, plot in zip(axes, panels, strict=False):
            if plot.metric == COMPARISONS:
                _draw_comparisons(axis, result)
                axis.set_xlabel(plot.label or f"difference in {study.headline}")
                continue
            _draw_curves(axis, result, plot.metric, of_seeds=plot.seeds)
            axis.set_ylabel(plot.label or _label(plot.metric))
            axis.set_yscale("log" if plot.log and _has_positive(result, plot.metric) else "linear")
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        if labelled := [axis for axis in axes if axis.get_legend_handles_labels()[1]]:
            handles, labels = labelled[0].get_legend_handles_labels()
            canvas.legend(handles, labels, loc="outside lower center", ncols=_legend_columns(labels))
        drawn = io.StringIO()
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return _compact(drawn.getvalue())


def _compact(svg: str) -> str:
    """Put each part of the plot on its own line, and round coordinates to a tenth of a point."""
    svg = re.sub(r'"[^"<>]*"', lambda quoted: re.sub(r"(\d\.\d)\d+", r"\1", quoted[0]), re.sub(r'\s*\n"', '"', svg))
    return re.sub(r">\s+<(?!g id)", "><", " ".join(svg.split())).replace("> <", ">\n<") + "\n"


def _has_positive(result: StudyResult, metric: str) -> bool:
    """Return whether a metric has a positive value, which a logarithmic axis needs."""
    return any(v > 0 for variant in result.variants for v in variant.curves[metric].mean)


def _legend_columns(labels: Sequence[str]) -> int:
    return max(1, min(len(labels), 90 // (max(map(len, labels)) + 6)))


def _draw_curves(axis: Axes, result: StudyResult, metric: str, *, of_seeds: bool = False) -> None:
    for i, variant in enumerate(result.variants):
        if of_seeds:
            for j, points in enumerate(variant.by_seed[metric]):
                y = [math.nan if v is None else v for v in points.y]
                label = variant.name if j == 0 else None
                axis.plot(points.x, y, label=label, color=look(i).colour, linestyle=line_style(i), lw=LINE_WIDTH / 2)
            continue
        curve = variant.curves[metric]
        colour = look(i).colour
        axis.plot(curve.x, curve.mean, label=variant.name, color=colour, linestyle=line_style(i))
        if len(result.seeds) > 1 and len(result.variants) <= _MAX_BANDS:
            axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.1, linewidth=0)
    axis.set_xlabel("probability of the token" if metric in _PROFILE_LABELS else "optimizer updates")


def _draw_comparisons(axis: Axes, result: StudyResult) -> None:
    """Draw a row for each comparison. A first variant's n-th rival has the n-th colour."""
    num_seen: dict[str, int] = {}
    for y, c in enumerate(result.comparisons):
        i = num_seen[c.first] = num_seen.get(c.first, -1) + 1
        axis.errorbar(c.difference, y, xerr=_ERRORS_SHOWN * (c.standard_error or 0.0), fmt="o", color=look(i).colour)
    axis.axvline(0.0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(result.comparisons)), [f"{c.first} against {c.second}" for c in result.comparisons])
    axis.set_ylim(len(result.comparisons) - 0.5, -0.5)


def _label(metric: str) -> str:
    if metric in DERIVED:
        return DERIVED[metric][0]
    if metric in _PROFILE_LABELS:
        return _PROFILE_LABELS[metric]
    unit = METRICS[metric].unit
    return f"{metric} [{unit}]"
