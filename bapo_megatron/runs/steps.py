"""The finished steps of a run: the lines of metrics.jsonl."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import read_jsonl, step_of

log = logging.getLogger(__name__)

_MAX_FLOAT32 = 3.4028235e38

StepRow = dict[str, float]
"""The metrics of a step by name, including its number ("step")."""


def read_metrics(path: Path) -> list[StepRow]:
    """Read the steps in a metrics.jsonl in ascending order, with null as NaN.

    If a step is repeated, its last line counts. A line without a step is skipped and logged.
    """
    rows: dict[int, StepRow] = {}
    for record in read_jsonl(path):
        step = step_of(record)
        if step is None:
            log.warning("%s: skipped a line without a step: %.80r", path, record.get("step"))
        else:
            rows[step] = _as_floats(record) | {"step": float(step)}
    return [rows[step] for step in sorted(rows)]


def _as_floats(record: Mapping[str, Any]) -> StepRow:
    """Return the numbers in a line. Numbers that no metric can have, beyond the range of float32, become NaN."""
    row = {name: math.nan if value is None else value for name, value in record.items()}
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: float(value) if abs(value) <= _MAX_FLOAT32 else math.nan for name, value in numbers.items()}
