"""The final answer of a response as text: what responses are grouped by when the majority counts.

Plain text only, in time linear in the length: whatever a model wrote, nothing here can hang. Whether an answer is right
is the judge's business; see docs/evaluation.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_MAX_CHARS = 8192  # of a response, from its end: as in `judge_math`
_MAX_NUMBER_CHARS = 40
_BOXED = "\\boxed{"
_CHAIN = re.compile(r"=(\d),\Z")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_SAME = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\left": "", "\\right": "", "\\!": "", "\\,": "", "$": ""}


def _chain(response: str) -> str | None:
    found = _CHAIN.search(response)
    return found.group(1) if found else None


def _free_text(response: str) -> str | None:
    """The last \\boxed{...}, else the last <answer>...</answer>, else the last number."""
    text = response[-_MAX_CHARS:]
    found = _last_boxed(text)
    if found is None and (tagged := _TAGGED.findall(text)):
        found = tagged[-1]
    if found is None and (numbers := _NUMBER.findall(text)):
        found = numbers[-1]
    return _normalised(found) or None if found is not None else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None  # cut off


def _normalised(answer: str) -> str:
    """One spelling for answers that differ in blanks, in LaTeX without meaning, or in how a decimal is written."""
    for spelling, plain in _SAME.items():
        answer = answer.replace(spelling, plain)
    answer = "".join(answer.split()).rstrip(".").casefold()
    number = answer.replace(",", "")
    if len(number) <= _MAX_NUMBER_CHARS and _DECIMAL.fullmatch(number):
        return str(Fraction(number))
    return answer


_BY_KIND: dict[str, Callable[[str], str | None]] = {
    "chains": _chain,
    "math": _free_text,
    "reasoning_gym": _free_text,
}


def has_answers(kind: str) -> bool:
    """Whether what this judge judges has a final answer: programs have none, and of judges of yours we cannot know."""
    return kind in _BY_KIND


def final_answer(kind: str, response: str) -> str | None:
    """None where there is none. Example: final_answer("math", "so \\boxed{0.50}") == "1/2"

    Args:
        kind: of the judge, with `has_answers`.
        response: any text.
    """
    return _BY_KIND[kind](response)
