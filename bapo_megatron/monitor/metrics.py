"""metrics.jsonl: one line per training step, a flat dict of floats. The names: `bapo_megatron.metrics`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import JsonlWriter, read_jsonl


class MetricsWriter:
    """Writer of `metrics.jsonl`, one line per training step. A context manager."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append one step, flushed; non-finite values become null.

        Undeclared metrics are kept: a plug-in may add its own.
        """
        assert "step" in metrics, "every line of metrics names its step"
        self._writer.write({**{name: float(value) for name, value in metrics.items()}, "step": int(metrics["step"])})

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the steps of a run in ascending order, null as NaN. The later line of a repeated step counts."""
    rows = {row["step"]: row for row in map(_as_floats, read_jsonl(path)) if "step" in row}
    return [rows[step] for step in sorted(rows)]


def _as_floats(record: Mapping[str, Any]) -> dict[str, float]:
    row = {name: math.nan if value is None else value for name, value in record.items()}
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
