"""Losses per token: a loss turns a micro-batch into a record of per-token values.

The clipped policy loss maximises sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t). Its bounds come from BAPO's
search, or from the configuration (`fixed_bounds`). There are two ways to measure how far a token's policy has moved:

    proximal = "behaviour"   r_t = pi_theta / pi_rollout, w_t = 1. pi_rollout is the policy that sampled this very token
                             (BAPO, arXiv 2510.18927; PPO, arXiv 1707.06347).
    proximal = "learner"     r_t = pi_theta / pi_prox, w_t = min(pi_prox / pi_rollout, cap), a constant. pi_prox is the
                             learner at the start of the step (decoupled PPO, arXiv 2110.00641, 2505.24298).

The other losses of that ratio, with the bounds of their own section:

    gspo    sum_t min(s A_t, clip(s, c_low, c_high) A_t), with s the geometric mean of a response's r_t (GSPO-token,
            arXiv 2507.18071, Eq. 13)
    gmpo    sum_t g A_t, with g the geometric mean of a response's r_t, each clipped first (arXiv 2507.20673, Eq. 4)
    cispo   sum_t clip(r_t, c_low, c_high) A_t log pi_theta(t), the clipped ratio a constant (arXiv 2506.13585, Eq. 4)
    sapo    sum_t 4 / tau sigmoid(tau (r_t - 1)) A_t, with a temperature for each sign of A_t (arXiv 2511.20347, Eq. 5)
    m2po    sum_t m_t r_t A_t, with a mask m_t that bounds the second moment of log r over the update (`second_moment`,
            arXiv 2510.01161, Alg. 1)

A response is weighted by its length in gspo and gmpo, as everywhere here; their papers weight all responses alike.

The supervised loss maximises sum_t log pi_theta(t).

Nothing here is a sum or a mean: the learner sums losses and metrics over tokens, micro-batches and ranks, and divides
once, by the token count of the whole optimizer step.

Shape legend: R response tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.config.schema_loss import (
    BoundedLoss,
    CispoLoss,
    ClippedLoss,
    CustomLoss,
    GmpoLoss,
    GspoLoss,
    LossConfig,
    M2poLoss,
    RatioLoss,
    SapoLoss,
)
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
    over_context: Callable[[Tensor], Tensor] = lambda table: table
    """Sums a float64 table over the ranks that hold the other tokens of these responses; all of them call it."""


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
class RatioTokenLoss(TokenLoss):
    """The record of a loss of ratios."""

    ratio_R: Tensor  # r_t, or the response's
    weight_R: Tensor  # w_t
    advantages_R: Tensor
    capped_R: Tensor  # bool: w_t is at its cap

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokenLoss(RatioTokenLoss):
    """The record of a loss that gives no gradient to clipped tokens."""

    clipped_high_R: Tensor  # bool: A > 0 and on or over the upper bound, so without gradient
    clipped_low_R: Tensor  # bool: A < 0 and on or under the lower bound
    dual_clipped_R: Tensor  # bool: A < 0 and on or over `dual_clip`

    @property
    def clipped_R(self) -> Tensor:
        return self.clipped_high_R | self.clipped_low_R | self.dual_clipped_R


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
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    return _clipped(inputs, config, ratio_R, weight_R, dual_clip=config.dual_clip)


def gspo_loss(inputs: LossInputs, config: GspoLoss) -> ClippedTokenLoss:
    """Compute -w min(s A, clip(s, c_low, c_high) A) per token, with the geometric mean s of the response's ratios.

    The gradient of s reaches each token through its own log-prob, with the factor s: summed over a response it is
    |y| times that of s, the geometric mean.
    """
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    mean_R = response_means(ratio_R.detach().log(), inputs).exp().to(ratio_R.dtype)
    return _clipped(inputs, config, mean_R * (ratio_R / ratio_R.detach()), weight_R)


def gmpo_loss(inputs: LossInputs, config: GmpoLoss) -> ClippedTokenLoss:
    """Compute -w g A per token: g is the geometric mean of the response's ratios, each held at its bound where A > 0
    and it is over the upper, or A < 0 and it is under the lower. A token held there has no gradient; the gradient of g
    reaches the others as in `gspo_loss`.
    """
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    tokens = _clipped(inputs, config, ratio_R, weight_R)
    held_R = torch.where(tokens.clipped_high_R, inputs.bounds.high, ratio_R.detach())
    held_R = torch.where(tokens.clipped_low_R, inputs.bounds.low, held_R)
    mean_R = response_means(held_R.log(), inputs).exp().to(ratio_R.dtype)
    slope_R = torch.where(tokens.clipped_R, 1.0, ratio_R / ratio_R.detach())
    loss_R = -weight_R * mean_R * slope_R * tokens.advantages_R
    return replace(tokens, loss_R=loss_R, ratio_R=torch.where(inputs.batch.mask_R, mean_R, 0.0))


def cispo_loss(inputs: LossInputs, config: CispoLoss) -> RatioTokenLoss:
    """Compute -w clip(r, c_low, c_high) A log pi per token: the clipped ratio is a constant, and no token loses its
    gradient.

    The value is a multiple of log pi, not of the ratio: compare only the gradient with other losses.
    """
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    bounded_R = ratio_R.detach().clamp(inputs.bounds.low, inputs.bounds.high)
    log_probs_R = torch.where(inputs.batch.mask_R, inputs.log_probs_R, 0.0)
    return RatioTokenLoss(**_record(inputs, config, ratio_R, weight_R, bounded_R * log_probs_R))


def sapo_loss(inputs: LossInputs, config: SapoLoss) -> RatioTokenLoss:
    """Compute -w f(r) A per token with the gate f(r) = 4 / tau sigmoid(tau (r - 1)), whose slope is 1 at r = 1 and
    falls to both sides; tau is `temperature_positive` where A > 0, else `temperature_negative`.
    """
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    is_positive_R = inputs.batch.advantages_R > 0
    tau_R = torch.full_like(ratio_R, config.temperature_negative).masked_fill(
        is_positive_R, config.temperature_positive
    )
    gate_R = 4 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1))
    return RatioTokenLoss(**_record(inputs, config, ratio_R, weight_R, gate_R))


def m2po_loss(inputs: LossInputs, config: M2poLoss) -> ClippedTokenLoss:
    """Compute -w r A per token, but 0 where the token is masked: A > 0 and r on or over the upper bound, or A < 0 and r
    on or under the lower one. The bounds are those of `second_moment_bounds`.
    """
    ratio_R, weight_R = ratio_and_weight(inputs.batch, inputs.log_probs_R, config.importance_cap)
    tokens = _clipped(inputs, config, ratio_R, weight_R)
    return replace(tokens, loss_R=tokens.loss_R.masked_fill(tokens.clipped_R, 0.0))


def response_means(values_R: Tensor, inputs: LossInputs) -> Tensor:
    """Return, for each token, the mean of `values_R` over the trained tokens of its response, on all context ranks.

    Args:
        values_R: without gradient; those of masked tokens must be finite, and are left out.

    Returns float64 [R]; 0 where a response has no trained token.
    """
    batch = inputs.batch
    places_S1 = torch.arange(batch.cu_seqlens_S1.numel(), device=batch.sequence_R.device)
    starts_S1 = torch.searchsorted(batch.sequence_R, places_S1)  # a count per response would make the CPU wait
    columns_2R = torch.stack([torch.where(batch.mask_R, values_R, 0.0).double(), batch.mask_R.double()])
    # Segments are summed in order; scattered additions would come in another order in each run on a GPU.
    table_2S = torch.stack(
        [torch.segment_reduce(column_R, "sum", offsets=starts_S1, unsafe=True) for column_R in columns_2R]
    )
    total_S, count_S = inputs.over_context(table_2S)
    return (total_S / count_S.clamp(min=1))[batch.sequence_R]


def _clipped(
    inputs: LossInputs, config: RatioLoss, ratio_R: Tensor, weight_R: Tensor, dual_clip: float | None = None
) -> ClippedTokenLoss:
    """Bound the ratio of each token; see `clipped_policy_loss`."""
    bounds = inputs.bounds
    advantages_R = torch.where(inputs.batch.mask_R, inputs.batch.advantages_R, 0.0)
    exact_R = ratio_R.detach().double()
    clipped_high_R = (advantages_R > 0) & (exact_R >= bounds.high)
    clipped_low_R = (advantages_R < 0) & (exact_R <= bounds.low)
    dual_clipped_R = (advantages_R < 0) & (exact_R >= (dual_clip or math.inf))

    bounded_R = torch.where(clipped_high_R, bounds.high, ratio_R)
    bounded_R = torch.where(clipped_low_R, bounds.low, bounded_R)
    if dual_clip is not None:
        bounded_R = torch.where(dual_clipped_R, dual_clip, bounded_R)
    return ClippedTokenLoss(
        **_record(inputs, config, ratio_R, weight_R, bounded_R),
        clipped_high_R=clipped_high_R,
        clipped_low_R=clipped_low_R,
        dual_clipped_R=dual_clipped_R,
    )


def _record(
    inputs: LossInputs, config: RatioLoss, ratio_R: Tensor, weight_R: Tensor, objective_R: Tensor
) -> dict[str, Any]:
    """Return the fields of a `RatioTokenLoss` that maximises w A times `objective_R`."""
    mask_R = inputs.batch.mask_R
    advantages_R = torch.where(mask_R, inputs.batch.advantages_R, 0.0)
    is_decoupled = inputs.batch.proximal_logprobs_R is not None
    return {
        "inputs": inputs,
        "loss_R": -weight_R * objective_R * advantages_R,
        "ratio_R": torch.where(mask_R, ratio_R.detach(), 0.0),
        "weight_R": torch.where(mask_R, weight_R, 0.0),
        "advantages_R": advantages_R,
        "capped_R": mask_R & (weight_R >= (config.importance_cap if is_decoupled else math.inf)),
    }


def supervised_loss(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Compute -log pi per token, in nats: maximum likelihood of the trained tokens, without advantages and bounds."""
    return TokenLoss(inputs, -torch.where(inputs.batch.mask_R, inputs.log_probs_R, 0.0))


LOSSES: dict[str, Callable[[LossInputs, Any], TokenLoss]] = {
    "bapo": clipped_policy_loss,
    "grpo": clipped_policy_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "m2po": m2po_loss,
    "sft": supervised_loss,
}
"""Built-in losses by `loss.name`, each called with its own section."""


def policy_loss(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """Compute the loss that `loss.name` names."""
    return config.function(inputs) if isinstance(config, CustomLoss) else LOSSES[config.name](inputs, config)


def fixed_bounds(config: LossConfig) -> ClipBounds:
    """Return the bounds of a loss that does not search for them: those of its section, or nan."""
    assert config.bounds in ("fixed", "none"), f"the bounds of {config.name} come from its search"
    low, high = (config.clip_low, config.clip_high) if isinstance(config, BoundedLoss) else (math.nan, math.nan)
    return ClipBounds(low=low, high=high, positive_share=math.nan, saturated=False, num_moves=0)
