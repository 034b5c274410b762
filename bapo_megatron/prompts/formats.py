"""Rows of well-known data sets as questions, by `data.format`.

Each of `FORMATS` maps a row and its place in a file to a `Question`, or raises DataError naming place and field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import Question

_BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
_PROGRAM = (
    "Complete this Python function. Answer with one ```python block that holds the whole program, with its imports."
    "\n\n```python\n{}\n```"
)


def plain(row: dict[str, Any], where: str) -> Question:
    """`prompt` as it is, and `answer`, any JSON value."""
    return Question(_text(row, where, "prompt"), _answer(row, where, "answer"), where)


def math(row: dict[str, Any], where: str) -> Question:
    """MATH-500, AIME 2024 and 2025: `problem` (or `question`) and `answer`; asks for the answer in \\boxed{}."""
    text = _text(row, where, "problem", "question", "Problem", "Question")
    return Question(text + _BOXED, _answer(row, where, "answer", "Answer"), where)


def gsm8k(row: dict[str, Any], where: str) -> Question:
    """`question`, and `answer`, of which the number after #### counts; asks for the answer in \\boxed{}."""
    _, mark, number = _text(row, where, "answer").rpartition("####")
    number = number.strip().replace(",", "")
    if not mark or not number:
        raise DataError(f"{where}: field 'answer' has no '#### <number>' at its end, as GSM8K's answers have")
    return Question(_text(row, where, "question") + _BOXED, number, where)


def humaneval(row: dict[str, Any], where: str) -> Question:
    """HumanEval: `prompt`, `test`, `entry_point`; the answer is what reward.kind = "code" runs."""
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
    """What JSON calls a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _field(row: dict[str, Any], where: str, *names: str) -> tuple[str, Any]:
    """The first of the fields that there is, with its name."""
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
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair, which no tokenizer takes
        what = f"{value[error.start]!a} at character {error.start}"
        raise DataError(f"{where}: field {name!r} is not valid Unicode: {what}; mend or remove it") from None
    return value


def _answer(row: dict[str, Any], where: str, *names: str) -> Any:
    name, value = _field(row, where, *names)
    if value is None:
        raise DataError(f"{where}: field {name!r} must not be null")
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: field {name!r} is no JSON value but {type(value).__name__}") from None
    return value
