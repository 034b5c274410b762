"""Estimates from n sampled responses to each problem, and confidence intervals for them and for shares.

    pass@k   probability that at least one of k responses passes
    maj@k    probability that the most frequent answer of k responses passes

Both are exact averages over all choices of k of the n responses: unbiased for k fresh responses (pass@k: arXiv
2107.03374, Eq. 1).

Shape legend: P problems, M estimates.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Z_95 = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard errors

_RESAMPLES_AT_ONCE = 500


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Compute 1 - C(n - c, k) / C(n, k). Example: pass_at_k(4, 1, 2) == 0.5"""
    assert 0 <= num_passed <= num_samples
    assert 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def majority_at_k(num_passed: int, wrong_counts: Sequence[int], num_abstained: int, ks: Sequence[int]) -> list[float]:
    """Compute, for each k, the probability that the right answer wins among k responses drawn without replacement.

    Tied answers win with equal probability. There is no winner if all responses abstain.

    Args:
        num_passed: responses with the right answer.
        wrong_counts: responses with each of the wrong answers, all above 0.
        num_abstained: responses without an answer.

    Example: majority_at_k(1, [1], 0, [1, 2]) == [0.5, 0.5]
    """
    num_samples = num_passed + sum(wrong_counts) + num_abstained
    assert all(1 <= k <= num_samples for k in ks)
    assert all(count > 0 for count in wrong_counts)
    won = [0.0] * len(ks)
    for votes in range(1, min(num_passed, max(ks)) + 1):
        rest = [k - votes for k in ks]
        for num_ties, ways in enumerate(_ways_to_beat(wrong_counts, num_abstained, votes, rest)):
            for i, k in enumerate(ks):
                won[i] += comb(num_passed, votes) * ways[i] / ((num_ties + 1) * comb(num_samples, k))
    return won


def _ways_to_beat(counts: Sequence[int], num_abstained: int, votes: int, drawn: Sequence[int]) -> list[list[int]]:
    """Count the ways to draw wrong answers, none more than `votes` times: by [number of ties][number drawn].

    The counts are coefficients of polynomials in x, whose exponent is the number drawn. A polynomial is stored as one
    integer, its value at x = 2^bits; no coefficient overflows, because none exceeds the number of subsets. A wrong
    answer is drawn fewer than `votes` times, fewer(x) = sum of C(count, j) x^j, or ties, C(count, votes) x^votes; m
    answers with equal counts tie i times in C(m, i) ties^i fewer^(m - i). Smaller counts cannot tie: like abstentions,
    they contribute (1 + x)^number.
    """
    bits, room = num_abstained + sum(counts) + 1, max(drawn)
    free = num_abstained + sum(count for count in counts if count < votes)
    by_ties = [(1 + (1 << bits)) ** free]  # each without the factors x^votes of its ties
    for count, num_answers in Counter(count for count in counts if count >= votes).items():
        fewer = sum(comb(count, j) << bits * j for j in range(votes))
        most = min(num_answers, room // votes)
        group = [comb(num_answers, i) * comb(count, votes) ** i * fewer ** (num_answers - i) for i in range(most + 1)]
        longer = [0] * min(len(by_ties) + most, room // votes + 1)
        for i, ways in enumerate(by_ties):
            for j, more in enumerate(group[: len(longer) - i]):
                longer[i + j] += _low(ways * more, bits * (room - votes * (i + j) + 1))
        by_ties = longer
    return [[_coefficient(ways, n - votes * i, bits) for n in drawn] for i, ways in enumerate(by_ties)]


def _coefficient(polynomial: int, exponent: int, bits: int) -> int:
    return _low(polynomial >> bits * exponent, bits) if exponent >= 0 else 0


def _low(number: int, bits: int) -> int:
    return number & ((1 << bits) - 1)


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval for a share of `num` independent trials; it has a width even at 0 and 1.

    Example: wilson_interval(1.0, 8) == (0.676, 1.0), rounded
    """
    z = Z_95
    centre, shrink = share + z * z / (2 * num), 1 + z * z / num
    half = z * sqrt(share * (1 - share) / num + (z / (2 * num)) ** 2)
    return max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink)


def bootstrap(
    values_PM: NDArray[np.float64], *, num_resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute percentile intervals of the means over problems: (low_M, high_M), float64.

    Problems are drawn with replacement, each with all its responses, which are not independent. All estimates share
    the draws. nan with fewer than two problems, whose spread is unknown.
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
    """Return the reported k: 1, 2, 4, ... and the number itself."""
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples})
