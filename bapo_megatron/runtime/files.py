"""Files of one JSON object a line that survive a crash: appended whole, read with patience, cut back on resume."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends objects to a file, each flushed. Opening cuts off a last line that a crash left unfinished."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_tail(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinities become null, because JSON has no others."""
        self._file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of the file, in order; an unreadable line is skipped and logged. A missing file is empty."""
    if not path.exists():
        return []
    records = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line_number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                torn = "" if line.endswith("\n") else ": the last line is unfinished, its step was being written"
                logger.warning("%s, line %d: skipped, not a JSON object%s", path, line_number, torn)
    return records


def truncate_after(path: Path, step: int) -> int:
    """Keep only the objects whose "step" is at most `step`; returns how many were dropped. Atomic; for resuming."""
    records = read_jsonl(path)
    kept = [record for record in records if record.get("step", 0) <= step]
    if len(kept) < len(records):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_atomically(path, text)
    return len(records) - len(kept)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _drop_torn_tail(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        logger.warning("%s: dropped an unfinished last line", path)
        os.truncate(path, end)
