"""Losses per token: a loss turns a micro-batch into a record of per-token values.

The clipped policy loss maximises sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t). Its bounds come from BAPO's
search, or from the configuration (`fixed_bounds`). There are two ways to measure how far a token's policy has moved:

    proximal = "behaviour"   r_t = pi_theta / pi_rollout, w_t = 1. pi_rollout is the policy that sampled this very token
                             (BAPO, arXiv 2510.18927; PPO, arXiv 1707.06347).
    proximal = "learner"     r_t = pi_theta / pi_prox, w_t = min(pi_prox / pi_rollout, cap), a constant. pi_prox is the
                             learner at the start of the step (decoupled PPO, arXiv 2110.00641, 2505.24298).

The supervised loss maximises sum_t log pi_theta(t).

Nothing here is a sum or a mean: the learner sums losses and metrics over tokens, micro-batches and ranks, and divides
once, by the token count of the whole optimizer step.

Shape legend: R response tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.config.schema_loss import ClippedLoss, CustomLoss, GrpoLoss, LossConfig
from bapo_megatron.types import ClipBounds, MicroBatch

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond any bound, and far from overflow


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch, with log-probs and entropies at the current weights. Masked tokens may hold anything."""

    batch: MicroBatch
    log_probs_R: Tensor  # float32, nats, of the current weights, with gradient
    entropy_R: Tensor  # float32, nats, of the current weights, without gradient; for the metrics
    ages_R: Tensor  # int64: optimizer updates since each token was sampled
    bounds: ClipBounds  # of this optimizer step


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and the values that metrics are made of (`Metric.of`). All are 0 where masked.

    A loss with further values returns a subclass. A metric applies if the record has its field, and it is not None.
    """

    inputs: LossInputs
    loss_R: Tensor  # to be summed and divided by the step's token count; with gradient
    kl_reference_R: Tensor | None = None  # nats, from the policy to the reference; set by the learner

    @property
    def mask_R(self) -> Tensor:
        return self.inputs.batch.mask_R

    @property
    def entropy_R(self) -> Tensor:
        return torch.where(self.mask_R, self.inputs.entropy_R, 0.0)

    @property
    def ages_R(self) -> Tensor:
        return torch.where(self.mask_R, self.inputs.ages_R, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokenLoss(TokenLoss):
    """The record of the clipped policy loss."""

    ratio_R: Tensor  # r_t
    weight_R: Tensor  # w_t
    advantages_R: Tensor
    clipped_high_R: Tensor  # bool: A > 0 and on or over the upper bound, so without gradient
    clipped_low_R: Tensor  # bool: A < 0 and on or under the lower bound
    dual_clipped_R: Tensor  # bool: A < 0 and on or over `dual_clip`
    capped_R: Tensor  # bool: w_t is at its cap

    @property
    def clipped_R(self) -> Tensor:
        return self.clipped_high_R | self.clipped_low_R | self.dual_clipped_R

    @property
    def positive_R(self) -> Tensor:
        return self.advantages_R > 0

    @property
    def negative_R(self) -> Tensor:
        return self.advantages_R < 0

    @property
    def positive_mass_R(self) -> Tensor:
        return torch.where(self.positive_R, -self.loss_R, 0.0)

    @property
    def negative_mass_R(self) -> Tensor:
        return torch.where(self.negative_R, self.loss_R, 0.0)

    @property
    def approx_kl_R(self) -> Tensor:
        """KL divergence from the rollout's policy to the current one, in nats, estimator k3."""
        ratio_R = importance_ratio(self.inputs.log_probs_R, self.inputs.batch.behaviour_logprobs_R, self.mask_R)
        return ratio_R - 1 - ratio_R.log()


def importance_ratio(log_probs: Tensor, denominator_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return pi / pi_denominator per token; 1 where masked.

    A log-ratio beyond +-20 is cut there and carries no gradient; the gradient of nan is nan, so its update is skipped.
    """
    # The inputs are selected, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    log_ratio = torch.where(mask, log_probs - denominator_logprobs, 0.0)
    cut = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, cut, log_ratio).exp()  # the gradient of clamp hides a nan


def ratio_and_weight(batch: MicroBatch, log_probs_R: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return r_t and w_t of the objective, for the loss and the search for its bounds alike; both are 1 where masked.

    Args:
        log_probs_R: nats, of the current weights; r_t keeps their gradient, w_t has none.
        cap: largest w_t (`loss.importance_cap`), at least 1.
    """
    if batch.proximal_logprobs_R is None:
        ratio_R = importance_ratio(log_probs_R, batch.behaviour_logprobs_R, batch.mask_R)
        return ratio_R, torch.ones_like(ratio_R)
    weight_R = importance_ratio(batch.proximal_logprobs_R, batch.behaviour_logprobs_R, batch.mask_R).clamp(max=cap)
    return importance_ratio(log_probs_R, batch.proximal_logprobs_R, batch.mask_R), weight_R.detach()


def clipped_policy_loss(inputs: LossInputs, config: ClippedLoss) -> ClippedTokenLoss:
    """Compute -w min(r A, clip(r, c_low, c_high) A) per token; with `dual_clip` c, at most w c |A| where A < 0 (arXiv
    1912.09729).

    A token on its bound is clipped, without gradient, as in the `gradient` reading of the search. The bounds are
    compared in float64, as in the search.
    """
    batch, bounds = inputs.batch, inputs.bounds
    ratio_R, weight_R = ratio_and_weight(batch, inputs.log_probs_R, config.importance_cap)
    advantages_R = torch.where(batch.mask_R, batch.advantages_R, 0.0)
    exact_R = ratio_R.detach().double()
    clipped_high_R = (advantages_R > 0) & (exact_R >= bounds.high)
    clipped_low_R = (advantages_R < 0) & (exact_R <= bounds.low)
    dual_clipped_R = (advantages_R < 0) & (exact_R >= (config.dual_clip or math.inf))

    bounded_R = torch.where(clipped_high_R, bounds.high, ratio_R)
    bounded_R = torch.where(clipped_low_R, bounds.low, bounded_R)
    if config.dual_clip is not None:
        bounded_R = torch.where(dual_clipped_R, config.dual_clip, bounded_R)
    is_decoupled = batch.proximal_logprobs_R is not None
    return ClippedTokenLoss(
        inputs,
        -weight_R * bounded_R * advantages_R,
        ratio_R=torch.where(batch.mask_R, ratio_R.detach(), 0.0),
        weight_R=torch.where(batch.mask_R, weight_R, 0.0),
        advantages_R=advantages_R,
        clipped_high_R=clipped_high_R,
        clipped_low_R=clipped_low_R,
        dual_clipped_R=dual_clipped_R,
        capped_R=batch.mask_R & (weight_R >= (config.importance_cap if is_decoupled else math.inf)),
    )


def supervised_loss(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Compute -log pi per token, in nats: maximum likelihood of the trained tokens, without advantages and bounds."""
    return TokenLoss(inputs, -torch.where(inputs.batch.mask_R, inputs.log_probs_R, 0.0))


LOSSES: dict[str, Callable[[LossInputs, Any], TokenLoss]] = {
    "bapo": clipped_policy_loss,
    "grpo": clipped_policy_loss,
    "sft": supervised_loss,
}
"""Built-in losses by `loss.name`, each called with its own section."""


def policy_loss(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Compute the loss that `loss.name` names."""
    return config.function(inputs) if isinstance(config, CustomLoss) else LOSSES[config.name](inputs, config)


def fixed_bounds(config: LossConfig) -> ClipBounds:
    """Return the bounds of a loss that does not search for them: those of its section, or nan."""
    assert config.bounds != "bapo", "bapo's bounds come from its search"
    low, high = (config.clip_low, config.clip_high) if isinstance(config, GrpoLoss) else (math.nan, math.nan)
    return ClipBounds(low=low, high=high, positive_share=math.nan, saturated=False, num_moves=0)
