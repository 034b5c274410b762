"""The summary of a run: what its steps have achieved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from bapo_megatron.errors import plural
from bapo_megatron.runs.numbers import duration, number, percent
from bapo_megatron.runs.steps import StepRow

_WINDOW_STEPS = 10
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Key facts of a run; nan for a metric that was not recorded."""

    num_steps: int
    window_steps: int  # steps averaged at either end of the run; the ends do not overlap
    reward_first: float
    reward_last: float
    is_pass_rate: bool  # whether every reward was 0 or 1
    resumed_token_share: float  # share of all trained tokens
    staleness_mean: float
    staleness_max: float
    wall_time_s: float  # duration of the steps, over all attempts
    searches: tuple[int, int, int]  # searches for clip bounds that ended at the start, inside, at the limits
    num_gradient_alarms: int  # number of updates

    def text(self) -> str:
        """Return a few lines for the end of a run."""
        window = f"first and last {self.window_steps} steps" if self.window_steps > 1 else "first and last step"
        lines = [
            f"{'pass rate' if self.is_pass_rate else 'reward   '}  {number(self.reward_first)} -> "
            f"{number(self.reward_last)} (mean reward, {window})",
            f"tokens     {percent(self.resumed_token_share)} resumed from partial rollouts, "
            f"age {number(self.staleness_mean, 1)} updates (max {number(self.staleness_max, 0)})",
            f"time       {duration(self.wall_time_s)} in {plural(self.num_steps, 'step')}",
        ]
        if any(self.searches):
            at_start, inside, at_limits = self.searches
            lines.insert(
                2,
                f"clip       {plural(sum(self.searches), 'search')} ended: {at_start} at the start, {inside} inside, "
                f"{at_limits} at the limits",
            )
        if self.num_gradient_alarms:
            lines.append(f"alarms     {plural(self.num_gradient_alarms, 'update')} with a spike of the gradient norm")
        has_rewards = math.isfinite(self.reward_last)
        return "\n".join(lines if has_rewards else lines[1:])


def summarize_run(rows: Sequence[StepRow]) -> RunSummary:
    """Summarize the steps in `rows` (from `read_metrics`; at least one)."""
    assert rows, "a run without steps has no summary"
    reward_first, reward_last = first_and_last(rows, reward_metric(rows[-1]))
    return RunSummary(
        num_steps=len(rows),
        window_steps=_window(rows),
        reward_first=reward_first,
        reward_last=reward_last,
        is_pass_rate=all(map(is_pass_rate, rows)),
        resumed_token_share=_token_mean(rows, "rollout/resumed_token_share"),
        staleness_mean=_token_mean(rows, "staleness/mean"),
        staleness_max=max(_finite(rows, "staleness/max"), default=math.nan),
        wall_time_s=math.fsum(_finite(rows, "time/step_s")),
        searches=(
            _total(rows, "bapo/num_at_start"),
            _total(rows, "bapo/num_inside"),
            _total(rows, "bapo/num_at_limits"),
        ),
        num_gradient_alarms=_total(rows, "optimizer/grad_alarms"),
    )


def _window(rows: Sequence[StepRow]) -> int:
    """Return the number of steps at either end of a run that are averaged; the ends do not overlap."""
    return max(1, min(_WINDOW_STEPS, len(rows) // 2))


def reward_metric(row: Mapping[str, float]) -> str:
    """Return the name of the mean reward that reflects the policy's skill; dropped groups shift the plain mean."""
    return "reward/judged_mean" if "reward/judged_mean" in row else "reward/mean"


def is_pass_rate(row: Mapping[str, float]) -> bool:
    """Return whether the rewards of a step were all 0 or 1 (their mean square is then their mean). True if unknown."""
    mean, std = row.get("reward/mean", math.nan), row.get("reward/std", math.nan)
    return not (math.isfinite(mean) and math.isfinite(std)) or abs(std**2 + mean**2 - mean) < _ROUNDING


def first_and_last(rows: Sequence[StepRow], name: str) -> tuple[float, float]:
    """Average a metric over the first and the last `RunSummary.window_steps` steps, or nan if it was not recorded."""
    values = [row.get(name, math.nan) for row in rows]
    window = _window(rows)
    return mean(values[:window]), mean(values[-window:])


def increases(totals: Sequence[float]) -> list[float]:
    """Return how much a running total grew at each value after the first. A drop means that an attempt began at 0."""
    return [after - before if after >= before else after for before, after in pairwise(totals)]


def mean(values: Sequence[float]) -> float:
    """Average the finite values, or return nan if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _total(rows: Sequence[StepRow], name: str) -> int:
    return round(math.fsum(_finite(rows, name)))


def _finite(rows: Sequence[StepRow], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _token_mean(rows: Sequence[StepRow], name: str) -> float:
    """Average over trained tokens, or over steps if the number of tokens was not recorded."""
    known = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    weights = [row.get("train/tokens", math.nan) for row in known]
    if not weights or not all(math.isfinite(w) for w in weights) or sum(weights) == 0:
        return mean([row[name] for row in known])
    return math.fsum(row[name] * w for row, w in zip(known, weights, strict=True)) / math.fsum(weights)
