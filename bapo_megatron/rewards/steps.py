"""Built-in environments: a calculator, and a number to be guessed. environments.py says what a step returns."""

import re
from typing import Any

_CALL = re.compile(r"(\d{1,9}) ?([-+*]) ?(\d{1,9}) ?\?\Z")
_RESULT = re.compile(r"(-?\d+)\.?\s*\Z")
_GUESS = re.compile(r"(\d{1,9})\?\Z")


async def calculator(turn: dict[str, Any], state: Any, *, cost: float = 0.0, is_broken: bool = False) -> dict[str, Any]:
    """Answer a turn that ends in a call such as "12*34?" with "408;", or "!" if it cannot be read.

    Any other turn ends the sample: its last number is the result, which earns 1 if it is the prompt's answer.

    Args:
        cost: what each call costs.
        is_broken: answer every call with "!".
    """
    num_calls = turn["number"] - 1
    if turn["end"] == "stop" and turn["text"].endswith("?"):
        call = None if is_broken else _CALL.search(turn["text"])
        return {"text": "!" if call is None else f"{_worked_out(int(call[1]), call[2], int(call[3]))};"}
    found = _RESULT.search(turn["text"]) if turn["end"] == "stop" else None
    is_right = found is not None and found[1] == str(turn["answer"])
    return {"reward": float(is_right) - cost * num_calls}


def _worked_out(left: int, operator: str, right: int) -> int:
    return left * right if operator == "*" else left + right if operator == "+" else left - right


async def guess(turn: dict[str, Any], state: Any, *, max_guesses: int = 3, is_silent: bool = False) -> dict[str, Any]:
    """Answer a guess such as "5?" with "<" if the prompt's answer, a number, is smaller, or ">" if it is larger.

    A right guess earns 1. The last wrong guess, and any other turn, ends the sample with 0.

    Args:
        max_guesses: guesses that a sample has.
        is_silent: answer every wrong guess with "!".
    """
    found = _GUESS.search(turn["text"]) if turn["end"] == "stop" else None
    guessed, secret = int(found[1]) if found else None, int(turn["answer"])
    if guessed is None or guessed == secret or turn["number"] >= max_guesses:
        return {"reward": float(guessed == secret)}
    return {"text": "!" if is_silent else "<" if secret < guessed else ">"}
