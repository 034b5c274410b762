"""Estimates from n sampled responses to each problem, and how far they may be off. Pure arithmetic.

    pass@k   probability that at least one of k responses passes
    maj@k    probability that the most frequent answer of k responses passes

Both are what a random choice of k out of the n responses gives on average, computed exactly and not by drawing:
unbiased for k fresh responses (pass@k: arXiv 2107.03374, Eq. 1).

Shape legend: P problems, M estimates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

_RESAMPLES_AT_ONCE = 500


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k). Example: pass_at_k(4, 1, 2) == 0.5"""
    assert 0 <= num_passed <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def majority_at_k(num_passed: int, wrong_counts: Sequence[int], num_abstained: int, k: int) -> float:
    """Probability that among k responses, drawn without replacement, the right answer has the most votes.

    Of answers with equally many votes, each wins with the same probability. Nobody wins where all abstain.

    Args:
        num_passed: responses with the right answer.
        wrong_counts: responses with each of the wrong answers, all above 0.
        num_abstained: responses without an answer.

    Example: majority_at_k(1, [1], 0, 2) == 0.5
    """
    num_samples = num_passed + sum(wrong_counts) + num_abstained
    assert 1 <= k <= num_samples
    assert all(count > 0 for count in wrong_counts)
    won = 0.0
    for votes in range(1, min(num_passed, k) + 1):
        for (drawn, num_ties), ways in _beaten(wrong_counts, votes, k - votes).items():
            rest = comb(num_abstained, k - votes - drawn)
            won += comb(num_passed, votes) * ways * rest / (num_ties + 1) / comb(num_samples, k)
    return won


def _beaten(counts: Sequence[int], votes: int, room: int) -> dict[tuple[int, int], int]:
    """Ways to draw at most `room` wrong answers, none more than `votes` times: by (how many, how many tie)."""
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for count in counts:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (drawn, num_ties), num in ways.items():
            for more in range(min(count, votes, room - drawn) + 1):
                longer[drawn + more, num_ties + (more == votes)] += num * comb(count, more)
        ways = longer
    return ways


def bootstrap(
    values_PM: NDArray[np.float64], *, num_resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile intervals of the means over problems: (low_M, high_M), float64.

    Problems are drawn with replacement, each with all its responses: those to one problem are not independent. All
    estimates see the same draws. nan with fewer than two problems, where nothing is known about the spread.
    """
    num_problems, num_estimates = values_PM.shape
    if num_problems < 2:
        unknown = np.full(num_estimates, np.nan)
        return unknown, unknown.copy()
    generator = np.random.default_rng(seed)
    share = np.full(num_problems, 1 / num_problems)
    means = []
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        num = min(_RESAMPLES_AT_ONCE, num_resamples - start)
        means.append(generator.multinomial(num_problems, share, size=num) @ values_PM / num_problems)
    low_M, high_M = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low_M, high_M


def powers_up_to(num_samples: int) -> list[int]:
    """1, 2, 4, ... and the number itself: the k that are reported."""
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})
