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

Shape legend: any shape [...] for token tensors (the same for all of them); K = number of grid points of both bounds.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.types import ClipBounds


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
    If a value of any counted token is nan, so is the whole table: that update's gradient is nan too, and is skipped.

    All tensors have one shape [...], on any device.

    Args:
        ratio: the ratio that the loss clips, of each token, dimensionless. Compared with the bounds in float64.
        advantages: tokens with advantage 0 count nowhere.
        mask: bool; tokens outside it count nowhere, whatever their values (NaN included).
        behaviour_logprobs: log-prob of each token under the policy that sampled it, in nats; read only by
            token_weight = "rollout_prob".
        weights: factor of each token's term in the objective, at least 0 (`losses.token_ratios`); None: all 1.
    """
    table, counts = [], []
    is_broken = (mask & (ratio.isnan() | advantages.isnan())).any()
    for points, positive in ((config.high.points, True), (config.low.points, False)):
        counted = (mask & ((advantages > 0) if positive else (advantages < 0))).flatten().nonzero()[:, 0]
        mass = _select(advantages, counted).abs()
        if weights is not None:
            mass = mass * _select(weights, counted)
        if config.token_weight == "rollout_prob":
            assert behaviour_logprobs is not None, "token_weight = 'rollout_prob' needs the behaviour log-probs"
            mass = mass * _select(behaviour_logprobs, counted).exp()
        is_broken = is_broken | mass.isnan().any()
        table.append(_side(_select(ratio, counted), mass, points, upper=positive, config=config))
        counts.append(mass.numel())
    return torch.cat([*table, table[0].new_tensor(counts)]).masked_fill(is_broken, math.nan)


def _select(values: Tensor, counted: Tensor) -> Tensor:
    """Return the values at flat indices, float64; on a CPU ten times as fast as indexing with a mask."""
    return values.flatten().index_select(0, counted).double()


def _side(ratio: Tensor, mass: Tensor, points: Sequence[float], upper: bool, config: ClipBoundConfig) -> Tensor:
    """Compute P (upper) or N (lower) at every point: sum of mass * ratio inside the bound; for the readings of the
    clipped objective, plus mass * bound outside it. Inside means r < c_high (positive) or r > c_low (negative)."""
    bounds = torch.tensor(points, dtype=torch.float64, device=ratio.device)
    num = len(points)
    bucket = torch.bucketize(ratio, bounds, right=upper)  # upper: number of bounds <= r; lower: number of bounds < r
    by_ratio, by_mass = (
        torch.zeros(num + 1, dtype=torch.float64, device=ratio.device).index_add_(0, bucket, value)
        for value in (mass * ratio, mass)
    )
    # Bound k has the buckets 0..k on its left. Summing each side on its own keeps exact zeros exact.
    inside, outside = (_left(by_ratio), _right(by_mass)) if upper else (_right(by_ratio), _left(by_mass))
    return inside if config.contribution == "gradient" else inside + bounds * outside


def _left(buckets: Tensor) -> Tensor:
    return buckets[:-1].cumsum(0)


def _right(buckets: Tensor) -> Tensor:
    return buckets[1:].flip(0).cumsum(0).flip(0)


def search_bounds(table: Tensor, config: ClipBoundConfig) -> ClipBounds:
    """Search the table of the whole optimizer step (summed over micro-batches and data ranks).

    If nothing contributes (P + N = 0), or the table is nan, rho is nan, and the search stops.
    """
    high, low = config.high.points, config.low.points
    assert table.shape == (len(high) + len(low) + 2,), "the table was made with other bounds"
    values = table.tolist()
    positive, negative = values[: len(high)], values[len(high) : -2]
    path = _search_path(len(high) - 1, len(low) - 1, config.order)
    for num_moves, (i, j) in enumerate(path):  # noqa: B007 (read after the loop)
        rho = _rho(positive[i], negative[j], config)
        if config.scope == "fixed" or not rho < config.rho0:
            break
    saturated = rho < config.rho0 and config.scope != "fixed"
    return ClipBounds(low=low[j], high=high[i], positive_share=rho, saturated=saturated, num_moves=num_moves)


def _search_path(num_high: int, num_low: int, order: str) -> list[tuple[int, int]]:
    """List the grid steps (of high, of low) in the order in which the search tries them.

    high_first is Algorithm 1, whose loop requires room for the lower bound before it moves either one.
    low_first is the authors' recipe: one loop for the lower bound, then one for the upper.
    """
    if order == "low_first":
        return [(0, j) for j in range(num_low + 1)] + [(i, num_low) for i in range(1, num_high + 1)]
    if num_low == 0:
        return [(0, 0)]
    return [(i, 0) for i in range(num_high + 1)] + [(num_high, j) for j in range(1, num_low + 1)]


def _rho(positive: float, negative: float, config: ClipBoundConfig) -> float:
    """Compute the contribution of positive tokens from P and N, by one of the four readings of Eq. 8."""
    if positive + negative == 0:
        return math.nan
    if config.contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    if config.contribution == "official":
        return positive / negative if negative > 0 else math.inf
    return positive / (positive + negative)
