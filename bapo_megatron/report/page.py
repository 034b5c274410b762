"""`bapo report`: a run, or several side by side, as one HTML file that opens anywhere, without a network."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from bapo_megatron.errors import UserError
from bapo_megatron.monitor.summary import Row, count, duration, find_problems, number, percent, summarize
from bapo_megatron.report.compare import OUTCOMES, Comparison, compare, outcomes
from bapo_megatron.report.gallery import PANELS
from bapo_megatron.report.history import History, read_history
from bapo_megatron.report.panels import Panel
from bapo_megatron.report.style import css_variables, look, to_svg
from bapo_megatron.runtime.files import read_jsonl, write_atomically

COMPARISON_NAME = "comparison.html"
_TEMPLATES = Path(__file__).parent
_NUM_EARLY_SAMPLES, _NUM_LATE_SAMPLES = 3, 6
_MAX_SEGMENT_CHARS = 4000
_NUM_TABLE_ROWS = 20
_TABLE_COLUMNS = (
    "step",
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
class Card:
    """A figure as the page shows it."""

    section: str
    title: str
    svg: str
    how_to_read: str
    stacked: bool


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's report from its metrics, samples and configuration and return its path: by default report.html in
    the run's folder.

    Works during the run. Raises UserError if the folder is not a run, has no metrics, or is not writable.
    """
    run = read_history(run_dir)
    if not run.rows:
        raise UserError(
            f"no metrics in {run_dir}: a report needs a run with at least one finished step; "
            "give the folder of such a run (runs/<name>), or start one with `bapo train`"
        )
    cards, missing = _cards(lambda panel: (panel.draw(run), panel.how_to_read))
    html = _render(
        "report.html.jinja",
        title=f"{run.name} · BAPO run",
        name=run.name,
        facts=_facts(run),
        problems=find_problems(run.rows),
        cards=cards,
        missing=missing,
        samples=[_shown_sample(sample) for sample in _choose_samples(read_jsonl(run_dir / "samples.jsonl"))],
        table_columns=_TABLE_COLUMNS,
        table_rows=[[_cell(name, row) for name in _TABLE_COLUMNS] for row in run.rows[-_NUM_TABLE_ROWS:]],
        num_rows=len(run.rows),
        config_text=run.config_text,
        metrics_json=_script_safe_json(_columns(run.rows)),
    )
    return _write(output or run_dir / "report.html", html)


def write_comparison(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write several runs side by side into one page and return its path: by default comparison.html in the parent
    folder of the first run.

    Raises UserError if folders are not runs or repeated, none has finished a step, or the page is not writable.
    """
    comparison = compare(run_dirs)
    cards, missing = _cards(lambda panel: (panel.compare(comparison.runs), panel.remarks(comparison.runs)))
    runs = [run for group in comparison.groups for run in group.runs]
    html = _render(
        "comparison.html.jinja",
        title=f"{len(runs)} runs compared",
        groups=[
            {"key": group.key, "name": group.name, "num_seeds": len(group.runs), "look": look(i).css}
            for i, group in enumerate(comparison.groups)
        ],
        comparison=comparison,
        cards=cards,
        missing=missing,
        outcome_names=OUTCOMES,
        outcomes=[(group, outcomes(group.runs)) for group in comparison.groups],
        outcomes_of_runs=_outcomes_of_runs(comparison),
        metrics_json=_script_safe_json({run.name: _columns(run.rows) for run in runs}),
    )
    return _write(output or run_dirs[0].absolute().parent / COMPARISON_NAME, html)


def _cards(draw: Callable[[Panel], tuple[Figure | None, str]]) -> tuple[list[Card], list[str]]:
    """Draw the figures; return them, and the titles of those without data, with the setting that records it."""
    cards, missing = [], []
    for panel in PANELS:
        figure, how_to_read = draw(panel)
        if figure is None:
            missing.append(f"{panel.title} ({panel.needs})" if panel.needs else panel.title)
        else:
            slug = re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-")
            cards.append(Card(panel.section, panel.title, to_svg(figure, slug), how_to_read, panel.stacked))
    return cards, missing


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    colours = {"light": css_variables(dark=False), "dark": css_variables(dark=True)}
    return environment.get_template(template).render(colours=colours, **values)


def _write(path: Path, html: str) -> Path:
    write_atomically(path, html, advice="name a file elsewhere with --output")
    return path


def _outcomes_of_runs(comparison: Comparison) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the outcomes of each run if any group has several; otherwise the table is enough."""
    if all(len(group.runs) == 1 for group in comparison.groups):
        return []
    return [(group.key, run.name, outcomes([run])) for group in comparison.groups for run in group.runs]


def _facts(run: History) -> list[tuple[str, str, str]]:
    """Return key facts as (label, value, remark)."""
    rows, settings = run.rows, run.settings
    summary = summarize(rows)
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
    if "time" in run.environment:
        commit = run.environment.get("git_commit")
        remark = f"commit {commit[:10]}" if commit else str(run.environment.get("host", ""))
        facts.append(("Started", run.environment["time"][:10], remark))
    return facts


def _layout(settings: Mapping[str, Any]) -> str:
    sizes = [(name, settings.get(f"parallel.{name}")) for name in ("tensor", "pipeline", "context", "data")]
    return " × ".join(f"{name} {size}" for name, size in sizes if size is not None)


def _choose_samples(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose some of the earliest and the latest samples, for a before and after."""
    if len(samples) <= _NUM_EARLY_SAMPLES + _NUM_LATE_SAMPLES:
        return list(samples)
    return [*samples[:_NUM_EARLY_SAMPLES], *samples[-_NUM_LATE_SAMPLES:]]


def _shown_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Format a line of samples.jsonl for the page; tolerant, because other tools may write such lines."""
    segments = sample.get("segments") or [{"text": sample.get("response", "")}]
    reward = sample.get("reward")
    remarks = [
        f"step {sample.get('step', '?')}",
        f"reward {number(reward)}" if isinstance(reward, int | float) else "not judged",
        f"{sample.get('num_tokens', '?')} tokens",
    ]
    if sample.get("finish_reason") == "length":
        remarks.append("cut off at the length limit")
    if len(segments) > 1:
        remarks.append(f"resumed {len(segments) - 1}×")
    return {
        "remarks": remarks,
        "passed": isinstance(reward, int | float) and reward > 0,
        "prompt": _shortened(str(sample.get("prompt", ""))),
        "answer": "" if sample.get("answer") is None else _shortened(_plain(sample["answer"])),
        "segments": [
            {"text": _shortened(str(segment.get("text", ""))), "version": segment.get("version")}
            for segment in segments
        ],
    }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shortened(text: str) -> str:
    rest = len(text) - _MAX_SEGMENT_CHARS
    return text if rest <= 0 else f"{text[:_MAX_SEGMENT_CHARS]}… [{rest} more characters in samples.jsonl]"


def _cell(name: str, row: Row) -> str:
    value = row.get(name, math.nan)
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if name == "step" else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _columns(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return all metrics for plotting: name -> value per step, to six digits; None where not finite."""
    names = sorted({name for row in rows for name in row})
    return {
        name: [float(f"{value:.6g}") if math.isfinite(value := row.get(name, math.nan)) else None for row in rows]
        for name in names
    }


def _script_safe_json(value: Any) -> str:
    """Encode as JSON that cannot end the script tag around it."""
    return json.dumps(value).replace("<", "\\u003c")
