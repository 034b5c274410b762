"""Your own prompts: a UTF-8 file with one JSON object a line, `{"prompt": "...", "answer": ...}`, or a Parquet file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.formats import FORMATS, kind_of
from bapo_megatron.runtime.files import regular_file

Row = tuple[dict[str, Any], str]  # with its place in the file


class JsonlSource:
    """All rows of a JSONL or, by its suffix, .parquet file, read once. Ignores blank lines and further fields.

    Args:
        format: a key of `prompts.formats.FORMATS`.

    Raises DataError naming file and row for a malformed row, and for a missing, unreadable or empty file.
    """

    name = "jsonl"

    def __init__(self, path: str | None, format: str = "plain") -> None:
        if not path:
            raise DataError("data.source = 'jsonl' needs data.path: the file with your prompts")
        file = Path(path).expanduser()
        rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
        self.questions = [FORMATS[format](row, where) for row, where in rows]
        if not self.questions:
            raise DataError(f"{file}: the file has no prompts")

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        text = regular_file(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{number}: not UTF-8 (byte {error.start}); convert it") from error
    # not splitlines: JSON strings may hold other Unicode line separators
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse(line, f"{file}:{number}"), f"{file}:{number}"


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs pyarrow: pip install pyarrow, or convert the file") from None
    try:
        rows = pyarrow.parquet.read_table(regular_file(file), memory_map=False).to_pylist()
    except OSError as error:
        raise _unreadable(file, error) from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{file}: not a whole Parquet file: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows, start=1):
        yield row, f"{file}, row {number}"


def _unreadable(file: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"data.path: there is no file {file.absolute()}")
    return DataError(f"data.path: cannot read {file}: {error.strerror or error}")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
    except ValueError:  # Python limits the digits of an integer
        raise DataError(
            f"{where}: not JSON that Python reads: an integer of thousands of digits; write it as a string"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: the JSON is nested too deeply; flatten it") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object like {{"prompt": "...", "answer": ...}}, got {kind_of(row)}')
    return row
