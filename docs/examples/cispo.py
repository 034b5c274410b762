"""CISPO (arXiv 2506.13585): clip the weight of a token, and keep its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel, PositiveFloat
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, TokenLoss, importance_ratio


class CispoOptions(BaseModel, extra="forbid"):
    """Settings of the loss, [loss.options]."""

    cap: PositiveFloat = 2.0
    """Largest weight of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoTokenLoss(TokenLoss):
    """The record of the loss; metrics are made of its fields."""

    weight_capped_R: Tensor  # bool: the token's weight is at its cap


def cispo(inputs: LossInputs, options: CispoOptions) -> CispoTokenLoss:
    """Compute -sg(min(r, cap)) A log pi per token; 0 where masked."""
    batch = inputs.batch
    ratio_R = importance_ratio(inputs.log_probs_R, batch.behaviour_logprobs_R, batch.mask_R).detach()
    log_probs_R = torch.where(batch.mask_R, inputs.log_probs_R, 0.0)
    advantages_R = torch.where(batch.mask_R, batch.advantages_R, 0.0)
    return CispoTokenLoss(
        inputs,
        -ratio_R.clamp(max=options.cap) * advantages_R * log_probs_R,
        weight_capped_R=batch.mask_R & (ratio_R >= options.cap),
    )
