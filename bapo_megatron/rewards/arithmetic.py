"""Exact arithmetic on an expression in text, in bounded time."""

import ast
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

MAX_CHARS = 1000
MAX_BITS = 10_000  # in a numerator or denominator
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def worked_out(expression: str) -> Fraction:
    """Return the value of an expression of numbers, parentheses and + - * / // % ** (or ^).

    Raises:
        ValueError: says which part cannot be worked out.
        ZeroDivisionError: a division by zero.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters, not {len(expression)}")
    source = expression.strip().replace("^", "**")
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from None
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _number(ast.get_source_segment(source, node) or "")
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, source)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, source)
        case ast.BinOp(op=ast.Pow()):
            return _bounded(_power(_value(node.left, source), _value(node.right, source)))
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(node.op)](_value(node.left, source), _value(node.right, source))))
    part = ast.get_source_segment(source, node) or source
    raise ValueError(f"only numbers, parentheses and + - * / // % ** can be worked out, not {part[:80]!r}")


def _number(text: str) -> Fraction:
    try:
        number = Decimal(text)
    except ArithmeticError:  # 0x1F
        return _bounded(Fraction(int(text, 0)))
    if abs(number.adjusted()) > MAX_BITS:
        raise _too_large()
    return _bounded(Fraction(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"an exponent is a whole number, not {exponent}")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent.numerator) > MAX_BITS:  # the power has more bits than this
        raise _too_large()
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ValueError:
    return ValueError(f"a number has more than {MAX_BITS} bits")


def shown(value: Fraction) -> str:
    """Return a whole number, a decimal if it is exact, or else a fraction and about how much it is."""
    numerator, denominator = value.numerator, value.denominator
    if denominator == 1:
        return str(numerator)
    num_twos, rest = _divided(denominator, 2)
    num_fives, rest = _divided(rest, 5)
    if rest > 1:
        return f"{numerator}/{denominator} (about {Decimal(numerator) / Decimal(denominator):.10g})"
    num_digits = max(num_twos, num_fives)
    digits = str(abs(numerator) * 10**num_digits // denominator).rjust(num_digits + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-num_digits]}.{digits[-num_digits:]}"


def _divided(number: int, prime: int) -> tuple[int, int]:
    """Return how often a prime divides a number, and what is left."""
    times = 0
    while number % prime == 0:
        number, times = number // prime, times + 1
    return times, number
