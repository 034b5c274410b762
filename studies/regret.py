"""Regret: how far a method is below the best one of its regime, averaged over regimes.

A failed run scores 0: whoever trains with that method gets no model.

Shape legend: M methods, G regimes, S seeds, B resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 10_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of a method: mean over regimes, a 95 % interval by bootstrap over seeds, and each regime's."""

    method: str
    mean: float
    low: float
    high: float
    by_regime: dict[str, float]


@dataclass(frozen=True, slots=True)
class RegretDifference:
    """The mean regret of `first` minus the mean regret of `second`, with its standard error by bootstrap over seeds."""

    first: str
    second: str
    difference: float
    standard_error: float


def regrets(
    scores: Mapping[tuple[str, str], Sequence[float | None]], pairs: Sequence[tuple[str, str]]
) -> tuple[list[Regret], list[RegretDifference]]:
    """Return the regret of each method, and the differences of pairs of methods.

    All methods and regimes are resampled with the same seeds, because a seed's problems are the same for all methods.

    Args:
        scores: for each method in each regime, one for each seed; None if the run failed.
        pairs: methods to compare.
    """
    methods, regimes = (list(dict.fromkeys(names)) for names in zip(*scores, strict=True))
    scores_MGS = np.array([[[s or 0.0 for s in scores[m, g]] for g in regimes] for m in methods])
    regret_MG = _regret(scores_MGS.mean(-1))
    num_seeds = scores_MGS.shape[-1]
    seeds_BS = np.random.default_rng(_SEED).integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    regret_BM = np.stack([_regret(scores_MGS[..., seeds_S].mean(-1)).mean(-1) for seeds_S in seeds_BS])
    low_M, high_M = np.percentile(regret_BM, (2.5, 97.5), axis=0)
    of_methods = [
        Regret(m, float(regret_G.mean()), float(low), float(high), dict(zip(regimes, regret_G.tolist(), strict=True)))
        for m, regret_G, low, high in zip(methods, regret_MG, low_M, high_M, strict=True)
    ]
    differences = []
    for first, second in pairs:
        i, j = methods.index(first), methods.index(second)
        error = float((regret_BM[:, i] - regret_BM[:, j]).std(ddof=1))
        difference = float(regret_MG[i].mean() - regret_MG[j].mean())
        differences.append(RegretDifference(first, second, difference, error))
    return of_methods, differences


def _regret(mean_MG: NDArray[np.float64]) -> NDArray[np.float64]:
    return mean_MG.max(axis=0) - mean_MG
