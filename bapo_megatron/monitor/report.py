"""`bapo report`: a run as one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from bapo_megatron.errors import UserError
from bapo_megatron.monitor.figures import Column, Level, Line, Scale, line_figure, moving_average, stacked_figure
from bapo_megatron.monitor.jsonl import read_jsonl, write_atomically
from bapo_megatron.monitor.metrics import read_metrics
from bapo_megatron.monitor.style import to_svg
from bapo_megatron.monitor.summary import Row, count, duration, find_problems, number, percent, summarize

_TEMPLATE_PATH = Path(__file__).with_name("report.html.jinja")
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
class Panel:
    """One figure of the report; `svg` is None where its metrics were not recorded."""

    title: str
    svg: str | None
    how_to_read: str


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run's folder from its metrics, samples and configuration; returns its path.

    Works while the run goes on. Raises UserError where the folder holds no metrics.
    """
    rows = read_metrics(run_dir / "metrics.jsonl")
    if not rows:
        raise UserError(
            f"no metrics in {run_dir}: a report needs a run with at least one finished step; "
            "give the folder of such a run (runs/<name>), or start one with `bapo train`"
        )
    config_path = run_dir / "config.toml"
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = tomllib.loads(config_text)
    samples = read_jsonl(run_dir / "samples.jsonl")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    html = environment.from_string(_TEMPLATE_PATH.read_text(encoding="utf-8")).render(
        name=run_dir.absolute().name,
        facts=_facts(rows, config, run_dir),
        problems=find_problems(rows),
        panels=_panels(rows, config),
        samples=[_shown_sample(sample) for sample in _choose_samples(samples)],
        table_columns=_TABLE_COLUMNS,
        table_rows=[[_cell(name, row) for name in _TABLE_COLUMNS] for row in rows[-_NUM_TABLE_ROWS:]],
        num_rows=len(rows),
        config_text=config_text,
        metrics_json=_script_safe_json(rows),
    )
    path = run_dir / "report.html"
    write_atomically(path, html)
    return path


def _facts(rows: Sequence[Row], config: Mapping[str, Any], run_dir: Path) -> list[tuple[str, str, str]]:
    """Key facts as (label, value, remark)."""
    summary = summarize(rows)
    window = f"first and last {summary.window_steps} steps" if summary.window_steps > 1 else "first and last step"
    num_planned = _setting(config, "train", "num_steps")
    of_planned = f"of {num_planned}" if num_planned is not None else ""
    tokens = math.fsum(row["train/tokens"] for row in rows if math.isfinite(row.get("train/tokens", math.nan)))
    environment_path = run_dir / "environment.json"
    environment = json.loads(environment_path.read_text(encoding="utf-8")) if environment_path.exists() else {}
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
        ("Wall time", duration(summary.wall_time_s), _layout(config)),
        ("Loss", str(_setting(config, "loss", "name") or "-"), f"model: {_setting(config, 'model', 'path') or '-'}"),
    ]
    if environment:
        commit = environment.get("git_commit")
        facts.append(("Started", environment["time"][:10], f"commit {commit[:10]}" if commit else environment["host"]))
    return facts


def _layout(config: Mapping[str, Any]) -> str:
    sizes = [(name, _setting(config, "parallel", name)) for name in ("tensor", "pipeline", "context", "data")]
    return " × ".join(f"{name} {size}" for name, size in sizes if size is not None)


def _panels(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Panel]:
    steps = np.array([row["step"] for row in rows])

    def column(name: str) -> Column:
        return np.array([row.get(name, math.nan) for row in rows])

    entropy, covariance = column("loss/entropy"), column("entropy_rule/covariance")
    entropy_changes = np.append(np.where(np.diff(steps) == 1, np.diff(entropy), math.nan), math.nan)
    entropy_changes[np.isnan(covariance)] = math.nan
    target = _setting(config, "bapo", "rho0") if _setting(config, "loss", "name") == "bapo" else None
    return [
        Panel(
            "Reward",
            _lines("reward", steps, [Line("mean reward", column("reward/mean"), smooth=True)], "mean reward"),
            "Should rise. With rewards of 0 and 1 this is the pass rate of the sampled responses.",
        ),
        Panel(
            "Entropy",
            _lines("entropy", steps, [Line("entropy", entropy)], "nats per token", from_zero=True),
            "A slow fall is learning; a fall to near zero early on means that the policy stopped exploring.",
        ),
        Panel(
            "Entropy-Clip Rule",
            _lines(
                "entropy-rule",
                steps,
                [
                    Line("predicted", moving_average(-covariance)),
                    Line("measured (right)", moving_average(entropy_changes), on_right=True),
                ],
                "-Cov(log π, A X), nats",
                right_label="change to the next step, nats",
                around_zero=True,
            ),
            "Means of the last 10 steps. Above zero entropy is pushed up, below it down: what a step's tokens predict, "
            "to first order, against what entropy did until the next step. Compare signs and courses; scales differ "
            "by the step size. Where they part for long, other things move entropy: new prompts, momentum.",
        ),
        Panel(
            "Token classes",
            _stack(
                "token-classes",
                steps,
                [
                    Line(name.replace("_", ", "), column(f"entropy_rule/{name}"))
                    for name in ("positive_low", "negative_high", "positive_high", "negative_low")
                ],
                "share of trained tokens",
            ),
            "Sign of the advantage, and probability above or below the typical one. The two at the bottom raise "
            "entropy, the two above them lower it; what is missing to 1 has no advantage.",
        ),
        Panel(
            "Clip bounds",
            _lines(
                "bounds",
                steps,
                [Line("upper bound", column("bapo/high")), Line("lower bound", column("bapo/low"))],
                "probability ratio",
                levels=_bound_ranges(config),
            ),
            "Means over a step's updates. Always at the bottom of both ranges: plain fixed clipping; always at the "
            "top: the target is out of reach. In between, the search is at work, or updates of both kinds are "
            "averaged: bapo/inert_share and bapo/saturated_share tell.",
        ),
        Panel(
            "Positive share",
            _lines(
                "positive",
                steps,
                [Line("positive share", column("bapo/positive_share"))],
                "share of the contribution",
                levels=[Level(f"target {target:g}", target)] if target is not None else (),
            ),
            "What positive tokens contribute to the update at the bounds in use. The search stops where it reaches "
            "its target; above the target the bounds stay at their start, below it they are at their limits.",
        ),
        Panel(
            "Gradient norm",
            _lines(
                "grad",
                steps,
                [
                    Line("mean of the step", column("optimizer/grad_norm")),
                    Line("largest", column("optimizer/grad_norm_max")),
                ],
                "global norm",
                from_zero=True,
                log_if_wide=True,
            ),
            "Should stay in one range. Spikes that grow announce a collapse: lower the learning rate or the reuse.",
        ),
        Panel(
            "Staleness",
            _lines(
                "staleness",
                steps,
                [
                    Line("mean", column("staleness/mean")),
                    Line("oldest", column("staleness/max")),
                    Line("resumed (right)", 100 * column("rollout/resumed_token_share"), on_right=True),
                ],
                "age in updates",
                right_label="resumed tokens, %",
                from_zero=True,
            ),
            "Age counts the updates between sampling a token and training on it. Growth without end means that "
            "sampling outruns training.",
        ),
        Panel(
            "Engine against trainer",
            _lines(
                "mismatch",
                steps,
                [
                    Line("mean", column("mismatch/logprob_mean")),
                    Line("99th percentile", column("mismatch/logprob_p99")),
                    Line("largest", column("mismatch/logprob_max")),
                ],
                "nats",
                log_if_wide=True,
            ),
            "Difference between the log-probs that the engine reported and the trainer's at the same weights, over "
            "tokens of age 0. Around 1e-6 with float32; a jump announces a weight update that went wrong.",
        ),
        Panel(
            "Throughput",
            _lines(
                "throughput",
                steps,
                [
                    Line("sampled", column("rollout/tokens_per_s")),
                    Line("trained", column("train/tokens_per_s")),
                ],
                "tokens per second",
                from_zero=True,
            ),
            "Each per second of its own phase. A drop at constant response length points at the machine.",
        ),
        Panel(
            "Time per step",
            _stack(
                "time",
                steps,
                [
                    Line(span, column(f"time/{span}_s"))
                    for span in ("rollout", "critic", "score", "train", "sync", "eval", "other")
                ],
                "seconds",
            ),
            "The thickest layer is what the run waits for.",
        ),
    ]


def _bound_ranges(config: Mapping[str, Any]) -> list[Level]:
    """The ranges in which the search may move each bound, upper first like the lines."""
    if _setting(config, "loss", "name") != "bapo":
        return []
    ranges = []
    for side in ("high", "low"):
        bound = _setting(config, "bapo", side)
        if isinstance(bound, list) and len(bound) == 3:
            bound = dict(zip(("start", "stop", "step"), bound, strict=True))
        if isinstance(bound, Mapping) and {"start", "stop"} <= bound.keys():
            ranges.append(Level("its range", bound["start"], bound["stop"]))
    return ranges


def _choose_samples(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the earliest and the latest, for a before and after."""
    if len(samples) <= _NUM_EARLY_SAMPLES + _NUM_LATE_SAMPLES:
        return list(samples)
    return [*samples[:_NUM_EARLY_SAMPLES], *samples[-_NUM_LATE_SAMPLES:]]


def _shown_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a line of samples.jsonl; tolerant, because other tools may write such lines too."""
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


def _script_safe_json(rows: Sequence[Row]) -> str:
    """All metrics, for whoever wants to plot them: {"name": [value per step]}; nothing in it can end the script tag."""
    names = sorted({name for row in rows for name in row})
    columns = {
        name: [value if math.isfinite(value := row.get(name, math.nan)) else None for row in rows] for name in names
    }
    return json.dumps(columns).replace("<", "\\u003c")


def _setting(config: Mapping[str, Any], section: str, key: str) -> Any:
    return config.get(section, {}).get(key)


def _lines(
    name: str,
    steps: Column,
    lines: Sequence[Line],
    y_label: str,
    *,
    right_label: str = "",
    levels: Sequence[Level] = (),
    **scale: bool,
) -> str | None:
    figure = line_figure(steps, lines, y_label, right_label=right_label, levels=levels, scale=Scale(**scale))
    return to_svg(figure, name) if figure is not None else None


def _stack(name: str, steps: Column, lines: Sequence[Line], y_label: str) -> str | None:
    figure = stacked_figure(steps, lines, y_label)
    return to_svg(figure, name) if figure is not None else None
