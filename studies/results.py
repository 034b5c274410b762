"""Curves with their spread over seeds, final figures and paired comparisons, from the rows of a study's runs."""

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpmath import betainc

from bapo_megatron.algorithms.diagnostics import BINS, MEANS
from studies.regret import Regret, RegretDifference, regrets
from studies.rows import Points, Row
from studies.study import HEADLINE, Study

Step = Mapping[str, float]

LAST_EVALS = 10
LAST_PART = 0.25  # share of a run's steps over which "at the end" averages
PROFILE = "profile"  # plots the token profile (monitor.token_profile = true): a run's means by token probability
PROFILE_PARTS = ("share", *MEANS)
COMPARISONS = "comparisons"  # plots the differences between variants with their errors


def _share(part: str, rest: str) -> Callable[[Step], float]:
    return lambda row: row[part] / (row[part] + row[rest]) if row[part] + row[rest] > 0 else math.nan


def _pass_rate(step: Step) -> float:
    """Return the reward on the unnamed evaluation set, or on the only named one."""
    if "eval/reward" in step:
        return step["eval/reward"]
    named = [step[name] for name in step if re.fullmatch("eval/[^/]+/reward", name)]
    return named[0] if len(named) == 1 else math.nan


DERIVED: dict[str, tuple[str, Callable[[Step], float]]] = {
    "clip_share": ("clipped share of tokens", lambda row: row["loss/clip_high_share"] + row["loss/clip_low_share"]),
    "pass_rate": ("pass rate on held-out prompts", _pass_rate),
    "positive_token_share": (
        "positive share of tokens",
        _share("loss/positive_token_share", "loss/negative_token_share"),
    ),
    "positive_mass_share": ("positive share of the loss", _share("loss/positive_mass", "loss/negative_mass")),
}

# Column of the table -> metric, and how a run's values become one figure: the last value, the mean at the end, the mean
# of all, the median, or the median or lowest of the last evaluations.
FINALS: dict[str, tuple[str, str]] = {
    HEADLINE: ("pass_rate", "last"),
    f"median of the last {LAST_EVALS}": ("pass_rate", "evals_median"),
    f"worst of the last {LAST_EVALS}": ("pass_rate", "evals_worst"),
    "reward at the end": ("reward/mean", "end"),
    "entropy at the end": ("loss/entropy", "end"),
    "gradient norm, median": ("optimizer/grad_norm", "median"),
    "clipped": ("clip_share", "all"),
    "positive share of the loss": ("positive_mass_share", "all"),
    "rho": ("bapo/positive_share", "all"),
    "c_low": ("bapo/low", "all"),
    "c_high": ("bapo/high", "all"),
    "inert": ("bapo/inert_share", "all"),
    "saturated": ("bapo/saturated_share", "all"),
    "age": ("staleness/mean", "all"),
    "mismatch": ("mismatch/logprob_mean", "all"),
    "other experts": ("routes/other_share", "all"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's spread over seeds, finite values only. `x` has optimizer updates so far or probabilities."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class FinalFigure:
    """A final figure of a variant: mean and standard deviation over the seeds that finished (None for a single one)."""

    mean: float
    std: float | None
    by_seed: list[float | None]  # None for a failed run


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Results of one variant."""

    name: str
    finals: dict[str, FinalFigure]
    curves: dict[str, Curve]
    by_seed: dict[str, list[Points]]  # each curve, in the order of the seeds
    failures: dict[int, str]  # by seed


@dataclass(frozen=True, slots=True)
class Comparison:
    """The headline figure of `first` minus the headline figure of `second`, seed by seed."""

    first: str
    second: str
    difference: float
    standard_error: float | None  # None for a single seed
    num_higher: int
    num_seeds: int
    p: float | None = None  # by a paired t-test; None for a single seed, and if all seeds differ equally
    holm_p: float | None = None  # corrected for all of `compare`; None if exploratory, or without p
    is_exploratory: bool = False


@dataclass(frozen=True, slots=True)
class StudyResult:
    """All figures that a study's page and plots show."""

    seeds: list[int]  # in the order of FinalFigure.by_seed
    variants: list[VariantResult]
    comparisons: list[Comparison]
    regrets: list[Regret] = field(default_factory=list)
    regret_differences: list[RegretDifference] = field(default_factory=list)

    def as_csv(self) -> str:
        """Return one table with a row for each final figure (by seed, without x) and for each point of a curve."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["variant", "figure", "x", "mean", "low", "high", *(f"seed {seed}" for seed in self.seeds)])
        for variant in self.variants:
            for column, final in variant.finals.items():
                finished = [v for v in final.by_seed if v is not None]
                by_seed = [math.nan if v is None else v for v in final.by_seed]
                spread = [final.mean, min(finished), max(finished)]
                table.writerow([variant.name, column, "", *map(_digits, [*spread, *by_seed])])
            for metric, curve in variant.curves.items():
                for point in zip(curve.x, curve.mean, curve.low, curve.high, strict=True):
                    table.writerow([variant.name, metric, *map(_digits, point), *("" for _ in self.seeds)])
        for regret in self.regrets:
            figures = (regret.mean, regret.low, regret.high)
            table.writerow([regret.method, "regret", "", *map(_digits, figures), *("" for _ in self.seeds)])
        return text.getvalue()


def figures_of(steps: Sequence[Step], wanted: Sequence[str]) -> tuple[dict[str, float], dict[str, Points]]:
    """Return a run's final figures, finite ones only, and the curves of the wanted plots.

    Args:
        steps: the run's metrics, one for each step.
        wanted: `Plot.metric` of the study's plots.
    """
    finals = {column: _final(steps, metric, part) for column, (metric, part) in FINALS.items()}
    parts = {f"{PROFILE}/{part}": part for part in PROFILE_PARTS}
    curves = {
        name: _profile(steps, parts[name]) if name in parts else _curve(steps, name) for name in curves_of(wanted)
    }
    return {column: rounded(figure) for column, figure in finals.items() if math.isfinite(figure)}, curves


def curves_of(wanted: Sequence[str]) -> list[str]:
    """Return the names of the curves that these plots show."""
    profile = [f"{PROFILE}/{part}" for part in PROFILE_PARTS] if PROFILE in wanted else []
    return [metric for metric in wanted if metric not in (PROFILE, COMPARISONS)] + profile


def gather(study: Study, rows: Sequence[Row]) -> StudyResult:
    """Compute what the page shows. Each variant has a row for each seed, with the curves of the study's plots."""
    by_variant: dict[str, list[Row]] = {}
    for row in rows:
        by_variant.setdefault(row.variant, []).append(row)
    wanted = curves_of([plot.metric for plot in study.plots])
    variants = [_variant(name, of_seeds, wanted) for name, of_seeds in by_variant.items()]
    finals = {variant.name: variant.finals for variant in variants}

    def compared(pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
        by_seed = {
            name: figures[study.headline].by_seed for name, figures in finals.items() if study.headline in figures
        }
        known = [(a, b, by_seed[a], by_seed[b]) for a, b in pairs if a in by_seed and b in by_seed]
        return [_compare(*one) for one in known if any(None not in both for both in zip(*one[2:], strict=True))]

    exploratory = [replace(c, is_exploratory=True) for c in compared(study.explore)]
    comparisons = [*_together(compared(study.compare)), *exploratory]
    result = StudyResult(list(dict.fromkeys(row.seed for row in rows)), variants, comparisons)
    return replace(result, **_regrets_of(study, rows)) if study.regret else result


def _regrets_of(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the regrets of a study in its regimes, as fields of a `StudyResult`."""
    cells = {variant.name: variant.cell for variant in study.variants if variant.cell is not None}
    scores: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        scores.setdefault(cells[row.variant], []).append(row.finals.get(study.headline))
    compared = [
        pair for pair in study.compare if {*pair} <= cells.keys() and {cells[name] for name in pair} <= scores.keys()
    ]
    pairs = dict.fromkeys((cells[a][0], cells[b][0]) for a, b in compared)
    of_methods, differences = regrets(scores, list(pairs))
    return {"regrets": of_methods, "regret_differences": differences}


def value(step: Step, metric: str) -> float:
    """Return a step's metric, recorded or derived, or nan if the run lacks it."""
    try:
        return DERIVED[metric][1](step) if metric in DERIVED else step[metric]
    except KeyError:
        return math.nan


def rounded(figure: float) -> float:
    """Keep the precision of float32."""
    return float(f"{figure:.9g}")


def _variant(name: str, rows: Sequence[Row], wanted: Sequence[str]) -> VariantResult:
    finals = {}
    finished = [row for row in rows if row.failure is None]
    for column in FINALS:
        if finished and all(column in row.finals for row in finished):
            figures = [row.finals[column] for row in finished]
            std = statistics.stdev(figures) if len(figures) > 1 else None
            finals[column] = FinalFigure(statistics.fmean(figures), std, [row.finals.get(column) for row in rows])
    by_seed = {metric: [row.curves[metric] for row in rows] for metric in wanted}
    curves = {metric: _spread(points) for metric, points in by_seed.items()}
    return VariantResult(name, finals, curves, by_seed, {row.seed: row.failure for row in rows if row.failure})


def _profile(steps: Sequence[Step], part: str) -> Points:
    """Return the share of a run's trained tokens in each bin, or the mean of `part` over the tokens in each bin."""
    centres = tuple((b + 0.5) / len(BINS) for b in range(len(BINS)))
    return Points(x=centres, y=tuple(_or_none(_over_run(steps, bin_name, part)) for bin_name in BINS))


def _over_run(steps: Sequence[Step], bin_name: str, part: str) -> float:
    shares = [value(step, f"{bin_name}_share") for step in steps]
    if part == "share":
        return _mean(shares)
    weighted = [(share, value(step, f"{bin_name}_{part}")) for share, step in zip(shares, steps, strict=True)]
    weighted = [(share, v) for share, v in weighted if share > 0 and math.isfinite(v)]
    total = math.fsum(share for share, _ in weighted)
    return math.fsum(share * v for share, v in weighted) / total if total else math.nan


def _final(steps: Sequence[Step], metric: str, part: str) -> float:
    if part == "last":
        return value(steps[-1], metric)
    finite = [v for step in steps if math.isfinite(v := value(step, metric))]
    if part == "median":
        return statistics.median(finite) if finite else math.nan
    if part.startswith("evals_"):
        last = finite[-LAST_EVALS:]
        return math.nan if len(last) < LAST_EVALS else min(last) if part == "evals_worst" else statistics.median(last)
    first = len(steps) - max(1, round(len(steps) * LAST_PART)) if part == "end" else 0
    return _mean([value(step, metric) for step in steps[first:]])


def _curve(steps: Sequence[Step], metric: str) -> Points:
    """Return the metric over the steps that have it: evaluations do not happen in every step."""
    points = [(step["version"], v) for step in steps if math.isfinite(v := value(step, metric))]
    return Points(x=tuple(x for x, _ in points), y=tuple(rounded(y) for _, y in points))


def _spread(curves: Sequence[Points]) -> Curve:
    """Return mean and range over seeds at each x that any seed has."""
    at: dict[float, list[float]] = {x: [] for x in sorted({x for points in curves for x in points.x})}
    for points in curves:
        for x, y in zip(points.x, points.y, strict=True):
            at[x] += [] if y is None else [y]
    return Curve(
        x=list(at),
        mean=[_mean(column) for column in at.values()],
        low=[min(column, default=math.nan) for column in at.values()],
        high=[max(column, default=math.nan) for column in at.values()],
    )


def _or_none(figure: float) -> float | None:
    return rounded(figure) if math.isfinite(figure) else None


def _compare(first: str, second: str, ours: Sequence[float | None], theirs: Sequence[float | None]) -> Comparison:
    """Compare on the seeds that both have finished, which must be one or more."""
    pairs = zip(ours, theirs, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    mean, number = statistics.fmean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(number) if number > 1 else None
    p = _t_test(mean, error, number - 1) if error else None
    return Comparison(first, second, mean, error, sum(d > 0 for d in differences), number, p)


def _t_test(mean: float, error: float, degrees: int) -> float:
    """Return the probability, under Student's t, of a mean that is as far from 0: I_x(degrees / 2, 1 / 2)."""
    square = degrees * error**2
    return float(betainc(degrees / 2, 0.5, 0, square / (square + mean**2), regularized=True))


def _together(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Set `holm_p` (Holm 1979): the k-th smallest of n p-values times n - k + 1, and no less than the one before."""
    holm: dict[int, float] = {}
    known = [(c.p, i) for i, c in enumerate(comparisons) if c.p is not None]
    for k, (p, i) in enumerate(sorted(known)):
        holm[i] = max([min(1.0, p * (len(known) - k)), *holm.values()])
    return [replace(c, holm_p=holm.get(i)) for i, c in enumerate(comparisons)]


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return statistics.fmean(finite) if finite else math.nan


def _digits(number: float) -> str:
    """Format with the precision of float32, and nan as an empty text."""
    return f"{number:.9g}" if math.isfinite(number) else ""
