"""Rows of well-known data sets as questions, by `data.format`.

Each of `FORMATS` maps a row and its place in a file to a `Question`, or raises DataError naming place and field.
"""

import json
from collections.abc import Callable
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Question

_MAX_DEPTH = 100  # Python's own limit depends on the caller
_BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
_PROGRAM = (
    "Complete this Python function. Answer with one ```python block that holds the whole program, with its imports."
    "\n\n```python\n{}\n```"
)


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


def kind_of(value: Any) -> str:
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
        raise DataError(f"{where}: field {name!r} must be a string, got {kind_of(value)}")
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
