"""Your own prompts: a UTF-8 file with one JSON object a line, `{"prompt": "...", "answer": ...}`, or a Parquet file.

Rows of well-known data sets become questions too: each of `FORMATS` maps a row and its place in a file to a `Question`,
or raises DataError naming place and field.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Question
from bapo_megatron.runtime.files import regular_file

Row = tuple[dict[str, Any], str]  # with its place in the file

_MAX_DEPTH = 100  # Python's own limit depends on the caller
_BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
_PROGRAM = (
    "Complete this Python function. Answer with one ```python block that holds the whole program, with its imports."
    "\n\n```python\n{}\n```"
)


class JsonlSource:
    """All rows of a JSONL or, by its suffix, .parquet file, read once. Ignores blank lines and further fields.

    Args:
        format: a key of `FORMATS`.
        setting: what errors call the path.

    Raises DataError naming file and row for a malformed row, and for a missing, unreadable or empty file.
    """

    name = "jsonl"

    def __init__(self, path: str | None, format: str = "plain", setting: str = "data.path") -> None:
        if not path:
            raise DataError("data.source = 'jsonl' needs data.path: the file with your prompts")
        file = Path(path).expanduser()
        rows = _parquet_rows(file, setting) if file.suffix == ".parquet" else _json_rows(file, setting)
        self.questions = [FORMATS[format](row, where) for row, where in rows]
        if not self.questions:
            raise DataError(f"{file}: the file has no prompts")

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]


def _json_rows(file: Path, setting: str) -> Iterator[Row]:
    try:
        text = regular_file(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(file, setting, error) from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{number}: not UTF-8 (byte {error.start}); convert it") from error
    # not splitlines: JSON strings may hold other Unicode line separators
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse(line, f"{file}:{number}"), f"{file}:{number}"


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
        yield row, f"{file}, row {number}"


def _unreadable(file: Path, setting: str, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{setting}: there is no file {file.absolute()}")
    return DataError(f"{setting}: cannot read {file}: {error.strerror or error}")


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
        raise DataError(f'{where}: expected an object like {{"prompt": "...", "answer": ...}}, got {_kind_of(row)}')
    return row


def plain(row: dict[str, Any], where: str) -> Question:
    """Read `prompt`, a string, and `answer`, any JSON value."""
    return Question(_text(row, where, "prompt"), _answer(row, where, "answer"), where)


def math(row: dict[str, Any], where: str) -> Question:
    """Read MATH-500, AIME 2024 and 2025: `problem` (or `question`) and `answer`; ask for \\boxed{}."""
    text = _text(row, where, "problem", "question", "Problem", "Question")
    return Question(text + _BOXED, _answer(row, where, "answer", "Answer"), where)


def gsm8k(row: dict[str, Any], where: str) -> Question:
    """Read GSM8K: `question`, and the number after #### in `answer`; ask for \\boxed{}."""
    _, mark, number = _text(row, where, "answer").rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise DataError(f"{where}: field 'answer' does not end with '#### <number>', as GSM8K's answers do")
    return Question(_text(row, where, "question") + _BOXED, number, where)


def humaneval(row: dict[str, Any], where: str) -> Question:
    """Read HumanEval: `prompt`, `test` and `entry_point`; the answer is for reward.kind = "code"."""
    tests = f"{_text(row, where, 'test')}\n\ncheck({_text(row, where, 'entry_point')})\n"
    return Question(_PROGRAM.format(_text(row, where, "prompt").rstrip()), {"tests": tests}, where)


FORMATS: dict[str, Callable[[dict[str, Any], str], Question]] = {
    "plain": plain,
    "math": math,
    "gsm8k": gsm8k,
    "humaneval": humaneval,
}
"""Formats by `data.format`."""


def _kind_of(value: Any) -> str:
    """Name a value's JSON type, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _field(row: dict[str, Any], where: str, *names: str) -> tuple[str, Any]:
    """Return name and value of the first field that is present."""
    for name in names:
        if name in row:
            return name, row[name]
    present = ", ".join(sorted(map(repr, row))) or "none"
    wanted = " or ".join(map(repr, names))
    raise DataError(f"{where}: field {wanted} is missing (fields: {present}); does data.format fit this file?")


def _text(row: dict[str, Any], where: str, *names: str) -> str:
    name, value = _field(row, where, *names)
    if not isinstance(value, str):
        raise DataError(f"{where}: field {name!r} must be a string, got {_kind_of(value)}")
    _check_json(value, f"{where}: field {name!r}")
    return value


def _answer(row: dict[str, Any], where: str, *names: str) -> Any:
    name, value = _field(row, where, *names)
    if value is None:
        raise DataError(f"{where}: field {name!r} must not be null")
    _check_json(value, f"{where}: field {name!r}")
    return value


def _check_json(value: Any, what: str) -> None:
    """Raise DataError unless a value can be written as UTF-8 JSON, here and by any process that gets it later."""
    try:
        if isinstance(value, str):
            value.encode()  # names the character in the text, not in its JSON
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        if _depth(value) <= _MAX_DEPTH:
            return
        problem = f"is nested more than {_MAX_DEPTH} levels deep"
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair, which no tokenizer takes
        problem = f"is not valid Unicode: {error.object[error.start]!a} at character {error.start}"
    except RecursionError:
        problem = f"is nested more than {_MAX_DEPTH} levels deep"
    except ValueError:  # Python reads NaN, Infinity and 1e400, which JSON lacks
        problem = "holds NaN or a number beyond the range of float64"
    except TypeError:
        problem = f"is not a JSON value but {type(value).__name__}"
    raise DataError(f"{what} {problem}; correct or remove it")


def _depth(value: Any) -> int:
    """Return how many lists and objects contain each other."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
    return depth
