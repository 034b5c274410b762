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
_DOLLAR = re.compile(r"(?<!\\)\\\$")  # an amount of money; math-verify would take its $ for the start of a formula
_QUOTIENT = re.compile(r"(?:/|frac)(?!.*[/{]1\}?$)")  # a division by anything but 1

# math-verify warns on every call that its own timeout is off; RewardScorer sets the deadline
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge_math(answer: Any, response: str) -> float:
    """Return 1.0 if the response's final answer equals the reference, as an expression or a number, and 0.0 if not.

    `answer` is a string (LaTeX or plain) or a number. The final answer is the content of \\boxed{}, or the last
    expression without one. If the reference is a number, an unevaluated calculation is wrong, because 1 + 7 may be
    the question. RewardScorer sets the deadline. Example: judge_math(8, "1 + 7") == 0.0

    Raises:
        UserError: the reference cannot be parsed, so no response could be right.
    """
    gold = _reference(answer)
    found = _parse(_DOLLAR.sub("", response[-MAX_RESPONSE_CHARS:]))
    if not found or _only_repeats(gold, found):
        return 0.0
    return float(math_verify.verify(gold, found, float_rounding=_decimals(gold), timeout_seconds=None))


def _only_repeats(gold: list[Any], found: list[Any]) -> bool:
    """Return whether the reference is a number but the answer is a calculation, such as 1 + 7."""
    reference, first = gold[0], found[0]
    if not isinstance(reference, sympy.Basic) or not reference.is_number or _is_calculation(reference):
        return False
    if str(found[-1]) in map(str, gold):  # spelled like the reference, such as 1e-05
        return False
    if isinstance(first, sympy.Equality):
        return all(map(_is_calculation, first.args))
    is_quotient = isinstance(reference, sympy.Integer) and _QUOTIENT.search(str(found[-1])) is not None
    return isinstance(first, sympy.Basic) and (is_quotient or _is_calculation(first))


def _is_calculation(expression: Any) -> bool:
    """Return whether numbers remain to be added, multiplied or raised. 3/4 and 1.2 \\times 10^3 are numbers."""
    return any(_is_operation(node) for node in sympy.preorder_traversal(expression))


def _is_operation(node: Any) -> bool:
    if isinstance(node, sympy.Mul):
        return sum(isinstance(factor, sympy.Number) and factor != -1 for factor in node.args) > 1
    if isinstance(node, sympy.Pow):
        is_literal = node.exp == -1 or (node.base == 10 and node.exp.is_Integer)
        return bool(node.is_number and not is_literal)
    return isinstance(node, sympy.Add | sympy.Function) and bool(node.is_number)


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
    """Parse an answer, within $...$ if need be: only there does math-verify read x^2+1 as one expression."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return _parse(marked) or _parse(answer)


def _parse(text: str) -> list[Any]:
    """Return the expressions found, or nothing if the text breaks the parser."""
    try:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    except MemoryError:  # says nothing about the text: the judge process may be at its limit
        raise
    except Exception:
        return []


def _decimals(gold: list[Any]) -> int:
    """Return math-verify's default precision, or more decimals for tiny numbers: 1e-7 and 2e-7 must differ."""
    size = abs(float(gold[0])) if isinstance(gold[0], sympy.Float) else 0.0
    return _DECIMALS - 1 - math.floor(math.log10(size)) if 0 < size < 10**-_DECIMALS else _DECIMALS
