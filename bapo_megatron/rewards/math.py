"""Free-form mathematical answers, judged by math-verify (https://github.com/huggingface/Math-Verify)."""

import logging
import math
import re
from decimal import Decimal
from typing import Any

import math_verify
import sympy

from bapo_megatron.errors import UserError

MAX_RESPONSE_CHARS = 8192
"""A longer response is cut to its end: the final answer is there, and parsing time grows with length."""
_DECIMALS = 6  # must agree if one of two numbers is a decimal: math-verify's default
_DOLLAR = re.compile(r"(?<!\\)\\\$")  # an amount of money; math-verify takes its $ for one that opens a formula

# it warns on every call that its own timeout is off; RewardScorer sets the deadline
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge_math(answer: Any, response: str) -> float:
    """Return 1.0 if the response's final answer equals the reference, as expression or number; else 0.0.

    `answer` is a string (LaTeX or plain) or a number. The final answer is the content of \\boxed{}, else the last
    expression found. RewardScorer sets the deadline.

    Raises:
        UserError: the reference cannot be read, so that no response could be right.
    """
    gold = _reference(answer)
    found = _parse(_DOLLAR.sub("", response[-MAX_RESPONSE_CHARS:]))
    return float(bool(found) and math_verify.verify(gold, found, float_rounding=_decimals(gold), timeout_seconds=None))


def _reference(answer: Any) -> list[Any]:
    """Parse the reference in each spelling that math-verify reads differently."""
    gold = _parse_reference(_plain(answer))
    if not gold:
        raise UserError(
            f"reward.kind = 'math': math-verify finds no number or expression in the answer {answer!r:.200}, so no "
            "response could be right; correct the answer, leave its prompt out, or judge by a function of your own"
        )
    if isinstance(answer, float) and "e" in str(answer):
        for spelling in (str(answer), str(answer).replace("e+", "e")):  # a response may say 1e-07 or 1e16 too
            gold += _parse_reference(spelling)
    return gold


def _plain(answer: Any) -> str:
    """Spell an answer as text; math-verify reads 1e-05 as e - 5. Example: _plain(1e-05) == "0.00001"."""
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(str(answer)), "f")
    return _DOLLAR.sub("", str(answer)).strip()


def _parse_reference(answer: str) -> list[Any]:
    """Parse an answer as $...$ if need be: only there does math-verify read LaTeX such as x^2+1 as a whole."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return _parse(marked) or _parse(answer)


def _parse(text: str) -> list[Any]:
    """Return the expressions found; none if they break the parser."""
    try:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    except MemoryError:  # says nothing about the text: the judge process may be at its limit
        raise
    except Exception:
        return []


def _decimals(gold: list[Any]) -> int:
    """Return math-verify's number of decimals, or more for tiny numbers: 1e-7 and 2e-7 must differ."""
    size = abs(float(gold[0])) if isinstance(gold[0], sympy.Float) else 0.0
    return _DECIMALS - 1 - math.floor(math.log10(size)) if 0 < size < 10**-_DECIMALS else _DECIMALS
