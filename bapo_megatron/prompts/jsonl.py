"""Your own prompts: a UTF-8 file with one JSON object a line, `{"prompt": "...", "answer": ...}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Question


class JsonlSource:
    """All lines of a file, read once. Blank lines are skipped and further fields are ignored.

    Raises DataError for a file that is missing, unreadable or empty, and for a malformed line, naming file and line.
    """

    name = "jsonl"

    def __init__(self, path: str | None) -> None:
        if not path:
            raise DataError("data.source = 'jsonl' needs data.path: the file with your prompts")
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise DataError(f"data.path: there is no file {file.absolute()}") from None
        except OSError as error:
            raise DataError(f"data.path: cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 (byte {error.start}); convert it") from error
        # split at newlines only: JSON strings may hold other Unicode line separators
        self.questions = [
            _parse(line, f"{file}:{number}") for number, line in enumerate(text.split("\n"), start=1) if line.strip()
        ]
        if not self.questions:
            raise DataError(f"{file}: the file has no prompts")

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]


def _parse(line: str, where: str) -> Question:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object like {{"prompt": "...", "answer": ...}}, got {_kind(row)}')
    missing = [key for key in ("prompt", "answer") if key not in row]
    if missing:
        present = ", ".join(sorted(map(repr, row))) or "none"
        raise DataError(f"{where}: field {missing[0]!r} is missing (fields: {present})")
    if not isinstance(row["prompt"], str):
        raise DataError(f"{where}: field 'prompt' must be a string, got {_kind(row['prompt'])}")
    if row["answer"] is None:
        raise DataError(f"{where}: field 'answer' must not be null")
    return Question(row["prompt"], row["answer"], where)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
