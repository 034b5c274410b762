"""Losses per token: a loss turns a micro-batch into a record of per-token values.

The clipped policy loss maximises sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t). Its bounds come from BAPO's
search, or from the configuration (`fixed_bounds`). There are two ways to measure how far a token's policy has moved:

    proximal = "behaviour"   r_t = pi_theta / pi_rollout, w_t = 1. pi_rollout is the policy that sampled this very token
                             (BAPO, arXiv 2510.18927; PPO, arXiv 1707.06347).
    proximal = "learner"     r_t = pi_theta / pi_prox, and w_t is pi_prox / pi_rollout between bounds, a constant.
                             pi_prox is the learner at the start of the step (decoupled PPO, arXiv 2110.00641,
                             2505.24298).

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


def _no_context(table: Tensor) -> Tensor:
    return table


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch, with log-probs and entropies at the current weights. Masked tokens may hold anything."""

    batch: MicroBatch
    log_probs_R: Tensor  # float32, nats, of the current weights, with gradient
    entropy_R: Tensor  # float32, nats, of the current weights, without gradient; for the metrics
    ages_R: Tensor  # int64: optimizer updates since each token was sampled
    bounds: ClipBounds  # of this optimizer step
    over_context: Callable[[Tensor], Tensor] = _no_context
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
    capped_R: Tensor  # bool: the importance weight was moved to a bound, or masked beyond it
    drifted_R: Tensor | None = None  # bool: masked by `max_drift`; None without it

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


@dataclass(frozen=True, slots=True)
class TokenRatios:
    """The ratios of a micro-batch and the weights of its tokens, for the loss and the search for its bounds alike."""

    ratio_R: Tensor  # r_t, with the gradient of the log-probs; 1 where masked
    weight_R: Tensor  # w_t, at least 0, without gradient; 1 where masked
    capped_R: Tensor  # bool: the importance weight was moved to a bound, or masked beyond it
    drifted_R: Tensor | None  # bool: masked by `max_drift`; None without it


def token_ratios(
    batch: MicroBatch, log_probs_R: Tensor, config: RatioLoss, over_context: Callable[[Tensor], Tensor] = _no_context
) -> TokenRatios:
    """Compute r_t and w_t of the objective.

    With `max_drift`, a token has the weight 0 if A < 0 and the mean of log(pi_rollout / pi_theta) over its response's
    trained tokens exceeds it (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556, Eq. 9).

    Args:
        log_probs_R: nats, of the current weights; r_t keeps their gradient.
        over_context: see `LossInputs`; called the same number of times for each micro-batch.
    """
    mask_R, behaviour_R, proximal_R = batch.mask_R, batch.behaviour_logprobs_R, batch.proximal_logprobs_R
    ratio_R = importance_ratio(log_probs_R, behaviour_R if proximal_R is None else proximal_R, mask_R)
    weight_R, capped_R = torch.ones_like(ratio_R), torch.zeros_like(mask_R)
    if proximal_R is not None:
        weight_R, capped_R = _importance_weight(batch, proximal_R, config, over_context)
    drifted_R = None
    if config.max_drift is not None:
        drift_R = response_means(behaviour_R - log_probs_R.detach(), batch, over_context)
        drifted_R = mask_R & (batch.advantages_R < 0) & (drift_R > config.max_drift)
        weight_R = weight_R.masked_fill(drifted_R, 0.0)
    return TokenRatios(ratio_R, weight_R.detach(), capped_R, drifted_R)


def _importance_weight(
    batch: MicroBatch, proximal_R: Tensor, config: RatioLoss, over_context: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the weights between their bounds, and whether a weight was on a bound or, for `mask`, beyond it."""
    mask_R, low, high = batch.mask_R, config.importance_floor, config.importance_cap
    weight_R = importance_ratio(proximal_R, batch.behaviour_logprobs_R, mask_R)
    if config.importance_level == "sequence":
        total_S, _ = _response_sums(proximal_R - batch.behaviour_logprobs_R, batch, over_context)
        of_response_S = total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(weight_R.dtype)
        weight_R = torch.where(mask_R, of_response_S[batch.sequence_R], 1.0)
    if config.importance_kind == "mask":
        capped_R = (weight_R < low) | (weight_R > high)
        return weight_R.masked_fill(capped_R, 0.0), capped_R
    return weight_R.clamp(low, high), mask_R & ((weight_R <= low) | (weight_R >= high))


def clipped_policy_loss(inputs: LossInputs, config: ClippedLoss) -> ClippedTokenLoss:
    """Compute -w min(r A, clip(r, c_low, c_high) A) per token; with `dual_clip` c, at most w c |A| where A < 0 (arXiv
    1912.09729).

    A token on its bound is clipped, without gradient, as in the `gradient` reading of the search. The bounds are
    compared in float64, as in the search.
    """
    return _clipped(inputs, _ratios(inputs, config), dual_clip=config.dual_clip)


def gspo_loss(inputs: LossInputs, config: GspoLoss) -> ClippedTokenLoss:
    """Compute -w min(s A, clip(s, c_low, c_high) A) per token, with the geometric mean s of the response's ratios.

    The gradient of s reaches each token through its own log-prob, with the factor s: summed over a response it is
    |y| times that of s, the geometric mean.
    """
    ratios = _ratios(inputs, config)
    ratio_R = ratios.ratio_R
    mean_R = response_means(ratio_R.detach().log(), inputs.batch, inputs.over_context).exp().to(ratio_R.dtype)
    return _clipped(inputs, replace(ratios, ratio_R=mean_R * (ratio_R / ratio_R.detach())))


def gmpo_loss(inputs: LossInputs, config: GmpoLoss) -> ClippedTokenLoss:
    """Compute -w g A per token: g is the geometric mean of the response's ratios, each held at its bound where A > 0
    and it is over the upper, or A < 0 and it is under the lower. A token held there has no gradient; the gradient of g
    reaches the others as in `gspo_loss`.
    """
    ratios = _ratios(inputs, config)
    ratio_R, tokens = ratios.ratio_R, _clipped(inputs, ratios)
    held_R = torch.where(tokens.clipped_high_R, inputs.bounds.high, ratio_R.detach())
    held_R = torch.where(tokens.clipped_low_R, inputs.bounds.low, held_R)
    mean_R = response_means(held_R.log(), inputs.batch, inputs.over_context).exp().to(ratio_R.dtype)
    slope_R = torch.where(tokens.clipped_R, 1.0, ratio_R / ratio_R.detach())
    loss_R = -ratios.weight_R * mean_R * slope_R * tokens.advantages_R
    return replace(tokens, loss_R=loss_R, ratio_R=torch.where(inputs.batch.mask_R, mean_R, 0.0))


def cispo_loss(inputs: LossInputs, config: CispoLoss) -> RatioTokenLoss:
    """Compute -w clip(r, c_low, c_high) A log pi per token: the clipped ratio is a constant, and no token loses its
    gradient.

    The value is a multiple of log pi, not of the ratio: compare only the gradient with other losses.
    """
    ratios = _ratios(inputs, config)
    bounded_R = ratios.ratio_R.detach().clamp(inputs.bounds.low, inputs.bounds.high)
    log_probs_R = torch.where(inputs.batch.mask_R, inputs.log_probs_R, 0.0)
    return RatioTokenLoss(**_record(inputs, ratios, bounded_R * log_probs_R))


def sapo_loss(inputs: LossInputs, config: SapoLoss) -> RatioTokenLoss:
    """Compute -w f(r) A per token with the gate f(r) = 4 / tau sigmoid(tau (r - 1)), whose slope is 1 at r = 1 and
    falls to both sides; tau is `temperature_positive` where A > 0, else `temperature_negative`.
    """
    ratios = _ratios(inputs, config)
    is_positive_R = inputs.batch.advantages_R > 0
    tau_R = torch.full_like(ratios.ratio_R, config.temperature_negative).masked_fill(
        is_positive_R, config.temperature_positive
    )
    gate_R = 4 / tau_R * torch.sigmoid(tau_R * (ratios.ratio_R - 1))
    return RatioTokenLoss(**_record(inputs, ratios, gate_R))


def m2po_loss(inputs: LossInputs, config: M2poLoss) -> ClippedTokenLoss:
    """Compute -w r A per token, but 0 where the token is masked: A > 0 and r on or over the upper bound, or A < 0 and r
    on or under the lower one. The bounds are those of `second_moment_bounds`.
    """
    tokens = _clipped(inputs, _ratios(inputs, config))
    return replace(tokens, loss_R=tokens.loss_R.masked_fill(tokens.clipped_R, 0.0))


def response_means(
    values_R: Tensor, batch: MicroBatch, over_context: Callable[[Tensor], Tensor] = _no_context
) -> Tensor:
    """Return, for each token, the mean of `values_R` over the trained tokens of its response, on all context ranks.

    Args:
        values_R: without gradient; masked tokens may hold anything.
        over_context: see `LossInputs`.

    Returns float64 [R]; 0 where a response has no trained token.
    """
    total_S, count_S = _response_sums(values_R, batch, over_context)
    return (total_S / count_S.clamp(min=1))[batch.sequence_R]


def _response_sums(
    values_R: Tensor, batch: MicroBatch, over_context: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sum of `values_R` over the trained tokens of each response, and their number; both float64 [S]."""
    places_S1 = torch.arange(batch.cu_seqlens_S1.numel(), device=batch.sequence_R.device)
    starts_S1 = torch.searchsorted(batch.sequence_R, places_S1)  # a count per response would make the CPU wait
    columns_2R = torch.stack([torch.where(batch.mask_R, values_R, 0.0).double(), batch.mask_R.double()])
    # Segments are summed in order; scattered additions would come in another order in each run on a GPU.
    table_2S = torch.stack(
        [torch.segment_reduce(column_R, "sum", offsets=starts_S1, unsafe=True) for column_R in columns_2R]
    )
    total_S, count_S = over_context(table_2S)
    return total_S, count_S


def _ratios(inputs: LossInputs, config: RatioLoss) -> TokenRatios:
    return token_ratios(inputs.batch, inputs.log_probs_R, config, inputs.over_context)


def _clipped(inputs: LossInputs, ratios: TokenRatios, dual_clip: float | None = None) -> ClippedTokenLoss:
    """Bound the ratio of each token; see `clipped_policy_loss`."""
    bounds, ratio_R = inputs.bounds, ratios.ratio_R
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
        **_record(inputs, ratios, bounded_R),
        clipped_high_R=clipped_high_R,
        clipped_low_R=clipped_low_R,
        dual_clipped_R=dual_clipped_R,
    )


def _record(inputs: LossInputs, ratios: TokenRatios, objective_R: Tensor) -> dict[str, Any]:
    """Return the fields of a `RatioTokenLoss` that maximises w A times `objective_R`."""
    mask_R = inputs.batch.mask_R
    advantages_R = torch.where(mask_R, inputs.batch.advantages_R, 0.0)
    return {
        "inputs": inputs,
        "loss_R": -ratios.weight_R * objective_R * advantages_R,
        "ratio_R": torch.where(mask_R, ratios.ratio_R.detach(), 0.0),
        "weight_R": torch.where(mask_R, ratios.weight_R, 0.0),
        "advantages_R": advantages_R,
        "capped_R": ratios.capped_R,
        "drifted_R": ratios.drifted_R,
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
