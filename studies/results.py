"""Curves with their spread over seeds, final figures and paired comparisons, from the metrics of a study's runs."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bapo_megatron.algorithms.diagnostics import BINS, MEANS
from bapo_megatron.runs.steps import read_metrics
from studies.pool import run_path
from studies.study import Run, Study

Row = Mapping[str, float]

LAST_PART = 0.25  # share of a run's steps over which "at the end" averages
PROFILE = "profile"  # plots the token profile (monitor.token_profile = true): a run's means by token probability
PROFILE_PARTS = ("share", *MEANS)
COMPARISONS = "comparisons"  # plots the differences between variants with their errors


def _share(part: str, rest: str) -> Callable[[Row], float]:
    return lambda row: row[part] / (row[part] + row[rest]) if row[part] + row[rest] > 0 else math.nan


DERIVED: dict[str, tuple[str, Callable[[Row], float]]] = {
    "clip_share": ("clipped share of tokens", lambda row: row["loss/clip_high_share"] + row["loss/clip_low_share"]),
    "positive_token_share": (
        "positive share of tokens",
        _share("loss/positive_token_share", "loss/negative_token_share"),
    ),
    "positive_mass_share": ("positive share of the loss", _share("loss/positive_mass", "loss/negative_mass")),
}

# Column of the table -> metric, and how a run's values become one figure: the last value, the mean at the end, the mean
# of all, or the median.
FINALS: dict[str, tuple[str, str]] = {
    "pass rate": ("eval/reward", "last"),
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
HEADLINE = "pass rate"  # the figure by which variants are compared


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's spread over seeds, finite values only. `x` has optimizer updates so far or probabilities."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class FinalFigure:
    """A final figure of a variant: mean and standard deviation over seeds (None for a single seed)."""

    mean: float
    std: float | None
    by_seed: list[float]


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Results of one variant."""

    name: str
    finals: dict[str, FinalFigure]
    curves: dict[str, Curve]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The headline figure of `first` minus the headline figure of `second`, seed by seed."""

    first: str
    second: str
    difference: float
    standard_error: float | None
    num_higher: int
    num_seeds: int


@dataclass(frozen=True, slots=True)
class StudyResult:
    """All figures that a study's page and plots show."""

    seeds: list[int]  # in the order of FinalFigure.by_seed
    variants: list[VariantResult]
    comparisons: list[Comparison]

    def as_csv(self) -> str:
        """Return one table with a row for each final figure (by seed, without x) and for each point of a curve."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["variant", "figure", "x", "mean", "low", "high", *(f"seed {seed}" for seed in self.seeds)])
        for variant in self.variants:
            for column, final in variant.finals.items():
                spread = [final.mean, min(final.by_seed), max(final.by_seed)]
                table.writerow([variant.name, column, "", *map(_digits, [*spread, *final.by_seed])])
            for metric, curve in variant.curves.items():
                for point in zip(curve.x, curve.mean, curve.low, curve.high, strict=True):
                    table.writerow([variant.name, metric, *map(_digits, point), *("" for _ in self.seeds)])
        return text.getvalue()


def gather(study: Study, runs: Sequence[Run]) -> StudyResult:
    """Read the metrics of finished runs."""
    by_variant: dict[str, dict[int, Sequence[Row]]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, {})[run.seed] = read_metrics(run_path(run.config) / "metrics.jsonl")
    wanted = [plot.metric for plot in study.plots]
    variants = [_variant(name, list(seeds.values()), wanted) for name, seeds in by_variant.items()]
    finals = {variant.name: variant.finals for variant in variants}
    comparisons = [
        _compare(first, second, finals[first][HEADLINE].by_seed, finals[second][HEADLINE].by_seed)
        for first, second in study.compare
        if all(HEADLINE in finals.get(name, {}) for name in (first, second))
    ]
    return StudyResult(list(dict.fromkeys(run.seed for run in runs)), variants, comparisons)


def value(row: Row, metric: str) -> float:
    """Return a step's metric, recorded or derived, or nan if the run lacks it."""
    try:
        return DERIVED[metric][1](row) if metric in DERIVED else row[metric]
    except KeyError:
        return math.nan


def _variant(name: str, seeds: Sequence[Sequence[Row]], wanted: Sequence[str]) -> VariantResult:
    finals = {}
    for column, (metric, part) in FINALS.items():
        by_seed = [_final(rows, metric, part) for rows in seeds]
        if all(map(math.isfinite, by_seed)):
            std = statistics.stdev(by_seed) if len(by_seed) > 1 else None
            finals[column] = FinalFigure(statistics.fmean(by_seed), std, by_seed)
    curves = {metric: _curve(seeds, metric) for metric in wanted if metric not in (PROFILE, COMPARISONS)}
    if PROFILE in wanted:
        curves |= {f"{PROFILE}/{part}": _profile(seeds, part) for part in PROFILE_PARTS}
    return VariantResult(name, finals, curves)


def _profile(seeds: Sequence[Sequence[Row]], part: str) -> Curve:
    """Return the share of a run's trained tokens in each bin, or the mean of `part` over the tokens in each bin."""
    rows_SB = [[_over_run(rows, bin_name, part) for bin_name in BINS] for rows in seeds]
    centres = [(b + 0.5) / len(BINS) for b in range(len(BINS))]
    return _spread(centres, rows_SB)


def _over_run(rows: Sequence[Row], bin_name: str, part: str) -> float:
    shares = [value(row, f"{bin_name}_share") for row in rows]
    if part == "share":
        return _mean(shares)
    weighted = [(share, value(row, f"{bin_name}_{part}")) for share, row in zip(shares, rows, strict=True)]
    weighted = [(share, v) for share, v in weighted if share > 0 and math.isfinite(v)]
    total = math.fsum(share for share, _ in weighted)
    return math.fsum(share * v for share, v in weighted) / total if total else math.nan


def _final(rows: Sequence[Row], metric: str, part: str) -> float:
    if part == "last":
        return value(rows[-1], metric)
    if part == "median":
        finite = [v for row in rows if math.isfinite(v := value(row, metric))]
        return statistics.median(finite) if finite else math.nan
    first = len(rows) - max(1, round(len(rows) * LAST_PART)) if part == "end" else 0
    return _mean([value(row, metric) for row in rows[first:]])


def _curve(seeds: Sequence[Sequence[Row]], metric: str) -> Curve:
    """Return the metric over the steps that have it: evaluations do not happen in every step."""
    steps = [(rows[0]["version"], [value(row, metric) for row in rows]) for rows in zip(*seeds, strict=True)]
    recorded = [(x, values) for x, values in steps if any(map(math.isfinite, values))]
    return _spread([x for x, _ in recorded], list(zip(*(values for _, values in recorded), strict=True)))


def _spread(x: list[float], by_seed: Sequence[Sequence[float]]) -> Curve:
    columns = [[v for v in column if math.isfinite(v)] for column in zip(*by_seed, strict=True)]
    return Curve(
        x=x,
        mean=[_mean(column) for column in columns],
        low=[min(column, default=math.nan) for column in columns],
        high=[max(column, default=math.nan) for column in columns],
    )


def _compare(first: str, second: str, ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    higher = sum(d > 0 for d in differences)
    return Comparison(first, second, statistics.fmean(differences), error, higher, len(differences))


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return statistics.fmean(finite) if finite else math.nan


def _digits(number: float) -> str:
    """Format with the precision of float32, and nan as an empty text."""
    return f"{number:.9g}" if math.isfinite(number) else ""
