"""All figures of the report, in order: the figures in gallery.toml, and plain figures for other declared panels."""

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bapo_megatron.metrics import METRIC_FAMILIES, METRICS, Metric, declared
from bapo_megatron.report import quantities
from bapo_megatron.report.figures import STEPS, Scale, XAxis
from bapo_megatron.report.panels import Curve, Panel, Values, no_levels, steps
from bapo_megatron.runs.history import History, entry_names

_AXES: Mapping[str, tuple[XAxis, Values]] = {
    "steps": (STEPS, steps),
    "probability": (XAxis("probability of the token", margin=0.05, whole=False), quantities.bin_centres),
}


def _designed() -> tuple[Panel, ...]:
    """Read the figures of gallery.toml."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(_panel(*name.split(" / "), **table) for name, table in tables.items())


def _panel(
    section: str,
    title: str,
    *,
    curves: Sequence[Mapping[str, Any]],
    scale: Mapping[str, bool] | None = None,
    levels: str = "",
    over: str = "steps",
    **texts: Any,
) -> Panel:
    axis, places = _AXES[over]
    return Panel(
        section,
        title,
        curves=tuple(_curve(**curve) for curve in curves),
        scale=Scale(**scale or {}),
        levels=getattr(quantities, levels) if levels else no_levels,
        over=axis,
        places=places,
        **texts,
    )


def _curve(label: str, metric: str = "", values: Sequence[str] = (), **looks: Any) -> Curve:
    """Read a curve. `values` names a function in quantities.py, and its arguments if it returns the real function."""
    if not values:
        return Curve(label, metric, **looks)
    name, *arguments = values
    derived = getattr(quantities, name)
    return Curve(label, metric, derived(*arguments) if arguments else derived, **looks)


FIGURES = _designed()


def _with_declared(figures: tuple[Panel, ...], metrics: Mapping[str, Metric]) -> tuple[Panel, ...]:
    """Add each metric that declares a panel to the figure of that name, or to a new plain figure."""
    drawn = {curve.metric for panel in figures for curve in panel.curves}
    missing: dict[str, list[str]] = defaultdict(list)
    for metric in metrics.values():
        if metric.panel and metric.key not in drawn:
            missing[metric.panel].append(metric.key)
    panels = [
        replace(panel, curves=(*panel.curves, *_plain_curves(missing.pop(f"{panel.section} / {panel.title}", []))))
        for panel in figures
    ]
    for name, keys in missing.items():
        section, title = name.split(" / ")
        how_to_read = " ".join(f"{key}: {metrics[key].meaning} {metrics[key].how_to_read}".strip() for key in keys)
        panels.append(Panel(section, title, metrics[keys[0]].unit, _plain_curves(keys), how_to_read))
    sections = list(dict.fromkeys(panel.section for panel in panels))
    return tuple(sorted(panels, key=lambda panel: sections.index(panel.section)))


def _plain_curves(keys: list[str]) -> tuple[Curve, ...]:
    return tuple(Curve(key, key, row=key) for key in keys)


PANELS = _with_declared(FIGURES, METRICS)


def with_named(panels: Sequence[Panel], runs: Sequence[History]) -> tuple[Panel, ...]:
    """Add figures for what the runs' settings name: evaluation sets, mixed sources and metrics of the user's own loss.

    Also adds a figure for the parts of the reward, and drops the figure of the unnamed evaluation set if every run has
    named ones.
    """
    extended: list[Panel] = []
    for panel in panels:
        if panel.title != "Evaluation" or not runs or not all(run.entries("eval.sets") for run in runs):
            extended.append(panel)
        if panel.title == "Evaluation":
            extended += [_of_set(panel, name) for name in entry_names(runs, "eval.sets")]
        elif panel.title == "Reward":
            extended += [*_of_parts(runs), *_of_sources(entry_names(runs, "data.sources"))]
    own = {metric.key: metric for run in runs for metric in run.own_metrics}
    return _with_declared(tuple(extended), own) if own else tuple(extended)


def _of_set(panel: Panel, name: str) -> Panel:
    """Return the evaluation figure for one named set."""
    prefix = f"eval/{name}/"

    def of_set(curve: Curve) -> Curve:
        metric, error = (key.replace("eval/", prefix) for key in (curve.metric, curve.standard_error))
        values = quantities.best_of_group(prefix) if curve.values else None
        return replace(curve, metric=metric, standard_error=error, values=values)

    return replace(panel, title=f"Evaluation: {name}", curves=tuple(map(of_set, panel.curves)))


def _of_parts(runs: Sequence[History]) -> list[Panel]:
    """Return the figure of the rewards' parts, or an empty list if there are none."""
    family = METRIC_FAMILIES["reward/NAME/mean"]
    keys = dict.fromkeys(key for run in runs for row in run.rows[-1:] for key in row if declared(key) is not None)
    names = {key: key.split("/")[1] for key in keys if key.startswith("reward/") and key not in METRICS}
    curves = tuple(Curve(name, key, row=f"{name}, mean") for key, name in names.items())
    text = f"{family.meaning} {family.how_to_read}"
    return [Panel("Learning", "Parts of the reward", "mean part", curves, text)] if curves else []


def _of_sources(names: Sequence[str]) -> list[Panel]:
    """Return the figures of a mixture of sources, or an empty list if no source is named."""
    if not names:
        return []
    reward, share = METRIC_FAMILIES["data/NAME/reward"], METRIC_FAMILIES["data/NAME/prompt_share"]
    rewards = tuple(Curve(name, f"data/{name}/reward", row=f"{name}, mean reward") for name in names)
    shares = tuple(Curve(name, f"data/{name}/prompt_share", percent=True, row=f"{name}, %") for name in names)
    return [
        Panel("Learning", "Reward by source", "mean reward", rewards, f"{reward.meaning} {reward.how_to_read}"),
        Panel("Learning", "Prompts by source", "% of the prompts", shares, f"{share.meaning} {share.how_to_read}"),
    ]
