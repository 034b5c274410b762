"""M2PO's trust region: an update masks tokens until the second moment of its log-ratios is small.

Algorithm 1 of arXiv 2510.01161, over the tokens of a whole optimizer update:

    T = trained tokens that the update moves further away: A > 0 and r > 1, or A < 0 and r < 1
    while mean over T of (log r)^2 > limit:
        mask the token of T with the largest (log r)^2, and remove it from T

So the masked tokens are those of T with |log r| >= theta. They are the tokens without gradient between the clip bounds
e^-theta and e^theta, in which form the loss gets them. The mean of the n smallest squares grows with n: theta is the
first value at which the mean of all squares up to it exceeds the limit. Three sums over ranks find it exactly, for any
split of the update: each counts the tokens and adds their squares in intervals of |log r|, and the next one divides the
interval in which the mean crosses the limit. The intervals are ranges of the bits of float32 numbers, which are in the
order of the numbers.

Tokens whose |log r| are equal in float32 are masked together. The paper leaves their order open.

Two programs read the paper otherwise. The authors' (github.com/Infini-AI-Lab/M2PO) clips: it searches for bounds at
which the mean of min((log r)^2, theta^2) meets the limit, and takes none narrower than 0.7 and 1.5. AReaL's mask counts
all tokens, whichever way they move, and takes the ratio of the proximal to the behaviour policy.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.types import ClipBounds

_SHIFTS = (22, 11, 0)  # of the 31 bits of a float32 without its sign: three digits of base _BASE
_BASE = 2048


def moving_away(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return |log r| of the tokens of T, in nats, float64 [N], on the CPU.

    All tensors have one shape [...]; masked tokens may hold anything.
    """
    is_away = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return ratio[mask & is_away].double().log().abs().cpu()


def second_moment_bounds(log_ratios: Tensor, limit: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> ClipBounds:
    """Return the bounds e^-theta, e^theta of an update, the same on every rank; 0 and infinity if they mask no token.

    Args:
        log_ratios: of this rank's tokens, from `moving_away`.
        limit: largest second moment, in nats squared.
        sum_over_ranks: returns the sum of a float64 table [2, 2048] on the CPU over all ranks that hold other tokens of
            the update. It is called once or three times.
    """
    bits = log_ratios.float().view(torch.int32)
    values = torch.stack([torch.ones_like(log_ratios), log_ratios.square()])
    start, below = 0, torch.zeros(2, dtype=torch.float64)  # of the interval; count and sum of squares of smaller ones
    for shift in _SHIFTS:
        digit = (bits - start) >> shift
        inside = (digit >= 0) & (digit < _BASE)
        own = torch.zeros(2, _BASE, dtype=torch.float64).index_add_(1, digit[inside], values[:, inside])
        table = sum_over_ranks(own).cpu()
        counts, squares = below[:, None] + table.cumsum(1)
        is_over = squares > limit * counts
        if shift != _SHIFTS[0]:
            is_over[-1] = (
                True  # known from the round before; another order of additions may hide it by a rounding error
            )
        elif not is_over.any():
            return _bounds(math.inf)
        first = int(is_over.int().argmax())
        start, below = start + (first << shift), below + table[:, :first].sum(1)
    # Half-way to the float32 number before, so that the rounding of log and exp cannot put a token on the other side.
    smaller, smallest_masked = torch.tensor([max(start - 1, 0), start], dtype=torch.int32).view(torch.float32).tolist()
    return _bounds((smaller + smallest_masked) / 2)


def _bounds(theta: float) -> ClipBounds:
    return ClipBounds(math.exp(-theta), math.exp(theta), positive_share=math.nan, saturated=False, num_moves=0)
