"""The summary of a run, and how numbers are shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

Row = dict[str, float]

_WINDOW_STEPS = 10
_ROUNDING = 1e-6
Z_95 = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard errors


@dataclass(frozen=True, slots=True)
class Summary:
    """Key facts of a run; nan for a metric that was not recorded."""

    num_steps: int
    window_steps: int  # steps averaged at either end of the run; the ends do not overlap
    reward_first: float
    reward_last: float
    is_pass_rate: bool  # whether every reward was 0 or 1
    resumed_token_share: float  # of all trained tokens
    staleness_mean: float
    staleness_max: float
    wall_time_s: float  # of the steps, over all attempts
    searches: tuple[int, int, int]  # for clip bounds: ended at the start, inside, at the limits
    num_mismatch_alarms: int  # updates
    num_gradient_alarms: int  # updates

    def text(self) -> str:
        """Return a few lines for the end of a run, and one more for each kind of alarm."""
        window = f"first and last {self.window_steps} steps" if self.window_steps > 1 else "first and last step"
        lines = [
            f"{'pass rate' if self.is_pass_rate else 'reward   '}  {number(self.reward_first)} -> "
            f"{number(self.reward_last)} (mean reward, {window})",
            f"tokens     {percent(self.resumed_token_share)} resumed from partial rollouts, "
            f"age {number(self.staleness_mean, 1)} updates (max {number(self.staleness_max, 0)})",
            f"time       {duration(self.wall_time_s)} in {self.num_steps} steps",
        ]
        if any(self.searches):
            at_start, inside, at_limits = self.searches
            lines.insert(
                2,
                f"clip       {sum(self.searches)} searches ended: {at_start} at the start, {inside} inside, "
                f"{at_limits} at the limits",
            )
        if self.num_mismatch_alarms:
            lines.append(f"alarms     {self.num_mismatch_alarms} updates over monitor.mismatch_alarm")
        if self.num_gradient_alarms:
            lines.append(f"alarms     {self.num_gradient_alarms} updates with a spike of the gradient norm")
        return "\n".join(lines)


def summarize(rows: Sequence[Row]) -> Summary:
    """Summarize the steps in `rows` (from `read_metrics`; at least one)."""
    assert rows, "a run without steps has no summary"
    reward_first, reward_last = first_and_last(rows, reward_metric(rows[-1]))
    return Summary(
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
        num_mismatch_alarms=_total(rows, "mismatch/alarms"),
        num_gradient_alarms=_total(rows, "optimizer/grad_alarms"),
    )


def _window(rows: Sequence[Row]) -> int:
    """Return the number of steps at either end of a run that are averaged; the ends do not overlap."""
    return max(1, min(_WINDOW_STEPS, len(rows) // 2))


def reward_metric(row: Mapping[str, float]) -> str:
    """Return the name of the mean reward that shows the policy's skill: dropping groups moves that of the others."""
    return "reward/judged_mean" if "reward/judged_mean" in row else "reward/mean"


def is_pass_rate(row: Mapping[str, float]) -> bool:
    """Return whether the rewards of a step were all 0 or 1: then their mean square is their mean. True if unknown."""
    mean, std = row.get("reward/mean", math.nan), row.get("reward/std", math.nan)
    return not (math.isfinite(mean) and math.isfinite(std)) or abs(std**2 + mean**2 - mean) < _ROUNDING


def first_and_last(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Average a metric over the first and the last `Summary.window_steps` steps; nan if it was not recorded."""
    values = [row.get(name, math.nan) for row in rows]
    window = _window(rows)
    return mean(values[:window]), mean(values[-window:])


def increases(totals: Sequence[float]) -> list[float]:
    """Return how much a running total grew at each value after the first; a smaller value begins a new attempt at 0."""
    return [after - before if after >= before else after for before, after in pairwise(totals)]


def mean(values: Sequence[float]) -> float:
    """Average the finite values; nan without any."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share of `num` independent trials, which is open at 0 and 1, too.

    Example: wilson_interval(1.0, 8) == (0.676, 1.0), rounded
    """
    z = Z_95
    centre, shrink = share + z * z / (2 * num), 1 + z * z / num
    half = z * math.sqrt(share * (1 - share) / num + (z / (2 * num)) ** 2)
    return max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink)


def evaluation_lines(metrics: Mapping[str, float], when: str) -> list[str]:
    """Return a line for each evaluation set that was asked; none without an evaluation.

    Example: "evaluation after step 20, aime: reward 0.312 ± 0.041, best of a group 0.533, 812 tokens, 4% cut off".
    """
    lines = []
    for key, reward in metrics.items():
        if not (key.startswith("eval/") and key.endswith("/reward")):
            continue
        name = key.removeprefix("eval/").removesuffix("reward").removesuffix("/")
        error, best, tokens, cut = (
            metrics.get(key.removesuffix("reward") + other, math.nan)
            for other in ("reward_stderr", "best_of_group", "response_tokens_mean", "truncated_share")
        )
        margin = f" ± {number(error, 3)}" if math.isfinite(error) else ""
        line = f"evaluation {when}{name and f', {name}'}: reward {number(reward, 3)}{margin}"
        if name:
            line += f", best of a group {number(best, 3)}, {number(tokens, 0)} tokens, {percent(cut)} cut off"
        lines.append(line)
    return lines


def number(value: float, digits: int = 2) -> str:
    """Format a number: 0.534 -> "0.53", nan -> "-"."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def percent(share: float) -> str:
    """Format a share: 0.614 -> "61%", nan -> "-"."""
    return f"{share:.0%}" if math.isfinite(share) else "-"


def count(value: float) -> str:
    """Format a count: 1234 -> "1.2k", 2_500_000 -> "2.5M", nan -> "-"."""
    if not math.isfinite(value):
        return "-"
    for limit, divisor, suffix in ((999.5, 1, ""), (999_500, 1e3, "k"), (999_500_000, 1e6, "M")):
        if value < limit:
            scaled = value / divisor
            return f"{scaled:.{1 if suffix and scaled < 99.95 else 0}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def duration(seconds: float) -> str:
    """Format a duration: 3725 -> "1 h 02 min", 245 -> "4 min 05 s", 12.3 -> "12.3 s", nan -> "-"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def short_duration(seconds: float) -> str:
    """Format a duration in six characters: 12.3 -> "12.3s", 245 -> "4m05s", 3725 -> "1h02m", nan -> "-"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def _total(rows: Sequence[Row], name: str) -> int:
    return round(math.fsum(_finite(rows, name)))


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _token_mean(rows: Sequence[Row], name: str) -> float:
    """Average over trained tokens, or over steps if their number was not recorded."""
    known = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    weights = [row.get("train/tokens", math.nan) for row in known]
    if not weights or not all(math.isfinite(w) for w in weights) or sum(weights) == 0:
        return mean([row[name] for row in known])
    return math.fsum(row[name] * w for row, w in zip(known, weights, strict=True)) / math.fsum(weights)
