"""Judge of the demo task: is the last written result the answer?"""

from __future__ import annotations

import re

_LAST_RESULT = re.compile(r"=(\d),\Z")


def judge_chain(answer: str, response: str) -> float:
    """1.0 if the response ends with "=<answer>,", else 0.0. Example: judge_chain("2", "3+5=1,1*2=2,") == 1.0."""
    found = _LAST_RESULT.search(response)
    return float(found is not None and found.group(1) == answer)
