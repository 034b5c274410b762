"""A reward for short calculations: the last number of the response is the answer."""

import re


def last_number(answer: str, response: str) -> float:
    """Return 1 for the right last number, 0.1 for another one, 0 for none."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == int(answer) else 0.1
