"""`bapo report`: a run, or several side by side, as one HTML file that opens anywhere, even without a network.

The page's script draws the figures with uPlot, so that one can hover and zoom; without scripts, their legends have the
latest values.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from bapo_megatron.errors import UserError, plural
from bapo_megatron.monitor.alarms import AlarmLog
from bapo_megatron.report.compare import Comparison, compare, outcome_names, outcomes
from bapo_megatron.report.figures import Plot
from bapo_megatron.report.gallery import PANELS, with_named
from bapo_megatron.report.samples import choose_samples, read_samples
from bapo_megatron.report.style import Look, css_variables, look
from bapo_megatron.runs.history import History, entry_names, read_history
from bapo_megatron.runs.numbers import count, duration, number, percent
from bapo_megatron.runs.standing import count_events, read_standing
from bapo_megatron.runs.steps import StepRow
from bapo_megatron.runs.summary import summarize_run
from bapo_megatron.runtime.files import write_atomically

COMPARISON_NAME = "comparison.html"
_TEMPLATES = Path(__file__).parent
_LIBRARY = _TEMPLATES / "uplot"
_NUM_TABLE_STEPS = 10
_TABLE_METRICS = (
    "reward/mean",
    "loss/entropy",
    "staleness/mean",
    "staleness/max",
    "bapo/low",
    "bapo/high",
    "bapo/positive_share",
    "optimizer/grad_norm",
    "rollout/response_tokens_mean",
    "rollout/resumed_token_share",
    "time/step_s",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """The stacked means of a group of runs."""

    key: str
    parts: list[tuple[Look, str, float]]  # look, label and value of each part
    total: float


@dataclass(frozen=True, slots=True)
class Card:
    """A figure on the page: plots, or bars in a comparison of stacked quantities."""

    section: str
    title: str
    how_to_read: str
    plots: tuple[Plot, ...] = ()
    bars: tuple[Bar, ...] = ()
    bars_label: str = ""


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's report from its metrics, samples and configuration, and return the report's path.

    The default path is report.html in the run's folder. Works while the run is in progress. Raises UserError if the
    folder is not a run, has no metrics, or is not writable.
    """
    run = read_history(run_dir)
    if not run.rows:
        raise UserError(
            f"no metrics in {run_dir}: a report needs a run with at least one finished step; "
            "give the folder of such a run (runs/<name>), or start one with `bapo train`"
        )
    path = output or run_dir / "report.html"
    return _write(path, render_run(run, links_from=path.parent))


def render_run(run: History, *, links_from: Path, live: bool = False) -> str:
    """Return a run's page, with links to its logs relative to `links_from`.

    A live page reloads itself, and its run need not have finished a step.
    """
    standing = read_standing(run)
    cards, missing = [], []
    for panel in with_named(PANELS, [run]):
        if (plot := panel.plot(run) if run.rows else None) is not None:
            cards.append(Card(panel.section, panel.title, panel.how_to_read, (plot,)))
        else:
            missing.append(_missing(panel.title, panel.needs))
    samples = read_samples(run)
    return _render(
        "report.html.jinja",
        cards,
        live=live,
        title=f"{run.name} · BAPO run",
        name=run.name,
        status=standing,
        progress=_progress(run),
        logs=[(path.stem, os.path.relpath(path, links_from)) for path in standing.logs],
        alarms=AlarmLog(run.rows, run.path.absolute()).raised,
        events=count_events(run),
        facts=_facts(run) if run.rows else [],
        missing=missing if run.rows else [],
        samples=choose_samples(samples),
        num_samples=len(samples),
        num_kept=run.settings.get("monitor.samples_per_step"),
        table_steps=[int(row["step"]) for row in run.rows[-_NUM_TABLE_STEPS:]],
        table_rows=[
            (name, [_cell(row.get(name, math.nan)) for row in run.rows[-_NUM_TABLE_STEPS:]]) for name in _TABLE_METRICS
        ],
        num_rows=len(run.rows),
        config_text=run.config_text,
        metrics_json=_script_safe_json({} if live else _columns(run.rows)),
    )


def write_comparison(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write one page with several runs side by side, and return its path.

    The default path is comparison.html in the parent folder of the first run. Raises UserError if folders are not runs
    or are repeated, no run has finished a step, or the page is not writable.
    """
    comparison = compare(run_dirs)
    groups = comparison.runs
    runs = [run for group in comparison.groups for run in group.runs]
    cards, missing = [], []
    for panel in with_named(PANELS, runs):
        card = Card(panel.section, panel.title, panel.remarks(groups))
        if panel.stacked and (bars := _bars(panel.means(groups), list(groups))):
            cards.append(replace(card, bars=bars, bars_label=f"{panel.y_label}, mean over the run"))
        elif not panel.stacked and (plots := panel.compare(groups)):
            cards.append(replace(card, plots=tuple(plots)))
        else:
            missing.append(_missing(panel.title, panel.needs))
    sets = entry_names(runs, "eval.sets")
    html = _render(
        "comparison.html.jinja",
        cards,
        title=f"{plural(len(runs), 'run')} compared",
        groups=[
            {"key": group.key, "name": group.name, "num_seeds": len(group.runs), "look": look(i)}
            for i, group in enumerate(comparison.groups)
        ],
        comparison=comparison,
        missing=missing,
        outcome_names=outcome_names(sets),
        outcomes=[(group, outcomes(group.runs, sets)) for group in comparison.groups],
        outcomes_of_runs=_outcomes_of_runs(comparison, sets),
        metrics_json=_script_safe_json({run.name: _columns(run.rows) for run in runs}),
    )
    return _write(output or run_dirs[0].absolute().parent / COMPARISON_NAME, html)


def _missing(title: str, needs: str) -> str:
    """Name a figure that has no data, with the setting that records it."""
    return f"{title} ({needs})" if needs else title


def _bars(means: dict[str, list[float]], keys: Sequence[str]) -> tuple[Bar, ...]:
    """Return one bar per key; `means` has a list of values for each curve, one value per key."""
    return tuple(
        Bar(
            key,
            [(look(j), label, values[i]) for j, (label, values) in enumerate(means.items()) if values[i] > 0],
            total=math.fsum(values[i] for values in means.values() if values[i] > 0),
        )
        for i, key in enumerate(keys if means else ())
    )


def _render(template: str, cards: Sequence[Card], *, live: bool = False, **values: Any) -> str:
    """Fill a template. The page's policy allows only its own scripts, by their digests."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    licence = (_LIBRARY / "LICENSE").read_text(encoding="utf-8")
    library = f"/*\n{licence}*/\n" + (_LIBRARY / "uPlot.iife.min.js").read_text(encoding="utf-8")
    scripts = [library, (_TEMPLATES / "page.js").read_text(encoding="utf-8")]
    return environment.get_template(template).render(
        cards=cards,
        live=live,
        colours={"light": css_variables(dark=False), "dark": css_variables(dark=True)},
        library_css=(_LIBRARY / "uPlot.min.css").read_text(encoding="utf-8"),
        plural=plural,
        scripts=scripts,
        script_digests=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts],
        plots_json=_script_safe_json([plot.data() for card in cards for plot in card.plots]),
        **values,
    )


def _write(path: Path, html: str) -> Path:
    write_atomically(path, html, advice="name a file elsewhere with --output")
    return path


def _progress(run: History) -> str:
    done = int(run.rows[-1]["step"]) if run.rows else 0
    planned = run.num_planned_steps
    return f"{done} of {plural(planned, 'step')}" if planned is not None else plural(done, "step")


def _outcomes_of_runs(comparison: Comparison, sets: Sequence[str]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the outcomes of each run if any group has several runs, or nothing if the main table is enough."""
    if all(len(group.runs) == 1 for group in comparison.groups):
        return []
    return [(group.key, run.name, outcomes([run], sets)) for group in comparison.groups for run in group.runs]


def _facts(run: History) -> list[tuple[str, str, str]]:
    """Return key facts as (label, value, remark)."""
    rows, settings = run.rows, run.settings
    summary = summarize_run(rows)
    window = f"first and last {summary.window_steps} steps" if summary.window_steps > 1 else "first and last step"
    of_planned = f"of {run.num_planned_steps}" if run.num_planned_steps is not None else ""
    tokens = math.fsum(row["train/tokens"] for row in rows if math.isfinite(row.get("train/tokens", math.nan)))
    facts = [
        ("Mean reward", f"{number(summary.reward_first)} → {number(summary.reward_last)}", window),
        ("Steps", f"{int(rows[-1]['step'])}", of_planned),
        ("Resumed tokens", percent(summary.resumed_token_share), "continued in a later step than they began"),
        (
            "Token age",
            number(summary.staleness_mean, 1),
            f"updates on average, {number(summary.staleness_max, 0)} at most",
        ),
        ("Trained tokens", count(tokens) if tokens else "-", ""),
        ("Wall time", duration(summary.wall_time_s), _layout(settings)),
        ("Loss", str(settings.get("loss.name", "-")), f"model: {settings.get('model.path', '-')}"),
    ]
    if run.parent is not None:
        facts.append(("Branch of", f"{Path(run.parent.run).name}, step {run.parent.step}", run.parent.changes))
    recoveries_s = [row["run/recovery_s"] for row in rows if math.isfinite(row.get("run/recovery_s", math.nan))]
    if recoveries_s:
        facts.append(
            ("Recovered in", duration(max(recoveries_s)), f"at most; restarted {plural(len(recoveries_s), 'time')}")
        )
    if "time" in run.environment:
        commit = run.environment.get("git_commit")
        remark = f"commit {commit[:10]}" if commit else str(run.environment.get("host", ""))
        facts.append(("Started", run.environment["time"][:16].replace("T", " "), remark))
    return facts


def _layout(settings: Mapping[str, Any]) -> str:
    sizes = [(name, settings.get(f"parallel.{name}")) for name in ("tensor", "pipeline", "context", "data")]
    return " × ".join(f"{name} {size}" for name, size in sizes if size is not None)


def _cell(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _columns(rows: Sequence[StepRow]) -> dict[str, list[float | None]]:
    """Return all metrics for plotting: name -> value per step, to six digits, with None if not finite."""
    names = sorted({name for row in rows for name in row})
    return {
        name: [float(f"{value:.6g}") if math.isfinite(value := row.get(name, math.nan)) else None for row in rows]
        for name in names
    }


def _script_safe_json(value: Any) -> str:
    """Encode as JSON that cannot close the script tag around it."""
    return json.dumps(value).replace("<", "\\u003c")
