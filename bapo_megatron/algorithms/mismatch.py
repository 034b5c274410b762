"""Difference between the engine's and the trainer's log-probs at the same weights: zero in theory, not in practice.

Different kernels, a different order of additions, 16-bit weights, a stale or torn weight update: each moves the
log-probs that the engine reports away from those that the trainer computes, and the policy gradient is then off-policy
without anyone noticing (arXiv 2510.26788 and the note on truncated importance sampling at
fengyao.notion.site/off-policy-rl measure it).

Everything is a sum over tokens, or a maximum, so that micro-batches, ranks and updates combine exactly. The quantile
is read off a histogram with 100 bins per decade.

Shape legend: R response tokens of a micro-batch; B bins of the histogram.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import MAX_LOG_RATIO

_DECADES = (-8, 2)  # the bins cover 1e-8 to 100 nats; smaller differences count as 0, larger ones as the maximum
_BINS_PER_DECADE = 100


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences |d| of some tokens, in nats; d is the trainer's log-prob minus the engine's. `+` adds more tokens."""

    sums: Tensor  # float64 [2 + B]: sum of |d|, sum of the KL estimator, then the histogram of |d|
    largest: Tensor  # float64 scalar: max |d|, 0 without tokens

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.sums + other.sums, torch.maximum(self.largest, other.largest))

    @property
    def num_tokens(self) -> int:
        return int(self.sums[2:].sum())

    @property
    def mean(self) -> float:
        """Mean |d|, in nats; nan without tokens."""
        return float(self.sums[0]) / self.num_tokens if self.num_tokens else math.nan

    @property
    def kl(self) -> float:
        """KL(engine || trainer) in nats, estimator k3 = e^d - 1 - d (joschu.net/blog/kl-approx.html).

        The tokens are the engine's samples, so the mean is unbiased, and no term is negative. It is nan without tokens.
        """
        return float(self.sums[1]) / self.num_tokens if self.num_tokens else math.nan

    def quantile(self, share: float) -> float:
        """Return the smallest |d| that at least `share` of the tokens do not exceed; nan without tokens.

        It is exact to 1.2 % (and 1e-8 nats).
        """
        if not self.num_tokens:
            return math.nan
        rank = max(1, math.ceil(share * self.num_tokens))
        bin = int(torch.searchsorted(self.sums[2:].cumsum(0), float(rank)))
        if bin == 0:
            return 0.0
        if bin == self.sums.numel() - 3:
            return float(self.largest)
        centre = 10.0 ** (_DECADES[0] + (bin - 0.5) / _BINS_PER_DECADE)
        return min(centre, float(self.largest))


def logprob_mismatch(log_probs_R: Tensor, behaviour_logprobs_R: Tensor, counted_R: Tensor) -> Mismatch:
    """Measure the differences for the tokens in `counted_R` (bool); others may hold anything.

    Args:
        log_probs_R: the trainer's log-probs, float, nats; no gradient flows.
        behaviour_logprobs_R: the engine's log-probs, float, nats.

    Returns a Mismatch on the device of its inputs. A difference that is not a number makes its mean and KL nan.
    """
    difference = log_probs_R.detach().double() - behaviour_logprobs_R.double()
    difference = torch.where(counted_R, difference, 0.0)  # selecting the tokens would wait for the GPU to count them
    size = difference.abs()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    low, high = _DECADES
    num_edges = (high - low) * _BINS_PER_DECADE + 1
    edges = torch.logspace(low, high, num_edges, dtype=torch.float64, device=size.device)
    bins = torch.bucketize(size, edges, right=True)  # number of edges <= |d|
    sums = size.new_zeros(2 + num_edges + 1)
    sums[0], sums[1] = size.sum(), (bounded.expm1() - bounded).sum()
    sums[2:].index_add_(0, bins, counted_R.double())
    return Mismatch(sums, size.amax() if size.numel() else size.new_zeros(()))


def no_mismatch(device: torch.device | str = "cpu") -> Mismatch:
    """Return the zero element for summation."""
    none = torch.zeros(0, device=device)
    return logprob_mismatch(none, none, none.bool())
