"""A judge: the right number earns 1, or 0.5 if the response is longer than 200 characters."""

from __future__ import annotations

import re


def judge(answer: object, response: str) -> float:
    """Compare the last number of a response with the answer."""
    numbers = re.findall(r"-?\d+", response)
    is_right = bool(numbers) and numbers[-1] == str(answer)
    return is_right * (1.0 if len(response) <= 200 else 0.5)
