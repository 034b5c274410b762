"""Results of an evaluation: responses by problem, estimates with intervals, and their tables."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from bapo_megatron.errors import plural
from bapo_megatron.estimates import bootstrap, majority_at_k, pass_at_k, powers_up_to, wilson_interval

_PASSES = 1.0  # the lowest reward of a response that passes
_MAX_TABLE_ROWS = 40
_MAX_PROMPT_CHARS = 60


@dataclass(frozen=True, slots=True)
class Answered:
    """One response and its verdict."""

    reward: float
    answer: str | None  # final answer, if any
    num_tokens: int
    is_truncated: bool
    problem: str | None  # the verifier's "timeout" or "error", which counts as wrong

    @property
    def passes(self) -> bool:
        return self.reward >= _PASSES


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and all responses to it."""

    index: int  # index in the source, from 0
    prompt: str
    reference: Any
    responses: tuple[Answered, ...]

    @property
    def num_passed(self) -> int:
        return sum(r.passes for r in self.responses)

    @property
    def wrong_counts(self) -> list[int]:
        """The number of responses with each wrong answer. All passing responses share one answer, the reference."""
        return sorted(Counter(r.answer for r in self.responses if not r.passes and r.answer is not None).values())

    @property
    def num_abstained(self) -> int:
        return sum(not r.passes and r.answer is None for r in self.responses)

    def count(self, problem: str) -> int:
        return sum(r.problem == problem for r in self.responses)

    def estimates(self, *, has_answers: bool) -> dict[str, float]:
        """Compute this problem's share of each estimate, a mean over problems."""
        num = len(self.responses)
        values = {f"avg@{num}": fmean([r.reward for r in self.responses])}
        values |= {f"pass@{k}": pass_at_k(num, self.num_passed, k) for k in powers_up_to(num)}
        if has_answers:
            ks = powers_up_to(num)
            majority = majority_at_k(self.num_passed, self.wrong_counts, self.num_abstained, ks)
            values |= {f"maj@{k}": value for k, value in zip(ks, majority, strict=True)}
        return values | {
            "response_tokens": fmean([r.num_tokens for r in self.responses]),
            "truncated_share": fmean([r.is_truncated for r in self.responses]),
        }

    def to_json(self, estimates: Mapping[str, float]) -> dict[str, Any]:
        return {
            "index": self.index,
            "prompt": self.prompt,
            "reference": self.reference,
            **estimates,
            "rewards": [r.reward for r in self.responses],
            "answers": [r.answer for r in self.responses],
            "num_tokens": [r.num_tokens for r in self.responses],
            "truncated": [r.is_truncated for r in self.responses],
            "verifier_problems": [r.problem for r in self.responses],
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its interval; nan if unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """All problems of one evaluation, in the source's order, each with equally many responses."""

    facts: dict[str, Any]  # checkpoint, data and settings, as JSON values
    problems: tuple[Problem, ...]
    has_answers: bool  # whether responses have a final answer, so that a majority can agree on one
    seed: int  # seed of the resampling

    @cached_property
    def estimates_by_problem(self) -> list[dict[str, float]]:
        """Each problem's share of each estimate."""
        return [p.estimates(has_answers=self.has_answers) for p in self.problems]

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates by name: avg@n, pass@k, maj@k, response_tokens, truncated_share; 95 % intervals over problems."""
        rows = self.estimates_by_problem
        values_PM = np.array([list(row.values()) for row in rows], dtype=np.float64)
        columns = zip(rows[0], values_PM.mean(0), *bootstrap(values_PM, seed=self.seed), strict=True)
        return {name: self._estimate(name, float(value), float(low), float(high)) for name, value, low, high in columns}

    def _estimate(self, name: str, value: float, low: float, high: float) -> Estimate:
        """Return the estimate, with Wilson's interval if all are right, or all wrong: resamples are then the same."""
        is_share = name != "response_tokens" and (not name.startswith("avg@") or self._rewards_are_0_or_1)
        if is_share and low == high and value in (0.0, 1.0):
            low, high = wilson_interval(value, len(self.problems))
        return Estimate(value, low, high)

    @cached_property
    def _rewards_are_0_or_1(self) -> bool:
        return all(response.reward in (0.0, 1.0) for problem in self.problems for response in problem.responses)

    def count(self, problem: str) -> int:
        """Count the responses whose verifier ended in a "timeout" or an "error"."""
        return sum(p.count(problem) for p in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value of result.json; an unknown interval is null."""
        return {
            **self.facts,
            "num_problems": len(self.problems),
            "verifier_timeouts": self.count("timeout"),
            "verifier_errors": self.count("error"),
            "estimates": {
                name: {"value": e.value, "low": _or_none(e.low), "high": _or_none(e.high)}
                for name, e in self.estimates.items()
            },
            "problems": [p.to_json(row) for p, row in zip(self.problems, self.estimates_by_problem, strict=True)],
        }

    def table(self) -> str:
        """Format the estimates and the problems, hardest first, for the console."""
        num = len(self.problems[0].responses)
        lines = [f"{plural(len(self.problems), 'problem')}, {plural(num, 'response')} to each", ""]
        lines.append(f"{'':<18}{'estimate':>10}   95 % interval")
        for name, e in self.estimates.items():
            digits = 1 if name == "response_tokens" else 3
            interval = "-" if math.isnan(e.low) else f"[{e.low:.{digits}f}, {e.high:.{digits}f}]"
            lines.append(f"{name:<18}{e.value:>10.{digits}f}   {interval}")
        timeouts, errors = self.count("timeout"), self.count("error")
        if timeouts or errors:
            lines += [
                "",
                f"counted as wrong: {plural(timeouts, 'verifier timeout')}, {plural(errors, 'verifier error')}",
            ]
        return "\n".join([*lines, "", *self._problem_lines()])

    def _problem_lines(self) -> list[str]:
        hardest = sorted(self.problems, key=lambda p: (p.num_passed, p.index))
        lines = [f"{'problem':>7} {'passed':>8} {'tokens':>8} {'cut':>5}  prompt"]
        for p in hardest[:_MAX_TABLE_ROWS]:
            tokens, cut = fmean([r.num_tokens for r in p.responses]), sum(r.is_truncated for r in p.responses)
            passed = f"{p.num_passed}/{len(p.responses)}"
            lines.append(f"{p.index:>7} {passed:>8} {tokens:>8.1f} {cut:>5}  {_shortened(p.prompt)}")
        if len(hardest) > _MAX_TABLE_ROWS:
            lines.append(f"... and {len(hardest) - _MAX_TABLE_ROWS} more in result.json")
        return lines


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PROMPT_CHARS else f"{line[: _MAX_PROMPT_CHARS - 1]}…"
