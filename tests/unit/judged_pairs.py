"""Answers, responses and the verdicts that a careful reader gives, and how often two judges err on them.

judged_pairs.jsonl was written before the rules that read the answer out of a response.

python -m tests.unit.judged_pairs          prints the errors of reward.kind = "math", and of math-verify by itself
"""

import inspect
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import math_verify

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.math import judge_math


@dataclass(frozen=True)
class Pair:
    """A line of the file."""

    kind: str
    answer: Any
    response: str
    verdict: int  # 1: the response gives the answer
    prompt_opens_thought: bool = False


PAIRS = [
    Pair(**json.loads(line)) for line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
]
Verdict = Callable[[Pair], float]


def ours(pair: Pair) -> float:
    """Judge as a run does; nan if it refuses the answer, a list."""
    facts = (
        {"in_thought": pair.prompt_opens_thought} if "in_thought" in inspect.signature(judge_math).parameters else {}
    )
    try:
        return judge_math(pair.answer, pair.response, **facts)
    except UserError:
        return math.nan


def plain(pair: Pair) -> float:
    """Judge by math-verify alone, with its default settings and no deadline."""
    gold = pair.answer if isinstance(pair.answer, str) else json.dumps(pair.answer)
    marked = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    parsed = [math_verify.parse(text, parsing_timeout=None) for text in (marked, pair.response)]
    return float(math_verify.verify(*parsed, timeout_seconds=None))


def errors(judge: Verdict) -> tuple[list[Pair], list[Pair]]:
    """Return the right answers that get no 1, and the wrong ones that do."""
    rewards = [judge(pair) for pair in PAIRS]
    wrong = [p for p, r in zip(PAIRS, rewards, strict=True) if not math.isnan(r) and (r == 1.0) != (p.verdict == 1)]
    return [pair for pair in wrong if pair.verdict], [pair for pair in wrong if not pair.verdict]


if __name__ == "__main__":
    logging.disable()
    print(f"{len(PAIRS)} pairs, {sum(pair.verdict for pair in PAIRS)} of them right")
    for name, judge in (("ours", ours), ("math-verify", plain)):
        negatives, positives = errors(judge)
        print(f"{name}: {len(negatives)} false negatives, {len(positives)} false positives")
        for mark, pairs in (("FN", negatives), ("FP", positives)) if name == "ours" else ():
            print(*(f"  {mark} {pair.kind}: {pair.answer!r} <- {pair.response!r}" for pair in pairs), sep="\n")
