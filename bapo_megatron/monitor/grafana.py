"""The Grafana dashboard of a run, made from the names that the Prometheus endpoint exports.

python -m bapo_megatron.monitor.grafana > bapo_megatron/monitor/assets/grafana.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from bapo_megatron.monitor.prometheus import ACTION_AGE, LAST_STEP, PREFIX, prometheus_name

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3  # of a panel, in Grafana's grid of 24 columns


class _Panel(NamedTuple):
    """A plot. `lines` are legends and queries; {run} stands for the label of the chosen run."""

    title: str
    unit: str  # of Grafana
    lines: Sequence[tuple[str, str]]


def _metric(name: str) -> str:
    return prometheus_name(name) + "{run}"


def _metrics(*names: str) -> list[tuple[str, str]]:
    return [(name, _metric(name)) for name in names]


def _own(legend: str, name: str) -> tuple[str, str]:
    return legend, f"{PREFIX}{name}{{run}}"


_ROWS: dict[str, list[_Panel]] = {
    "Learning": [
        _Panel("Reward", "none", _metrics("reward/mean", "eval/reward")),
        _Panel("Entropy (nats)", "none", _metrics("loss/entropy")),
        _Panel("Clip bounds", "none", _metrics("bapo/low", "bapo/high")),
        _Panel("Positive share", "percentunit", _metrics("bapo/positive_share", "bapo/saturated_share")),
        _Panel("Gradient norm", "none", _metrics("optimizer/grad_norm", "optimizer/grad_norm_max")),
        _Panel("Age (updates)", "none", _metrics("staleness/mean", "staleness/max")),
    ],
    "Speed": [
        _Panel("Step", "none", _metrics("step")),
        _Panel(
            "Where the time goes",
            "s",
            _metrics(*(f"time/{span}_s" for span in ("rollout", "critic", "score", "train", "sync", "eval", "other"))),
        ),
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
        _Panel("Slowest rank over the median", "none", _metrics("straggler/ratio", "straggler/rank")),
    ],
    "Rollouts": [
        _Panel("Engines up, and asked", "none", [_own("up {{engine}}", "engine_up"), _own("live", "engine_live")]),
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
            [("trainer", _metric("version")), _own("{{engine}}", "engine_weight_version")],
        ),
        _Panel("Response tokens", "none", _metrics("rollout/response_tokens_mean", "rollout/response_tokens_max")),
        _Panel("Ledger", "none", _metrics("ledger/queued", "ledger/running", "ledger/partial", "ledger/finished")),
        _Panel("Engine against trainer (nats)", "none", _metrics("mismatch/logprob_mean", "mismatch/logprob_p99")),
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
    """What Grafana imports (Dashboards, New, Import)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _ROWS.items():
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
