"""Results of an evaluation: responses by problem, estimates with intervals, and their tables."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from bapo_megatron.errors import UserError, plural
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
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name

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

    def estimates(self, *, has_answers: bool, parts: Sequence[str] = ()) -> dict[str, float]:
        """Compute this problem's share of each estimate, a mean over problems. A missing part counts as 0."""
        num = len(self.responses)
        values = {f"avg@{num}": fmean([r.reward for r in self.responses])}
        values |= {f"reward/{name}": fmean([r.parts.get(name, 0.0) for r in self.responses]) for name in parts}
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
            **({"parts": [dict(r.parts) for r in self.responses]} if any(r.parts for r in self.responses) else {}),
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
        parts = [*dict.fromkeys(name for p in self.problems for r in p.responses for name in r.parts)]
        return [p.estimates(has_answers=self.has_answers, parts=parts) for p in self.problems]

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates by name (see `Problem.estimates`), with 95 % intervals over problems."""
        rows = self.estimates_by_problem
        values_PM = np.array([list(row.values()) for row in rows], dtype=np.float64)
        columns = zip(rows[0], values_PM.mean(0), *bootstrap(values_PM, seed=self.seed), strict=True)
        return {name: self._estimate(name, float(value), float(low), float(high)) for name, value, low, high in columns}

    def _estimate(self, name: str, value: float, low: float, high: float) -> Estimate:
        """Return the estimate, with Wilson's interval if all are right, or all wrong: resamples are then the same."""
        responses = [response for problem in self.problems for response in problem.responses]
        values = [r.reward for r in responses] if name.startswith("avg@") else []
        if name.startswith("reward/"):
            values = [r.parts.get(name.removeprefix("reward/"), 0.0) for r in responses]
        is_share = name != "response_tokens" and {*values} <= {0.0, 1.0}
        if is_share and low == high and value in (0.0, 1.0):
            low, high = wilson_interval(value, len(self.problems))
        return Estimate(value, low, high)

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


_ASKED = ("data", "format", "judge", "samples_per_problem", "temperature", "top_p", "top_k", "max_response_tokens")


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Compare two evaluations by problem, with 95 % intervals of the mean difference: a table for the console.

    The same problems are hard for both, so their differences vary less than either evaluation does.

    Args:
        before, after: JSON values like `Evaluation.to_json`.

    Raises:
        UserError: they have no problem or no estimate in common.
    """
    first, second = _by_question(before), _by_question(after)
    both = [question for question in first if question in second]
    rows = [(first[question], second[question]) for question in both]
    names = [name for name in rows[0][0] if name in rows[0][1]] if rows else []
    if not names:
        raise UserError("the evaluations have no problem in common: evaluate both on the same --data")
    values_2PM = np.array([[[row[i][name] for name in names] for row in rows] for i in (0, 1)], dtype=np.float64)
    difference_PM = values_2PM[1] - values_2PM[0]
    lines = [f"{plural(len(both), 'problem')} of both evaluations (of {len(first)} and {len(second)})", ""]
    lines.append(f"{'':<18}{'before':>10}{'after':>10}{'difference':>12}   95 % interval      better/worse problems")
    for name, was, now, values, low, high in zip(
        names, *values_2PM.mean(1), difference_PM.T, *bootstrap(difference_PM), strict=True
    ):
        digits = 1 if name == "response_tokens" else 3
        interval = "-" if math.isnan(low) else f"[{low:+.{digits}f}, {high:+.{digits}f}]"
        signs = "" if name in ("response_tokens", "truncated_share") else f"{(values > 0).sum()}/{(values < 0).sum()}"
        cells = f"{name:<18}{was:>10.{digits}f}{now:>10.{digits}f}{now - was:>+12.{digits}f}"
        lines.append(f"{cells}   {interval:<18} {signs}".rstrip())
    if other := [
        f"{key} {before.get(key)} and {after.get(key)}" for key in _ASKED if before.get(key) != after.get(key)
    ]:
        lines += ["", f"they were asked differently: {', '.join(other)}"]
    return "\n".join(lines)


def _by_question(evaluation: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, float]]:
    """Return each problem's estimates by its question, which may be asked several times."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    times: Counter[str] = Counter()
    for problem in evaluation["problems"]:
        question = json.dumps([problem["prompt"], problem["reference"]])
        estimates = {name: problem[name] for name in evaluation["estimates"]}
        found[question, times[question]] = {"avg" if name[:4] == "avg@" else name: x for name, x in estimates.items()}
        times[question] += 1
    return found


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PROMPT_CHARS else f"{line[: _MAX_PROMPT_CHARS - 1]}…"
