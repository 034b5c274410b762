"""The final answer of a response as text: what responses are grouped by when the majority counts.

Plain text only, in time linear in the length: whatever a model wrote, nothing here can hang. Whether an answer is right
is the judge's business; where its own way to find the answer is of this kind, it is used here. See docs/evaluation.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from bapo_megatron.rewards import reasoning_gym

_MAX_CHARS = 8192  # of a response, from its end: as in `judge_math`
_MAX_KEPT_CHARS = 1024  # of an answer
_MAX_NUMBER_CHARS = 40
_BOXED = "\\boxed{"
_CHAIN = re.compile(r"=(\d),\Z")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_SAME = {"\\dfrac": "\\frac", "\\tfrac": "\\frac"} | dict.fromkeys(["\\left", "\\right", "\\!", "\\,", "\\$", "$"], "")


def _chain(reference: Any, response: str) -> str | None:
    found = _CHAIN.search(response)
    return found.group(1) if found else None


def _as_judged(reference: Any, response: str) -> str | None:
    """What the data set's scorer gets; a number in one spelling, as all scorers read it."""
    is_number = reasoning_gym.is_plain_number(reference["answer"])
    found = reasoning_gym.final_answer(response, is_number=is_number)
    return _normalised(found) if found is not None and is_number else found


def _free_text(reference: Any, response: str) -> str | None:
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


_BY_KIND: dict[str, Callable[[Any, str], str | None]] = {
    "chains": _chain,
    "math": _free_text,
    "reasoning_gym": _as_judged,
}


def has_answers(kind: str) -> bool:
    """Whether what this judge judges has a final answer: programs have none, and of judges of yours we cannot know."""
    return kind in _BY_KIND


def final_answer(kind: str, reference: Any, response: str) -> str | None:
    """None where there is none. Example: final_answer("math", "1/2", "so \\boxed{0.50}") == "1/2"

    A long answer is its beginning and its digest: of a text without an answer marked, all of it is the answer.

    Args:
        kind: of the judge, with `has_answers`.
        reference: the prompt's answer, as the judge gets it.
        response: any text.
    """
    found = _BY_KIND[kind](reference, response)
    if found is None or len(found) <= _MAX_KEPT_CHARS:
        return found
    digest = hashlib.sha256(found.encode(errors="surrogatepass")).hexdigest()
    return f"{found[:100]}... ({len(found)} characters, sha256 {digest})"
