"""Losses that treat a share of the update's tokens differently, selected exactly by `top_share` (docs/losses.md).

    clip_cov     sum_t m_t min(r_t A_t, clip(r_t, c_low, c_high) A_t), m_t = 0 for tokens drawn from a band of c_t
    kl_cov       sum_t r_t A_t - beta m_t |log r_t|, m_t = 1 for the largest c_t only
    top_entropy  sum_t m_t min(r_t A_t, clip(r_t, c_low, c_high) A_t), m_t = 1 for the largest entropies only

c_t = (A_t - mean A) (log pi_t - mean log pi) is a token's part of the covariance that lowers entropy (arXiv 2505.22617,
verl's compute_policy_loss_clip_cov and _kl_cov). The mask by entropy follows arXiv 2506.01939.
Tokens that a mask leaves out stay in the divisor, as in both papers.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from bapo_megatron.config.base import LARGEST, ContradictionError, Positive, Violation
from bapo_megatron.config.schema_loss import BoundedLoss, ClippedLoss, SelectingLoss

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.algorithms.losses import ClippedTokenLoss, LossInputs, RatioTokenLoss, ScoredTokens
    from bapo_megatron.algorithms.top_share import Selection, UpdateMeans


class ClipCovLoss(SelectingLoss, ClippedLoss, BoundedLoss):
    """Fixed bounds; tokens drawn from a band of high covariance have no gradient (Clip-Cov, arXiv 2505.22617)."""

    name: Literal["clip_cov"] = "clip_cov"

    share: float = Field(2e-4, gt=0, le=1)
    """Share of the update's tokens without gradient, rounded down; they are drawn from a band of covariances, from
    which clipped tokens are left out. The default is the paper's."""
    covariance_low: float = Field(1.0, ge=-LARGEST, le=LARGEST)
    """Lower end of the band, in nats times advantage."""
    covariance_high: float = Field(5.0, ge=-LARGEST, le=LARGEST)
    """Upper end of the band."""

    @model_validator(mode="after")
    def _check_band(self) -> Self:
        if self.covariance_low >= self.covariance_high:
            text = f"must be below loss.covariance_high, as no token could be selected, got {self.covariance_low:g}"
            raise ContradictionError(Violation(("covariance_low", "covariance_high"), text))
        return self

    def scores(self, tokens: ScoredTokens, means: UpdateMeans) -> Tensor:
        """Return lots for the tokens in the band that are not clipped, -inf for all others."""
        covariance_R, advantages_R = means.covariance(tokens), tokens.batch.advantages_R
        ratio_R = tokens.ratios(self).ratio_R.detach().double()
        clipped_high_R = (advantages_R > 0) & (ratio_R >= self.clip_high)
        clipped_low_R = (advantages_R < 0) & (ratio_R <= self.clip_low)
        in_band_R = (covariance_R > self.covariance_low) & (covariance_R < self.covariance_high)
        return tokens.lots().where(in_band_R & ~clipped_high_R & ~clipped_low_R, -math.inf)

    def tokens(self, inputs: LossInputs[Selection]) -> ClippedTokenLoss:
        """Compute `LossInputs.clipped`, with a weight of 0 for selected tokens."""
        ratios = inputs.ratios(self)
        weight_R = ratios.weight_R.masked_fill(self.selected(inputs), 0.0)
        return inputs.clipped(replace(ratios, weight_R=weight_R), dual_clip=self.dual_clip)


class KlCovLoss(SelectingLoss):
    """No bounds, but a KL penalty on the tokens with the largest covariance (KL-Cov, arXiv 2505.22617)."""

    name: Literal["kl_cov"] = "kl_cov"

    share: float = Field(2e-4, gt=0, le=1)
    """Share of the update's tokens with the penalty, rounded down. The default is the paper's for 32B parameters; for
    7B it is ten times as large."""
    penalty: Positive = 1.0
    """Weight beta of |log r| on a selected token; the default is the paper's, and 0.1 in verl's configuration."""

    def scores(self, tokens: ScoredTokens, means: UpdateMeans) -> Tensor:
        """Return the covariances."""
        return means.covariance(tokens)

    def tokens(self, inputs: LossInputs[Selection]) -> RatioTokenLoss:
        """Compute -w r A per token, and w (beta |log r| - r A) for selected tokens."""
        ratios = inputs.ratios(self)
        record = inputs.weighted(ratios, ratios.ratio_R)
        distance_R = ratios.ratio_R.log().abs().where(self.selected(inputs), 0.0)
        return replace(record, loss_R=record.loss_R + self.penalty * ratios.weight_R * distance_R)


class TopEntropyLoss(SelectingLoss, ClippedLoss, BoundedLoss):
    """Fixed bounds; only the tokens with the largest entropy have a gradient (arXiv 2506.01939)."""

    name: Literal["top_entropy"] = "top_entropy"
    reads_entropy = True

    share: float = Field(0.2, gt=0, le=1)
    """Share of the update's tokens that learn, rounded down: those with the largest entropy. The default is the
    paper's."""

    def scores(self, tokens: ScoredTokens, means: UpdateMeans) -> Tensor:
        """Return the entropies."""
        assert tokens.entropy_R is not None, "`reads_entropy` asks for them"
        return tokens.entropy_R

    def tokens(self, inputs: LossInputs[Selection]) -> ClippedTokenLoss:
        """Compute `LossInputs.clipped`, with a weight of 0 for tokens that are not selected."""
        ratios = inputs.ratios(self)
        weight_R = ratios.weight_R.masked_fill(~self.selected(inputs), 0.0)
        return inputs.clipped(replace(ratios, weight_R=weight_R), dual_clip=self.dual_clip)
