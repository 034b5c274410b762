"""Policy losses per token, and the sums that their metrics are made of.

Policy losses maximise sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t). They differ in where the bounds come from:
BAPO's search, or the configuration (`fixed_bounds`). Two ways to measure how far a token's policy has moved:

    proximal = "behaviour"   r_t = pi_theta / pi_rollout, w_t = 1. pi_rollout is the policy that sampled this very token
                             (BAPO, arXiv 2510.18927; PPO, arXiv 1707.06347).
    proximal = "learner"     r_t = pi_theta / pi_prox, w_t = min(pi_prox / pi_rollout, cap), a constant. pi_prox is the
                             learner at the start of the step (decoupled PPO, arXiv 2110.00641, 2505.24298).

The supervised loss maximises sum_t log pi_theta(t).

Nothing here is a mean: losses and metrics are summed over tokens, micro-batches and ranks, and divided once, by the
token count of the whole optimizer step.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.diagnostics import entropy_rule_sums
from bapo_megatron.algorithms.token_profile import token_profile_sums
from bapo_megatron.config.schema_loss import ClippedLoss, CustomLoss, GrpoLoss, LossConfig
from bapo_megatron.types import ClipBounds

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond any bound, and far from overflow


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch's response tokens, and the clip bounds of its optimizer step. Masked tokens may hold anything."""

    log_probs_R: Tensor  # float32, nats, of the current weights, with gradient
    behaviour_logprobs_R: Tensor  # float32, nats, of the policy that sampled each token
    advantages_R: Tensor  # float32
    mask_R: Tensor  # bool: the tokens that are trained
    ages_R: Tensor  # int64: optimizer updates since each token was sampled
    bounds: ClipBounds
    entropy_R: Tensor | None = None  # float32, nats; only for the metrics
    proximal_logprobs_R: Tensor | None = None  # float32, nats, of the learner at the start of the step, if decoupled
    reference_logprobs_R: Tensor | None = None  # float32, nats, of the reference policy, where there is a KL term
    with_token_profile: bool = False  # whether to add the sums of `token_profile`


@dataclass(frozen=True, slots=True)
class LossResult:
    """`sums` add up, and `maxima` combine by maximum, over micro-batches and ranks; both are float32 scalars."""

    loss_R: Tensor  # per token, 0 where masked; to be summed and divided by the step's token count
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def importance_ratio(log_probs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """pi / pi_reference per token; 1 where masked.

    A log-ratio beyond +-20 is cut there and carries no gradient; the gradient of nan is nan, so its update is skipped.
    """
    # The inputs are selected, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    log_ratio = torch.where(mask, log_probs - reference_logprobs, 0.0)
    cut = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, cut, log_ratio).exp()  # the gradient of clamp hides a nan


def ratio_and_weight(
    log_probs: Tensor, behaviour_logprobs: Tensor, proximal_logprobs: Tensor | None, mask: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """r_t and w_t of the objective, for the loss and the search for its bounds alike; both are 1 where masked.

    Args:
        log_probs: nats, of the current weights; r_t keeps their gradient, w_t has none.
        proximal_logprobs: None for proximal = "behaviour".
        cap: largest w_t (`loss.importance_cap`), at least 1.
    """
    if proximal_logprobs is None:
        ratio = importance_ratio(log_probs, behaviour_logprobs, mask)
        return ratio, torch.ones_like(ratio)
    weight = importance_ratio(proximal_logprobs, behaviour_logprobs, mask).clamp(max=cap)
    return importance_ratio(log_probs, proximal_logprobs, mask), weight.detach()


def clipped_policy_loss(inputs: LossInputs, config: ClippedLoss) -> LossResult:
    """-w min(r A, clip(r, c_low, c_high) A) per token; with `dual_clip` c, at most w c |A| where A < 0 (arXiv
    1912.09729).

    A token on its bound is clipped, without gradient, as in the `gradient` reading of the search. The bounds are
    compared in float64, as in the search.
    """
    bounds, mask_R = inputs.bounds, inputs.mask_R
    ratio_R, weight_R = ratio_and_weight(
        inputs.log_probs_R, inputs.behaviour_logprobs_R, inputs.proximal_logprobs_R, mask_R, config.importance_cap
    )
    advantages_R = torch.where(mask_R, inputs.advantages_R, 0.0)
    positive_R, negative_R = advantages_R > 0, advantages_R < 0
    exact_R = ratio_R.detach().double()
    clipped_high_R = positive_R & (exact_R >= bounds.high)
    clipped_low_R = negative_R & (exact_R <= bounds.low)
    dual_clipped_R = negative_R & (exact_R >= (config.dual_clip or math.inf))

    bounded_R = torch.where(clipped_high_R, bounds.high, ratio_R)
    bounded_R = torch.where(clipped_low_R, bounds.low, bounded_R)
    if config.dual_clip is not None:
        bounded_R = torch.where(dual_clipped_R, config.dual_clip, bounded_R)
    loss_R = -weight_R * bounded_R * advantages_R

    with torch.no_grad():
        ages_R = torch.where(mask_R, inputs.ages_R, 0)
        entropy_R = torch.zeros_like(loss_R) if inputs.entropy_R is None else torch.where(mask_R, inputs.entropy_R, 0.0)
        is_decoupled = inputs.proximal_logprobs_R is not None
        capped_R = mask_R & (weight_R >= config.importance_cap) if is_decoupled else torch.zeros_like(mask_R)
        from_behaviour_R = importance_ratio(inputs.log_probs_R, inputs.behaviour_logprobs_R, mask_R)
        per_token = {
            "tokens": mask_R,
            "policy_loss": loss_R,
            "positive_tokens": positive_R,
            "negative_tokens": negative_R,
            "clipped_high": clipped_high_R,
            "clipped_low": clipped_low_R,
            "dual_clipped": dual_clipped_R,
            "positive_mass": torch.where(positive_R, -loss_R, 0.0),
            "negative_mass": torch.where(negative_R, loss_R, 0.0),
            "ratio": torch.where(mask_R, ratio_R, 0.0),
            "approx_kl": from_behaviour_R - 1 - from_behaviour_R.log(),  # KL(rollout || current), k3; 0 where masked
            "importance_weight": torch.where(mask_R, weight_R, 0.0),
            "importance_capped": capped_R,
            "entropy": entropy_R,
            "age": ages_R,
        }
        sums = {name: value_R.sum(dtype=torch.float32) for name, value_R in per_token.items()}
        sums |= entropy_rule_sums(
            log_probs_R=inputs.log_probs_R,
            entropy_R=entropy_R,
            weight_R=weight_R * ratio_R,
            advantages_R=advantages_R,
            clipped_R=clipped_high_R | clipped_low_R | dual_clipped_R,
            ages_R=ages_R,
            mask_R=mask_R,
        )
        if inputs.with_token_profile:
            sums |= token_profile_sums(
                log_probs_R=inputs.log_probs_R,
                ratio_R=ratio_R,
                entropy_R=entropy_R,
                clipped_high_R=clipped_high_R,
                clipped_low_R=clipped_low_R,
                mask_R=mask_R,
            )
        maxima = {
            name: per_token[name].float().amax() if mask_R.numel() else loss_R.new_zeros(()).float()
            for name in ("ratio", "age")
        }
    return LossResult(loss_R, sums, maxima)


def supervised_loss(inputs: LossInputs, config: LossConfig) -> LossResult:
    """-log pi per token, in nats: maximum likelihood of the trained tokens. Advantages and bounds play no part."""
    mask_R = inputs.mask_R
    loss_R = -torch.where(mask_R, inputs.log_probs_R, 0.0)
    with torch.no_grad():
        ages_R = torch.where(mask_R, inputs.ages_R, 0)
        entropy_R = torch.zeros_like(loss_R) if inputs.entropy_R is None else torch.where(mask_R, inputs.entropy_R, 0.0)
        per_token = {"tokens": mask_R, "policy_loss": loss_R, "entropy": entropy_R, "age": ages_R}
        sums = {name: value_R.sum(dtype=torch.float32) for name, value_R in per_token.items()}
        oldest = ages_R.float().amax() if mask_R.numel() else loss_R.new_zeros(()).float()
    return LossResult(loss_R, sums, {"age": oldest})


LOSSES: dict[str, Callable[[LossInputs, Any], LossResult]] = {
    "bapo": clipped_policy_loss,
    "grpo": clipped_policy_loss,
    "sft": supervised_loss,
}
"""Built-in losses by `loss.name`, each called with its own section."""


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossResult:
    """Compute the loss that `loss.name` names."""
    return config.function(inputs) if isinstance(config, CustomLoss) else LOSSES[config.name](inputs, config)


def fixed_bounds(config: LossConfig) -> ClipBounds:
    """Return the bounds of a loss that does not search for them: those of its section, or nan."""
    assert config.bounds != "bapo", "bapo's bounds come from its search"
    low, high = (config.clip_low, config.clip_high) if isinstance(config, GrpoLoss) else (math.nan, math.nan)
    return ClipBounds(low=low, high=high, positive_share=math.nan, saturated=False, num_moves=0)
