"""Rows of a prompt file: JSON lines, a JSON list (.json), CSV (.csv) or Parquet (.parquet)."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.assets.hub import is_hub_name
from bapo_megatron.errors import DataError, plural
from bapo_megatron.runtime.files import regular_file

EXAMPLE = '{"prompt": "...", "answer": ...}'
_MAX_CSV_CHARS = 1 << 30  # limit of one value; csv's own limit is 131,072


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its values by column, or why it cannot be read."""

    where: str  # its place, such as "math.jsonl:3"
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_rows(file: Path, setting: str) -> Iterator[Row]:
    """Yield the rows of a file in order; its suffix names the format, which is JSON lines by default.

    Args:
        setting: what errors call the path.

    Raises DataError for a file that is missing or cannot be read as a whole.
    """
    match file.suffix.lower():
        case ".parquet":
            return _parquet_rows(file, setting)
        case ".csv":
            return _csv_rows(file, setting)
        case ".json" if (text := _text(file, setting)).lstrip().startswith("["):
            return _listed_rows(file, text)
    return _json_rows(file, setting)


def kind_of(value: Any) -> str:
    """Name a value's JSON type, or its Python type if it is not a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _text(file: Path, setting: str) -> str:
    try:
        return regular_file(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(file, setting, error) from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{number}: not UTF-8 (byte {error.start}); convert it") from error


def _json_rows(file: Path, setting: str) -> Iterator[Row]:
    # not splitlines, since JSON strings may hold other Unicode line separators
    for number, line in enumerate(_text(file, setting).split("\n"), start=1):
        if line.strip():
            yield as_row(f"{file}:{number}", *_parsed(line))


def _listed_rows(file: Path, text: str) -> Iterator[Row]:
    values, problem = _parsed(text)
    if problem:
        yield Row(str(file), problem=problem)
        return
    for number, value in enumerate(values, start=1):
        yield as_row(f"{file}, item {number}", value)


def _csv_rows(file: Path, setting: str) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CSV_CHARS)
    reader = csv.reader(io.StringIO(_text(file, setting), newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            where, line = f"{file}:{line}", reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = cells
                if twice := next((name for name in header if header.count(name) > 1), None):
                    raise DataError(f"{where}: the header names the column {twice!r} twice; rename one")
            elif len(cells) == len(header):
                yield Row(where, dict(zip(header, cells, strict=True)))
            else:
                problem = f"{plural(len(cells), 'value')} for the {plural(len(header), 'column')} of the header"
                yield Row(where, problem=f'{problem}; put a value that holds a comma in "quotes"')
    except csv.Error as error:
        yield Row(f"{file}:{reader.line_num}", problem=f"not CSV: {error}")


def _parquet_rows(file: Path, setting: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow, which cannot be imported; run "
            "`pip install 'bapo-megatron[parquet]'`, or convert the file to JSON lines"
        ) from None
    try:
        rows = pyarrow.parquet.read_table(regular_file(file), memory_map=False).to_pylist()
    except OSError as error:
        raise _unreadable(file, setting, error) from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"{file}: not a whole Parquet file: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows, start=1):
        yield Row(f"{file}, row {number}", row)


def missing(file: Path, setting: str) -> str:
    """Return the message about a missing file."""
    problem = f"{setting}: there is no file {file.absolute()}"
    if not may_be_on_hub(file):
        return problem
    table = setting.removesuffix(".path")
    how = f'set {table}.source="hub", or ' if table not in (setting, "eval") else ""
    return (
        f"{problem}; if {file} is a data set of the Hugging Face hub, {how}run `hf download {file} --repo-type dataset "
        f"--local-dir data/{file.name}`, and give one of its files"
    )


def may_be_on_hub(file: Path) -> bool:
    """Return whether a path could be a data set's name on the Hugging Face hub."""
    return is_hub_name(str(file)) and file.suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet")


def _unreadable(file: Path, setting: str, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(missing(file, setting))
    return DataError(f"{setting}: cannot read {file}: {error.strerror or error}")


def _parsed(text: str) -> tuple[Any, str]:
    """Return the JSON value of a text, and the problem if it has none."""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        return None, f"not JSON: {error.msg} ({at})"
    except ValueError:  # Python limits the digits of an integer
        return None, "not JSON that Python reads: an integer of thousands of digits; write it as a string"
    except RecursionError:
        return None, "the JSON is nested too deeply; flatten it"


def as_row(where: str, value: Any, problem: str = "") -> Row:
    """Return a row with the value found at a place, or with the problem there."""
    if not problem and not isinstance(value, dict):
        problem = f"expected an object like {EXAMPLE}, got {kind_of(value)}"
    return Row(where, problem=problem) if problem else Row(where, value)
