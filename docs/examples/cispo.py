"""CISPO (arXiv 2506.13585): each token is weighted by its ratio, cut at a cap, and never loses its gradient."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, TokenLoss, importance_ratio
from bapo_megatron.config.base import Section
from bapo_megatron.config.losses import Loss
from bapo_megatron.metrics import Metric


class CispoOptions(Section):
    """The table [loss.options]."""

    cap: float = Field(5.0, ge=1)
    """Largest weight of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoTokenLoss(TokenLoss):
    """The record that metrics are made of."""

    cut_R: Tensor  # bool: the ratio is above the cap


def cispo(inputs: LossInputs, options: CispoOptions) -> CispoTokenLoss:
    """Compute -min(r, cap) A log pi per token, with a constant weight min(r, cap) A."""
    batch, mask_R = inputs.batch, inputs.batch.mask_R
    ratio_R = importance_ratio(inputs.log_probs_R.detach(), batch.behaviour_logprobs_R, mask_R)
    weight_R = torch.where(mask_R, ratio_R.clamp(max=options.cap) * batch.advantages_R, 0.0)
    log_probs_R = torch.where(mask_R, inputs.log_probs_R, 0.0)  # a masked row may hold anything, nan included
    return CispoTokenLoss(inputs, -weight_R * log_probs_R, cut_R=mask_R & (ratio_R > options.cap))


CUT_SHARE = Metric(
    "loss/cispo_cut_share",
    "share",
    "Trained tokens whose ratio is above `loss.options.cap`.",
    advice="Should stay small.",
    remedy="the cap, not the ratio, weights much of the batch: raise it, or reuse less.",
    tokens="mean",
    of="cut_R",
    panel="The update / Clip fraction",
)
CISPO = Loss(cispo, metrics=(CUT_SHARE,))
