"""Final answers of responses as text, by which majority voting groups responses, and the judges that compare texts.

Everything here takes time linear in the length, so nothing a model writes can hang it. The judges decide whether an
answer is right; for answers in plain text, this file finds them the way the judges do. See docs/evaluation.md.
"""

import hashlib
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from bapo_megatron.rewards import reasoning_gym
from bapo_megatron.rewards.stated import (
    MAX_CHARS,
    boxes,
    letter_of,
    measure_differently,
    said,
    single,
    spoken,
    stated_math,
    tagged,
    undecorated,
    without_words,
)

_MAX_KEPT_CHARS = 1024  # longer answers are shortened
_MAX_NUMBER_CHARS = 40
_LAST_RESULT = re.compile(r"=(\d),\Z")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_WRAPPED = re.compile(r"\\text\{([^{}]*)\}")
_SURROUNDINGS = " \t.,;:!?\"'`*_()[]“”‘’$"
_SAME = {"\\dfrac": "\\frac", "\\tfrac": "\\frac"} | dict.fromkeys(["\\left", "\\right", "\\!", "\\,", "\\$", "$"], "")


def judge_chain(answer: Any, response: str) -> float:
    """Return 1.0 if the response ends with "=<answer>,", or 0.0. Example: judge_chain("2", "3+5=1,1*2=2,") == 1.0."""
    return float(_last_result(answer, response) == _spelled(single(answer)))


def judge_text(answer: Any, response: str, in_thought: bool = False) -> float:
    """Return 1.0 if the response's final answer is the reference, ignoring case, blanks and surrounding punctuation.

    Thoughts are not read. The final answer is the first of these that exists: the last \\boxed{...}, the last
    <answer>...</answer>, the rest of the line after the last "answer is", "answer:" or "correct option is", the last
    line. If the reference is one letter, "B) Paris" counts as "B".
    Example: judge_text("Paris", "The answer is **Paris**.") == 1.0

    Args:
        in_thought: the prompt has opened a thought.
    """
    answer = single(answer)
    return float(_stated_text(answer, spoken(response, in_thought)) == _plain_text(_spelled(answer)))


def _stated_text(reference: Any, response: str) -> str | None:
    text = response[-MAX_CHARS:].strip()
    found: str | None
    if (boxed := boxes(text)) is not None:
        found = ", ".join(map(undecorated, boxed))
    elif (found := tagged(text)) is None and (found := said(text)) is None:
        found = text.rpartition("\n")[2]
    if len(_plain_text(_spelled(reference))) == 1 and (letter := letter_of(found)) is not None:
        return letter.casefold()
    return _plain_text(undecorated(found)) or _plain_text(found) or None


def _spelled(answer: Any) -> str:
    """Return a JSON value as text, with true and false spelled as in JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _plain_text(text: str) -> str:
    joined = " ".join(_WRAPPED.sub(r"\1", text).casefold().split())
    return joined.strip(_SURROUNDINGS) or joined


def _last_result(reference: Any, response: str) -> str | None:
    found = _LAST_RESULT.search(response)
    return found.group(1) if found else None


def _as_judged(reference: Any, response: str) -> str | None:
    """Return the text that the data set's scorer gets; numbers get one spelling, which all scorers read."""
    is_number = reasoning_gym.is_plain_number(reference["answer"])
    found = reasoning_gym.gym_answer(response, is_number=is_number)
    return _normalised(found) if found is not None and is_number else found


def _free_text(reference: Any, response: str) -> str | None:
    """Return the answer that the judge of mathematics reads, or the last number if none is stated.

    Words around a number, and its unit, count only if the judge takes them for another answer.
    """
    text, asked = response[-MAX_CHARS:], _spelled(single(reference))
    if found := stated_math(text):
        found = [one if measure_differently(asked, one) else without_words(one, asked) or one for one in found]
    else:
        found = [words] if (words := tagged(text)) is not None else _NUMBER.findall(text)[-1:]
    return ";".join(map(_normalised, found)) or None


def _normalised(answer: str) -> str:
    """Return one spelling for answers that differ in blanks, LaTeX without meaning, or the form of a decimal."""
    for spelling, plain in _SAME.items():
        answer = answer.replace(spelling, plain)
    answer = "".join(answer.split()).rstrip(".").casefold()
    number = answer.replace(",", "")
    if len(number) <= _MAX_NUMBER_CHARS and _DECIMAL.fullmatch(number):
        return str(Fraction(number))
    return answer


_BY_KIND: dict[str, Callable[[Any, str], str | None]] = {
    "chains": _last_result,
    "math": _free_text,
    "text": _stated_text,
    "reasoning_gym": _as_judged,
}


def has_answers(kind: str) -> bool:
    """Return whether responses have final answers: programs have none, and custom judges may read anything."""
    return kind in _BY_KIND


def final_answer(kind: str, reference: Any, response: str, in_thought: bool = False) -> str | None:
    """Return a response's final answer, or None. Example: final_answer("math", "1/2", "so \\boxed{0.50}") == "1/2"

    A long answer, such as a whole text without a marked answer, is shortened to its beginning and its digest.

    Args:
        kind: a judge for which `has_answers` is true.
        reference: the prompt's answer, as the judge gets it.
        response: any text.
        in_thought: the prompt has opened a thought.
    """
    found = _BY_KIND[kind](reference, response if kind == "chains" else spoken(response, in_thought))
    if found is None or len(found) <= _MAX_KEPT_CHARS:
        return found
    digest = hashlib.sha256(found.encode(errors="surrogatepass")).hexdigest()
    return f"{found[:100]}... ({len(found)} characters, sha256 {digest})"
