"""M2PO's trust region: an update masks tokens until the second moment of its log-ratios is small.

Algorithm 1 of arXiv 2510.01161, over the tokens of a whole optimizer update:

    T = trained tokens that the update moves further away: A > 0 and r > 1, or A < 0 and r < 1
    while mean over T of (log r)^2 > limit:
        mask the token of T with the largest (log r)^2, and remove it from T

So the masked tokens are the tokens of T with |log r| >= theta. The loss gets them as clip bounds e^-theta and e^theta,
at and beyond which these tokens have no gradient. The mean of the n smallest squares grows with n: theta is the first
value at which the mean of all squares up to it exceeds the limit. Three sums over ranks find it exactly, for any split
of the update: each counts the tokens and adds their squares in intervals of |log r|, and the next one divides the
interval in which the mean crosses the limit. The intervals are ranges of float32 bit patterns, which sort like the
numbers.

Tokens whose |log r| are equal in float32 are masked together. The paper leaves their order open.

Two programs read the paper differently. The authors' code (github.com/Infini-AI-Lab/M2PO) clips: it searches for bounds
at which the mean of min((log r)^2, theta^2) meets the limit, and never takes bounds narrower than 0.7 and 1.5. AReaL's
mask counts all tokens, whichever way they move, and uses the ratio of the proximal to the behaviour policy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.update_rules import Again, BoundsRule
from bapo_megatron.types import ClipBounds

_SHIFTS = (22, 11, 0)  # split the 31 bits of a float32 without its sign into three digits of base _BASE
_BASE = 2048


@dataclass(frozen=True, slots=True)
class _Interval:
    """The interval of |log r| in which the mean crosses the limit, after `num_rounds` rounds."""

    num_rounds: int
    start: int  # bits of its first number
    below: Tensor  # float64 [2]: number and sum of squares of smaller numbers


_WHOLE = _Interval(0, 0, torch.zeros(2, dtype=torch.float64))


class SecondMomentRule(BoundsRule):
    """M2PO's limit, `loss.max_second_moment`: the bounds e^-theta and e^theta; 0 and infinity if no token is masked."""

    shape = (2, _BASE)

    def values(self, tokens: ScoredTokens) -> Tensor:
        """Return |log r| of the tokens of T; tokens without weight do not count."""
        ratios = tokens.ratios(self.options)
        return moving_away(ratios.ratio_R, tokens.batch.advantages_R, tokens.batch.mask_R & (ratios.weight_R > 0))

    def table(self, values: Tensor, so_far: _Interval | None) -> Tensor:
        """Count the tokens in each part of the interval, and add up their squares."""
        interval = so_far or _WHOLE
        columns = torch.stack([torch.ones_like(values), values.square()])
        digit = (values.float().view(torch.int32) - interval.start) >> _SHIFTS[interval.num_rounds]
        inside = (digit >= 0) & (digit < _BASE)
        table = torch.zeros(self.shape, dtype=torch.float64)
        return table.index_add_(1, digit[inside], columns[:, inside])

    def decide(self, total: Tensor, so_far: _Interval | None) -> ClipBounds | Again:
        """Find the part in which the mean crosses the limit; in the last round, find the number."""
        interval = so_far or _WHOLE
        counts, squares = interval.below[:, None] + total.cumsum(1)
        is_over = squares > self.options.max_second_moment * counts
        if interval.num_rounds:
            is_over[-1] = (
                True  # known from the previous round; a different order of additions may hide it by a rounding error
            )
        elif not is_over.any():
            return _bounds(math.inf)
        first = int(is_over.int().argmax())
        shift = _SHIFTS[interval.num_rounds]
        start, below = interval.start + (first << shift), interval.below + total[:, :first].sum(1)
        if interval.num_rounds + 1 < len(_SHIFTS):
            return Again(_Interval(interval.num_rounds + 1, start, below))
        # Half-way to the previous float32 number, so that rounding in log and exp puts no token on the other side.
        bits = torch.tensor([max(start - 1, 0), start], dtype=torch.int32)
        smaller, smallest_masked = bits.view(torch.float32).tolist()
        return _bounds((smaller + smallest_masked) / 2)


def moving_away(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return |log r| of the tokens of T, in nats, float64 [N], on the CPU.

    All tensors have the same shape [...]; masked tokens may hold anything.
    """
    is_away = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return ratio[mask & is_away].double().log().abs().cpu()


def _bounds(theta: float) -> ClipBounds:
    return ClipBounds(math.exp(-theta), math.exp(theta), positive_share=math.nan, saturated=False, num_moves=0)
