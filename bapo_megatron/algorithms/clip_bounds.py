"""BAPO's adaptive clip bounds: the search of arXiv 2510.18927, Algorithm 1, in one pass over the tokens.

Before an optimizer step the search widens the ratio window [c_low, c_high] until tokens with a positive advantage
contribute at least `rho0` to the policy-gradient loss:

    c_low, c_high = low.start, high.start
    while rho(c_low, c_high) < rho0 and c_low + low.step <= low.stop:
        if c_high + high.step <= high.stop: c_high += high.step
        else:                               c_low  += low.step

The positive side P depends on c_high only and the negative side N on c_low only. Both are sums over tokens, so one
vector holding P and N at every grid point (55 numbers at the paper's values) adds up over micro-batches and ranks;
after one all-reduce the loop runs on plain numbers, with the same result everywhere.

Shape legend: [...] any shape of token tensors, the same for all of them; K number of grid points of both bounds.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from bapo_megatron.config.schema_loss import BoundRange, ClipBoundConfig
from bapo_megatron.types import ClipBounds

_CHUNK_TOKENS = 1 << 15
_ROUNDING = 1e-5  # relative: advantages of a group, in float32, sum to 0 up to less than this


def empty_table(config: ClipBoundConfig) -> Tensor:
    """Return the table of no tokens, float64 [K + 2]; searching it leaves the bounds at their start."""
    return torch.zeros(len(config.high.points) + len(config.low.points) + 2, dtype=torch.float64)


def contribution_table(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behaviour_logprobs: Tensor | None,
    config: ClipBoundConfig,
    weights: Tensor | None = None,
) -> Tensor:
    """Tabulate the contributions of positive and negative tokens at every candidate bound: float64 [K + 2], additive.

    Layout: P at each point of `high`, N at each point of `low`, number of positive tokens, number of negative tokens.
    If the term of any token in the mask is nan, so is the whole table: that update's gradient is nan too, so the update
    is skipped.

    All tensors have the same shape [...], on any device.

    Args:
        ratio: each token's ratio that the loss clips, dimensionless. Compared with the bounds in float64.
        advantages: tokens with advantage 0 add nothing.
        mask: bool; tokens outside it count nowhere, whatever their values (NaN included).
        behaviour_logprobs: log-prob of each token under the policy that sampled it, in nats; read only by
            token_weight = "rollout_prob".
        weights: factor of each token's term in the objective, at least 0 (`losses.token_ratios`); None means all 1.
    """
    factors = [] if weights is None else [weights]
    if config.token_weight == "rollout_prob":
        assert behaviour_logprobs is not None, "token_weight = 'rollout_prob' needs the behaviour log-probs"
        factors.append(behaviour_logprobs.double().exp())
    highs, lows, tops = (x.to(ratio.device) for x in _grid(config.high, config.low))
    by_ratio, by_mass, counts = (tops.new_zeros(size) for size in (len(tops), len(tops), 2))
    for r, mass, *weights_of_chunk in _chunks(mask, ratio, advantages, *factors):
        is_positive = mass > 0
        num_positive = is_positive.count_nonzero()
        counts += torch.stack([num_positive, mass.count_nonzero() - num_positive])
        for weight in weights_of_chunk:
            mass = mass * weight
        bucket = _buckets(r, is_positive, tops, len(highs), config)
        by_ratio.scatter_add_(0, bucket, mass * r)
        if config.contribution != "gradient":
            by_mass.scatter_add_(0, bucket, mass)
    # No bucket holds tokens of both signs. Bound k has the buckets 0..k on its left; summing each side separately keeps
    # exact zeros exact.
    by_ratio.abs_()
    by_mass.abs_()
    of_high, of_low = slice(0, len(highs) + 1), slice(len(highs) + 2, None)
    positive, negative = _left(by_ratio[of_high]), _right(by_ratio[of_low])
    if config.contribution != "gradient":
        positive += highs * _right(by_mass[of_high])
        negative += lows * _left(by_mass[of_low])
    return torch.cat([positive, negative, counts]).masked_fill_(by_ratio.sum().isnan(), math.nan)


def _chunks(mask: Tensor, *values: Tensor) -> Iterator[list[Tensor]]:
    """Yield as many tokens' values at a time as fit into a processor's cache: flat, float64, 0 outside the mask."""
    for inside, *parts in zip(*(x.flatten().split(_CHUNK_TOKENS) for x in (mask, *values)), strict=True):
        if inside.count_nonzero() == inside.numel():  # the usual case if sequences are packed
            yield [x.double() for x in parts]
        else:
            yield [torch.where(inside, x, 0).double() for x in parts]


@lru_cache(maxsize=16)
def _grid(high: BoundRange, low: BoundRange) -> tuple[Tensor, Tensor, Tensor]:
    """Return the points of both bounds, and the exclusive upper edge of each bucket. The results are read-only.

    The buckets are those for positive tokens, one that stays empty, and those for negative tokens. Inside means
    r < c_high (positive) or r > c_low (negative): a ratio equal to a bound lies above an upper bound, and below a lower
    one.
    """
    highs, lows = (torch.tensor(side.points, dtype=torch.float64) for side in (high, low))
    end = torch.tensor([math.inf], dtype=torch.float64)
    return highs, lows, torch.cat([highs, end, end, torch.nextafter(lows, end), end])


def _buckets(ratio: Tensor, is_positive: Tensor, tops: Tensor, num_highs: int, config: ClipBoundConfig) -> Tensor:
    """Return the bucket of each token, int64, as an index into the upper edges of `_grid`.

    The bounds of a range are equally spaced, except that they are rounded to decimals. So a quotient finds the bucket
    or the one before it, and a comparison decides, in a fraction of the time of a binary search.
    """
    finite = ratio.nan_to_num()  # a nan makes the whole table nan, whichever bucket it falls into

    def guess(side: BoundRange, first: int, last: int) -> Tensor:
        return (finite * (1.0 / side.step)).add_(first + 0.5 - side.start / side.step).clamp_(first, last)

    of_high, of_low = guess(config.high, 0, num_highs), guess(config.low, num_highs + 2, len(tops) - 1)
    bucket = torch.where(is_positive, of_high, of_low).long()
    return bucket.add_(tops.index_select(0, bucket) <= finite)


def _left(buckets: Tensor) -> Tensor:
    return buckets[:-1].cumsum(0)


def _right(buckets: Tensor) -> Tensor:
    return buckets[1:].flip(0).cumsum(0).flip(0)


def search_bounds(table: Tensor, config: ClipBoundConfig) -> ClipBounds:
    """Search the table of the whole optimizer step (summed over micro-batches and data ranks).

    If nothing contributes (P + N = 0), or the table is nan, then rho is nan and the search stops. It also stops if rho
    falls short of its target by rounding alone: before the first update, with responses of one length, P equals N.
    """
    highs, lows, _ = _grid(config.high, config.low)
    assert table.shape == (len(highs) + len(lows) + 2,), "the table was made with other bounds"
    values = table.tolist()
    positive, negative = values[: len(highs)], values[len(highs) : -2]
    target = config.rho0 * (1 - _ROUNDING)
    path = _search_path(len(highs) - 1, len(lows) - 1, config.order)
    for num_moves, (i, j) in enumerate(path):  # noqa: B007 (read after the loop)
        rho = measured_rho(positive[i], negative[j], config)
        if config.scope == "fixed" or not rho < target:
            break
    saturated = rho < target and config.scope != "fixed"
    return ClipBounds(lows[j].item(), highs[i].item(), rho, saturated, num_moves)


def _search_path(num_high: int, num_low: int, order: str) -> list[tuple[int, int]]:
    """List the grid steps (high, low) in the order in which the search tries them.

    high_first is Algorithm 1, whose loop requires room for the lower bound before it moves either one.
    low_first is the authors' recipe: one loop for the lower bound, then one for the upper.
    """
    if order == "low_first":
        return [(0, j) for j in range(num_low + 1)] + [(i, num_low) for i in range(1, num_high + 1)]
    if num_low == 0:
        return [(0, 0)]
    return [(i, 0) for i in range(num_high + 1)] + [(num_high, j) for j in range(1, num_low + 1)]


def measured_rho(positive: float, negative: float, config: ClipBoundConfig) -> float:
    """Compute the contribution of positive tokens from P and N, by one of the four readings of Eq. 8."""
    if positive + negative == 0:
        return math.nan
    if config.contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    if config.contribution == "official":
        return positive / negative if negative > 0 else math.inf
    return positive / (positive + negative)
