"""Free-form mathematical answers, judged by math-verify (https://github.com/huggingface/Math-Verify).

response -> its answer (`stated`) -> a number without words -> math-verify -> units, bases and tiny numbers compared
"""

import logging
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import math_verify
import sympy

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.stated import (
    DOLLAR,
    MAX_CHARS,
    letter_of,
    measure_differently,
    misfit,
    said,
    single,
    spoken,
    stated_math,
    without_words,
)

_DECIMALS = 6  # must agree if one of two numbers is a decimal: math-verify's default
_TINY = 10**-_DECIMALS
_DIGITS = 20  # of values that are compared relative to each other
_QUOTIENT = re.compile(r"(?:/|frac)(?!.*[/{]1\}?$)")  # a division by anything but 1
_MARKUP = re.compile(r"[`\"“”„]|(?<![\w)}])[*_]+(?=\S)|(?<=\S)[*_]+(?![\w({\\])|</?(?:b|i|u|em|strong|code|pre|p|br)>")

# math-verify warns on every call that its own timeout is off; RewardScorer sets the deadline
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge_math(answer: Any, response: str, in_thought: bool = False) -> float:
    """Return 1.0 if the response's final answer equals the reference, as an expression or a number, and 0.0 if not.

    `answer` is a string (LaTeX or plain), a number, or a list of one. The final answer is what `stated_math` finds, or
    the last expression. If the reference is a number, an unevaluated calculation is wrong, because 1 + 7 may be the
    question. RewardScorer sets the deadline. Example: judge_math(8, "1 + 7") == 0.0

    Args:
        in_thought: the prompt has opened a thought.

    Raises:
        UserError: the reference cannot be parsed, or is not one answer, so no response could be right.
    """
    answer = single(answer)
    if problem := misfit(answer):
        raise UserError(f"reward.kind = 'math': {problem}")
    gold, reference = _reference(answer), _plain(answer)
    text = spoken(response, in_thought)[-MAX_CHARS:]
    stated = stated_math(text)
    letter = letter_of(reference)
    if letter is not None and letter.isupper():
        last = stated if stated is not None else [said(text) or text.strip().rpartition("\n")[2]]
        chosen = [letter_of(one) for one in last]
        if None not in chosen:
            return float(chosen == [letter])
    if stated is None:
        found = _parse(DOLLAR.sub("", _MARKUP.sub(" ", text)))
    else:
        found = _parse(_as_latex([without_words(one, reference) for one in stated]))
        if len(stated) == 1 and measure_differently(reference, stated[0]):
            return 0.0
    if not found or _only_repeats(gold, found):
        return 0.0
    is_equal = math_verify.verify(gold, found, float_rounding=_decimals(gold), timeout_seconds=None)
    return float(is_equal and not _differ_by_size(gold[0], found[0]))


def _as_latex(parts: list[str]) -> str:
    """Return an answer in the form that math-verify reads as a whole; nothing unless each part holds something."""
    if not all(parts):
        return ""
    return f"\\boxed{{{parts[0]}}}" if len(parts) == 1 else " and ".join(f"$\\boxed{{{one}}}$" for one in parts)


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
    return DOLLAR.sub("", str(answer)).strip()


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
    smallest = min((abs(value) for value in _values(gold[0]) if 0 < abs(value) < _TINY), default=None)
    return _DECIMALS if smallest is None else _DECIMALS - 1 - int(sympy.floor(sympy.log(smallest, 10)))


def _differ_by_size(gold: Any, found: Any) -> bool:
    """Return whether tiny numbers differ that math-verify takes for equal: to it, a difference below 1e-15 is 0."""
    values = sorted(_values(gold)), sorted(_values(found))
    if len(values[0]) != len(values[1]):
        return False
    pairs = [(abs(one - other), max(abs(one), abs(other))) for one, other in zip(*values, strict=True)]
    return any(0 < size < _TINY and distance > _TINY * size for distance, size in pairs)


def _values(expression: Any) -> Iterator[sympy.Float]:
    """Yield the real values in a number, an equation's right side, a set, a pair or a matrix; unknowns are 1.7."""
    if isinstance(expression, sympy.Equality):
        yield from _values(expression.rhs)
    elif isinstance(expression, sympy.Interval):
        yield from (value for end in (expression.start, expression.end) for value in _values(end))
    elif isinstance(expression, sympy.Tuple | sympy.FiniteSet | sympy.MatrixBase):
        parts = expression.flat() if isinstance(expression, sympy.MatrixBase) else expression.args
        yield from (value for part in parts for value in _values(part))
    elif isinstance(expression, sympy.Expr):
        known = dict.fromkeys(expression.free_symbols, sympy.Rational(17, 10))
        value = sympy.N(expression.subs(known), _DIGITS)
        if isinstance(value, sympy.Float) and value.is_finite:
            yield value
