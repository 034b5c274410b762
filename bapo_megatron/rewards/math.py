"""Free-form mathematical answers, judged by math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import logging
from typing import Any

import math_verify

MAX_RESPONSE_CHARS = 8192
"""Only the end of a longer response is read: the final answer is there, and parsing time grows with length."""

# it warns on every call that its own timeout is off; the deadline of a judgement is RewardScorer's
logging.getLogger("math_verify").setLevel(logging.ERROR)


def judge_math(answer: Any, response: str) -> float:
    """1.0 if the response's final answer equals the reference, as expression or number; else 0.0.

    `answer` is a string (LaTeX or plain) or a number. The final answer is the content of \\boxed{} where there is one,
    else the last expression found. Has no deadline of its own: see RewardScorer.
    """
    gold = _parse_reference(str(answer).strip())
    found = math_verify.parse(response[-MAX_RESPONSE_CHARS:], parsing_timeout=None)
    return float(bool(gold and found) and math_verify.verify(gold, found, timeout_seconds=None))


def _parse_reference(answer: str) -> list[Any]:
    """Plain LaTeX such as x^2+1 is only read as a whole inside $...$."""
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    return math_verify.parse(marked, parsing_timeout=None) or math_verify.parse(answer, parsing_timeout=None)
