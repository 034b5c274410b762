"""Other losses of the ratio r_t, or of a response's ratio (docs/losses.md).

    gspo    sum_t min(s A_t, clip(s, c_low, c_high) A_t), with s the geometric mean of a response's r_t (GSPO-token,
            arXiv 2507.18071, Eq. 13)
    gmpo    sum_t g A_t, with g the geometric mean of a response's r_t, each clipped first (arXiv 2507.20673, Eq. 4)
    cispo   sum_t clip(r_t, c_low, c_high) A_t log pi_theta(t), the clipped ratio a constant (arXiv 2506.13585, Eq. 4)
    sapo    sum_t 4 / tau sigmoid(tau (r_t - 1)) A_t, with a temperature for each sign of A_t (arXiv 2511.20347, Eq. 5)
    m2po    sum_t m_t r_t A_t, with a mask m_t that bounds the second moment of log r over the update (`second_moment`,
            arXiv 2510.01161, Alg. 1)

In gspo and gmpo a response is weighted by its length, as everywhere here; their papers weight all responses equally.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from bapo_megatron.config.base import LARGEST
from bapo_megatron.config.schema_loss import BoundedLoss, CenteredLoss, ClipBoundConfig, RatioLoss, RuleReads

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.algorithms.losses import ClippedTokenLoss, LossInputs, RatioTokenLoss
    from bapo_megatron.types import ClipBounds


class GspoLoss(BoundedLoss):
    """Fixed clip bounds of a response's ratio, the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    clips = True
    reads_responses = True

    clip_low: float = Field(1 - 3e-4, gt=0, le=1)
    """Lower bound of a response's ratio: a mean over its tokens, so that it stays near 1; default as in the paper."""
    clip_high: float = Field(1 + 4e-4, ge=1, le=LARGEST)
    """Upper bound of a response's ratio; default as in the paper."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w min(s A, clip(s, c_low, c_high) A) per token, with the geometric mean s of the response's ratios.

        Each token's log-prob receives the factor s as its gradient: summed over a response y, this is |y| times the
        gradient of the geometric mean.
        """
        ratios = inputs.ratios(self)
        ratio_R = ratios.ratio_R
        mean_R = inputs.response_means(ratio_R.detach().log()).exp().to(ratio_R.dtype)
        return inputs.clipped(replace(ratios, ratio_R=mean_R * (ratio_R / ratio_R.detach())))


class GmpoLoss(BoundedLoss):
    """Geometric mean of a response's ratios, each between the bounds (GMPO, arXiv 2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    clips = True
    reads_responses = True

    clip_low: float = Field(math.exp(-0.4), gt=0, le=1)
    """Lower bound of a token's ratio; default e^-0.4, as in the paper."""
    clip_high: float = Field(math.exp(0.4), ge=1, le=LARGEST)
    """Upper bound of a token's ratio; default e^0.4, as in the paper."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w g A per token, with the geometric mean g of the response's ratios, clipped first.

        A ratio is held at its bound if A > 0 and it is over the upper bound, or A < 0 and it is under the lower one.
        Such a token has no gradient; the gradient of g reaches the others as in `GspoLoss`.
        """
        ratios = inputs.ratios(self)
        ratio_R, tokens = ratios.ratio_R, inputs.clipped(ratios)
        held_R = ratio_R.detach().masked_fill(tokens.clipped_high_R, inputs.bounds.high)
        held_R = held_R.masked_fill(tokens.clipped_low_R, inputs.bounds.low)
        mean_R = inputs.response_means(held_R.log()).exp().to(ratio_R.dtype)
        slope_R = (ratio_R / ratio_R.detach()).masked_fill(tokens.clipped_R, 1.0)
        loss_R = -ratios.weight_R * mean_R * slope_R * tokens.advantages_R
        return replace(tokens, loss_R=loss_R, ratio_R=mean_R.where(inputs.batch.mask_R, 0.0))


class CispoLoss(CenteredLoss, BoundedLoss):
    """REINFORCE weighted with the ratio between the bounds, a constant (CISPO, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"

    clip_low: float = Field(0.0, ge=0, le=1)
    """Smallest weight of a token; 0 sets no bound, as in the paper."""
    clip_high: float = Field(5.0, ge=1, le=LARGEST)
    """Largest weight of a token; the paper gives no number."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute -w clip(r, c_low, c_high) A log pi per token.

        The clipped ratio is a constant, and no token loses its gradient. The value is a multiple of log pi, not of the
        ratio: compare only the gradient with other losses.
        """
        ratios = inputs.ratios(self)
        bounded_R = self.factor(ratios.ratio_R.detach(), inputs.bounds)
        return inputs.weighted(ratios, bounded_R * inputs.log_probs_R.where(inputs.batch.mask_R, 0.0))

    def factor(self, ratio: Tensor, bounds: ClipBounds) -> Tensor:
        """Return clip(r, c_low, c_high)."""
        return ratio.clamp(bounds.low, bounds.high)


class SapoLoss(RatioLoss):
    """A soft gate of the ratio in place of bounds (SAPO, arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"

    temperature_positive: float = Field(1.0, gt=0, le=LARGEST)
    """Steepness of the gate for tokens with a positive advantage; the default is the paper's."""
    temperature_negative: float = Field(1.05, gt=0, le=LARGEST)
    """Steepness of the gate for all other tokens. Above `temperature_positive`, their gradient fades sooner."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute -w f(r) A per token with the gate f(r) = 4 / tau sigmoid(tau (r - 1)).

        The gate's slope is 1 at r = 1 and falls on both sides; tau is `temperature_positive` where A > 0, and
        `temperature_negative` elsewhere.
        """
        ratios = inputs.ratios(self)
        is_positive_R = inputs.batch.advantages_R > 0
        tau_R = ratios.ratio_R.detach().new_full(ratios.ratio_R.shape, self.temperature_negative)
        tau_R = tau_R.masked_fill(is_positive_R, self.temperature_positive)
        return inputs.weighted(ratios, 4 / tau_R * (tau_R * (ratios.ratio_R - 1)).sigmoid())


class M2poLoss(RatioLoss):
    """No clip bounds, but a limit on the second moment of the log-ratios (M2PO, arXiv 2510.01161)."""

    name: Literal["m2po"] = "m2po"
    rule = "bapo_megatron.algorithms.second_moment:SecondMomentRule"
    clips = True

    max_second_moment: float = Field(0.04, gt=0, le=LARGEST)
    """Largest mean of (log r)^2, in nats squared, over the tokens that an update moves further away (A > 0 and r > 1,
    or A < 0 and r < 1). Until it is met, the tokens with the largest values are masked. The default is the paper's."""

    def rule_reads(self, bapo: ClipBoundConfig) -> RuleReads:
        """Return "update": the limit is on all tokens of the update."""
        return "update"

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w r A per token, and 0 for masked tokens, with the bounds of `SecondMomentRule`.

        A token is masked if A > 0 and r is on or over the upper bound, or A < 0 and r is on or under the lower one.
        """
        tokens = inputs.clipped(inputs.ratios(self))
        return replace(tokens, loss_R=tokens.loss_R.masked_fill(tokens.clipped_R, 0.0))
