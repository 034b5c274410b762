"""JSON from outside, checked where it enters: rows of data, requests of agent programs, calls that the policy writes.

What passes can be compared, shown in a chat template and written again, by any process. Worker processes import this
file too.
"""

import json
import math
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 100  # Python's own limit depends on the caller
_MAX_DIGITS = 1000  # in a number of a text
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"


class KeyTwiceError(ValueError):
    """A key that an object has twice."""


def read_json(text: str) -> Any:
    """Return the value of a text that a program or a policy wrote. Raises like `read_json_at`."""
    value, end = read_json_at(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and the place after it. Line breaks in strings are read too.

    Raises:
        json.JSONDecodeError: it is not JSON.
        ValueError: it has what JSON lacks, or a `json_problem`; says so about "it".
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"it {_TOO_DEEP}") from None
    if problem := json_problem(value):
        raise ValueError(f"it {problem}")
    return value, end


def json_problem(value: Any) -> str | None:
    """Return why a value cannot be written as JSON in UTF-8, here and by any process that gets it later, or None.

    Example: "is nested more than 100 levels deep"
    """
    try:
        if isinstance(value, str):
            value.encode()  # names the character in the text, not in its JSON
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return None if depth(value) <= MAX_DEPTH else _TOO_DEEP
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair, which no tokenizer accepts
        return f"is not valid Unicode: {error.object[error.start]!a} at character {error.start}"
    except RecursionError:
        return _TOO_DEEP
    except ValueError:  # Python reads NaN, Infinity and 1e400, which JSON lacks
        return "holds NaN or a number beyond the range of float64"
    except TypeError:
        return f"is not a JSON value but {type(value).__name__}"


def depth(value: Any) -> int:
    """Return how many levels deep lists and objects are nested."""
    num_levels, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list | tuple)]:
        num_levels += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
    return num_levels


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raises KeyTwiceError."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise KeyTwiceError(f"the key {twice!r:.60} is twice in one object, and only one value can count; remove one")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, more than {_MAX_DIGITS}")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is too large for a number")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"it has {text}")


_DECODER = json.JSONDecoder(
    strict=False, parse_int=_integer, parse_float=_float, parse_constant=_constant, object_pairs_hook=without_twins
)
