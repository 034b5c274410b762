"""The Grafana dashboard of a run, from the declared panels of its metrics and the endpoint's own samples.

    python -m bapo_megatron.monitor.grafana > dashboard.json

Import it in Grafana under Dashboards, New, Import.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from bapo_megatron.metrics import METRICS, Metric
from bapo_megatron.monitor.prometheus import ACTION_AGE, LAST_STEP, PREFIX, prometheus_name

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3  # of a panel, in Grafana's grid of 24 columns
_UNITS = {"share": "percentunit", "s": "s", "bytes": "bytes"}  # Grafana's names


class _Panel(NamedTuple):
    """A plot. `lines` are legends and queries; {run} becomes the label of the chosen run."""

    title: str
    unit: str  # Grafana's name
    lines: Sequence[tuple[str, str]]
    description: str = ""


def _own(legend: str, name: str) -> tuple[str, str]:
    return legend, f"{PREFIX}{name}{{run}}"


def _of_metrics(title: str, metrics: Sequence[Metric]) -> _Panel:
    units = {_UNITS.get(metric.unit, "none") for metric in metrics}
    return _Panel(
        title,
        units.pop() if len(units) == 1 else "none",
        [(metric.key, prometheus_name(metric.key) + "{run}") for metric in metrics],
        "\n".join(f"{metric.key} ({metric.unit}): {metric.meaning}" for metric in metrics),
    )


def _rows() -> dict[str, list[_Panel]]:
    """Return the panels by the title of their row: the declared ones, then those of machines and engines."""
    declared: dict[str, dict[str, list[Metric]]] = defaultdict(lambda: defaultdict(list))
    for metric in METRICS.values():
        if metric.panel:
            section, title = metric.panel.split(" / ")
            declared[section][title].append(metric)
    return {
        section: [_of_metrics(title, metrics) for title, metrics in panels.items()]
        for section, panels in declared.items()
    } | _OWN_ROWS


_OWN_ROWS: dict[str, list[_Panel]] = {
    "Progress": [
        _Panel("Step", "none", [_own("step", "step")]),
        _Panel(
            "Tokens per second",
            "none",
            [
                ("sampled", f"rate({PREFIX}generated_tokens_total{{run}}[10m])"),
                ("trained", f"rate({PREFIX}trained_tokens_total{{run}}[10m])"),
            ],
        ),
        _Panel("Since the last step", "s", [("last step", f"time() - {PREFIX}{LAST_STEP}{{run}}")]),
        _Panel("Since the last action", "s", [_own("{{role}}", ACTION_AGE)]),
    ],
    "Engines": [
        _Panel("Engines up and live", "none", [_own("up {{engine}}", "engine_up"), _own("live", "engine_live")]),
        _Panel(
            "Requests",
            "none",
            [
                _own("running {{engine}}", "engine_running_requests"),
                _own("waiting {{engine}}", "engine_waiting_requests"),
            ],
        ),
        _Panel(
            "Weight version",
            "none",
            [_own("trainer", "weight_version"), _own("{{engine}}", "engine_weight_version")],
        ),
    ],
    "GPUs of trainer rank 0's machine": [
        _Panel(
            "Memory",
            "bytes",
            [_own("used {{gpu}}", "gpu_memory_used_bytes"), _own("total {{gpu}}", "gpu_memory_total_bytes")],
        ),
        _Panel("Utilisation", "percentunit", [_own("{{gpu}}", "gpu_utilization_ratio")]),
        _Panel(
            "Power (W), temperature (°C)",
            "none",
            [_own("power {{gpu}}", "gpu_power_watts"), _own("temperature {{gpu}}", "gpu_temperature_celsius")],
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _rows().items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _place(y, 0, 24, 1)})
        y += 1
        for index, panel in enumerate(row):
            place = _place(y + index // _COLUMNS * _HEIGHT, index % _COLUMNS * _WIDTH, _WIDTH, _HEIGHT)
            panels.append(_plot(len(panels) + 1, panel, place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "bapo-megatron",
        "uid": "bapo-megatron",
        "schemaVersion": 39,
        "tags": ["bapo"],
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "panels": panels,
    }


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


def _place(y: int, x: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    query = f"label_values({prometheus_name('step')}, run)"
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "run"},
        "definition": query,
        "refresh": 2,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2, ensure_ascii=False))
