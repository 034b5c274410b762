"""Rows of a prompt file: JSON lines or a JSON list, CSV (.csv) or Parquet (.parquet); as they are, or in gzip.

The content tells Parquet, gzip, and lines from a list, whatever the file is called.
"""

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.assets.hub import is_hub_name
from bapo_megatron.errors import DataError, did_you_mean, escaped, install_command, plural
from bapo_megatron.prompts.json_values import KeyTwiceError, without_twins
from bapo_megatron.runtime.files import regular_file, similar_paths

EXAMPLE = '{"prompt": "...", "answer": ...}'
_MAX_CSV_CHARS = 1 << 30  # limit of one value; csv's own limit is 131,072
MAX_ROWS = 5_000_000  # limit for Parquet and functions: a few kilobytes can stand for billions
_MAX_VALUES = 100_000_000  # limit for Parquet, where a short file can have long lists
_MAX_UNPACKED_BYTES = 4 << 30  # limit for gzip and Parquet: a few kilobytes can stand for terabytes
_MAX_BATCH_ROWS, _MAX_BATCH_BYTES = 1024, 2 << 30  # what is made into values together
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_OTHERS = (
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; run `zstd -d {}`"),
    (b"BZh", "compressed with bzip2; run `bunzip2 -k {}`"),
    (b"\xfd7zXZ", "compressed with xz; run `unxz -k {}`"),
    (b"PK\x03\x04", "a zip archive (or a spreadsheet); unpack it, and save its rows as JSON lines or CSV"),
    (b"ARROW1", "an Arrow file; save its table as Parquet"),
    (b"SQLite format 3", "an SQLite database; save its table as JSON lines or CSV"),
    (b"\xff\xfe", "UTF-16, not UTF-8; run `iconv -f utf-16 -t utf-8 {}`"),
    (b"\xfe\xff", "UTF-16, not UTF-8; run `iconv -f utf-16 -t utf-8 {}`"),
)
"""Beginnings of files that hold no text in UTF-8, with what such a file is and what to do."""


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

    Raises DataError for a file that is missing, cannot be read as a whole, or is too large.
    """
    try:
        yield from _rows(file, setting)
    except MemoryError:
        raise DataError(f"{file}: its rows do not fit this machine's memory; split the file") from None


def _rows(file: Path, setting: str) -> Iterator[Row]:
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    data = _bytes(file, setting)
    if suffix == ".parquet" or data.startswith(_PARQUET):
        return _parquet_rows(file, data)
    text = _text(file, data)
    return _csv_rows(file, text) if suffix == ".csv" else _json_rows(file, text)


def kind_of(value: Any) -> str:
    """Name a value's JSON type, or its Python type if it is not a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _bytes(file: Path, setting: str) -> bytes:
    """Return what is in a file, out of gzip. Raises DataError."""
    try:
        data = regular_file(file).read_bytes()
    except OSError as error:
        raise _unreadable(file, setting, error) from error
    if not data.startswith(_GZIP):
        return data
    try:
        with gzip.open(io.BytesIO(data)) as packed:
            data = packed.read(_MAX_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: not a whole gzip file: {error}; run `gzip -t {file}`") from error
    if len(data) > _MAX_UNPACKED_BYTES:
        raise DataError(f"{file}: more than {_MAX_UNPACKED_BYTES >> 30} GiB in gzip; unpack it, or split it")
    return data


def _text(file: Path, data: bytes) -> str:
    """Return a file's text. Raises DataError if it is something else."""
    if told := next((told for start, told in _OTHERS if data.startswith(start)), None):
        raise DataError(f"{file}: the file is {told.format(file)}")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{number}: not UTF-8 (byte {error.start}); convert it") from error


def _json_rows(file: Path, text: str) -> Iterator[Row]:
    if text.lstrip().startswith("["):
        values, problem = parsed_json(text)
        if problem:
            yield Row(str(file), problem=problem)
            return
        for number, value in enumerate(values, start=1):
            yield as_row(f"{file}, item {number}", value)
        return
    # not splitlines, because JSON strings may hold other Unicode line separators
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) == 1 or (lines and parsed_json(lines[0][1])[1]):
        value, _ = parsed_json(text)
        if isinstance(value, dict):  # one object, maybe over several lines
            yield as_row(str(file) if len(lines) > 1 else f"{file}:{lines[0][0]}", value, _wrapped(file, value))
            return
    for number, line in lines:
        yield as_row(f"{file}:{number}", *parsed_json(line))


def _wrapped(file: Path, value: dict[str, Any]) -> str:
    """Return the problem of an object that is not a row but holds all rows, as in {"data": [{...}, {...}]}."""
    for key, item in value.items() if len(value) == 1 or "data" in value else ():
        if isinstance(item, list) and item and all(isinstance(one, dict) for one in item):
            held = plural(len(item), "row")
            how = f"jq '.[\"{key}\"]' {file} > rows.json"
            return f"one JSON object whose {key!r} holds {held}; save that list alone: {how}"
    return ""


def _csv_rows(file: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CSV_CHARS)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            where, line = f"{file}:{line}", reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = cells
                if (twice := _twice(header)) is not None:
                    raise DataError(f"{where}: the header names the column {twice!r:.60} twice; rename one")
            elif len(cells) == len(header):
                yield Row(where, dict(zip(header, cells, strict=True)))
            else:
                problem = f"{plural(len(cells), 'value')} for the {plural(len(header), 'column')} of the header"
                yield Row(where, problem=f'{problem}; put a value that holds a comma in "quotes"')
    except csv.Error as error:
        yield Row(f"{file}:{reader.line_num}", problem=f"not CSV: {error}")


def _parquet_rows(file: Path, data: bytes) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow, which cannot be imported; run "
            f"`{install_command('parquet')}`, or convert the file to JSON lines"
        ) from None
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
        names, num_rows = table.schema_arrow.names, table.metadata.num_rows
        if (twice := _twice(names)) is not None:
            raise DataError(f"{file}: the column {twice!r:.60} is there twice; rename one")
        # Batches of 0 rows meet damaged metadata with an exception; `metadata`, asked first, would abort the process.
        list(table.reader.iter_batches(0, [*range(table.num_row_groups)]))
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        num_values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
        if num_rows > MAX_ROWS or num_values > _MAX_VALUES:
            held = f"{num_rows:,} rows and {num_values:,} values"
            raise DataError(f"{file}: {held} are more than {MAX_ROWS:,} and {_MAX_VALUES:,}; split it")
        # A value is no longer than its row group, and each row of the batch may have the longest.
        most_rows = _MAX_BATCH_BYTES // max([1, *(group.total_byte_size for group in groups)])
        num_chars = 0
        for batch in table.iter_batches(max(1, min(_MAX_BATCH_ROWS, most_rows))):
            columns = [_values(column) for column in batch.columns]
            num_chars += _num_chars(columns)
            if num_chars > _MAX_UNPACKED_BYTES:
                raise DataError(f"{file}: more than {_MAX_UNPACKED_BYTES >> 30} GiB in Parquet; split it")
            for row in zip(*columns, strict=True):
                number += 1
                yield Row(f"{file}, row {number}", dict(zip(names, row, strict=True)))
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: not a whole Parquet file: {' '.join(str(error).split()):.200}") from error


def _values(column: Any) -> list[Any]:
    """Return the values of a Parquet column, or values whose type says what they are if Python cannot represent them.

    Examples are a date beyond the year 9999 and a time zone that nobody knows: they matter only where they are read.
    """
    try:
        return column.to_pylist()
    except (LookupError, ValueError, ArithmeticError, RecursionError):
        return [type(f"{escaped(str(column.type)):.60} that Python cannot read", (), {})()] * len(column)


def _num_chars(value: Any) -> int:
    """Return the length of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_num_chars, value))


def _twice(names: Iterable[str]) -> str | None:
    """Return the first name that is there more than once."""
    return next((name for name, num in Counter(names).items() if num > 1), None)


def missing(file: Path, setting: str) -> str:
    """Return the message about a missing file."""
    problem = f"{setting}: there is no file {file.absolute()}"
    if meant := did_you_mean(*similar_paths(file)):
        return f"{problem}; {meant}"
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
    return is_hub_name(str(file)) and file.suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet", ".gz")


def _unreadable(file: Path, setting: str, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(missing(file, setting))
    return DataError(f"{setting}: cannot read {file}: {error.strerror or error}")


def parsed_json(text: str) -> tuple[Any, str]:
    """Return the JSON value of a text, and the problem if it has none."""
    try:
        return json.loads(text, object_pairs_hook=without_twins), ""
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        return None, f"not JSON: {error.msg} ({at})"
    except KeyTwiceError as error:
        return None, str(error)
    except ValueError:  # Python limits the digits of an integer
        return None, "not JSON that Python reads: an integer of thousands of digits; write it as a string"
    except RecursionError:
        return None, "the JSON is nested too deeply; flatten it"


def as_row(where: str, value: Any, problem: str = "") -> Row:
    """Return a row with the value found at a place, or with the problem there."""
    if not problem and not isinstance(value, dict):
        problem = f"expected an object like {EXAMPLE}, got {kind_of(value)}"
    return Row(where, problem=problem) if problem else Row(where, value)
