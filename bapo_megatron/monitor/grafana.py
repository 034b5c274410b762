"""The Grafana dashboard of a run, from the declared panels of its metrics and those of grafana.toml.

    python -m bapo_megatron.monitor.grafana > dashboard.json

Import it in Grafana under Dashboards, New, Import.
"""

import json
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.metrics import METRICS, Metric
from bapo_megatron.monitor.prometheus import prometheus_name

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3  # of a panel, in Grafana's grid of 24 columns
_UNITS = {"share": "percentunit", "s": "s", "bytes": "bytes"}  # Grafana's names
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class _Panel:
    """A plot. `lines` are legends and queries; {run} becomes the label of the chosen run."""

    title: str
    lines: Sequence[tuple[str, str]]
    unit: str = "none"  # Grafana's name
    description: str = ""


def _of_metrics(title: str, metrics: Sequence[Metric]) -> _Panel:
    units = {_UNITS.get(metric.unit, "none") for metric in metrics}
    return _Panel(
        title,
        [(metric.key, prometheus_name(metric.key) + "{run}") for metric in metrics],
        units.pop() if len(units) == 1 else "none",
        "\n".join(f"{metric.key} ({metric.unit}): {metric.meaning}" for metric in metrics),
    )


def _declared_rows() -> dict[str, list[_Panel]]:
    """Return the panels that metrics declare, by the title of their row."""
    declared: dict[str, dict[str, list[Metric]]] = defaultdict(lambda: defaultdict(list))
    for metric in METRICS.values():
        if metric.panel:
            section, title = metric.panel.split(" / ")
            declared[section][title].append(metric)
    return {row: [_of_metrics(*panel) for panel in panels.items()] for row, panels in declared.items()}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    own = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    own_rows = {row: [_Panel(**panel) for panel in panels] for row, panels in own["rows"].items()}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in (_declared_rows() | own_rows).items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place})
        y += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_plot(len(panels) + 1, panel, place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return own["dashboard"] | {"panels": panels}


def _plot(number: int, panel: _Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.replace("{run}", '{run="$run"}'),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2, ensure_ascii=False))
