"""An update rule that leaves out responses of a policy that is far from the current one, and their tokens' share."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, ScoredTokens, TokenLoss
from bapo_megatron.algorithms.update_rules import UpdateRule
from bapo_megatron.config.losses import Loss
from bapo_megatron.config.schema_loss import RatioOptions


class KeepNearOptions(RatioOptions):
    """The table [loss.options]: the settings of ratios, and one more."""

    max_distance: float = Field(0.1, gt=0)
    """Largest |mean of log(pi / pi_behaviour)| over the tokens of a response that is trained, in nats."""


@dataclass(frozen=True, slots=True)
class Near:
    """The decision: the tokens and the responses of all ranks that stay."""

    num_tokens: int
    num_responses: int


class KeepNear(UpdateRule[Near]):
    """Counts near responses and their tokens, before the first backward pass."""

    shape = (2,)
    masks = True

    def mask(self, tokens: ScoredTokens, found: Near | None) -> Tensor:
        """Return the trained tokens of near responses: bool [R]."""
        log_ratio_R = tokens.log_probs_R - tokens.batch.behaviour_logprobs_R
        is_near_R = tokens.response_means(log_ratio_R).abs() <= self.options.max_distance
        return tokens.batch.mask_R & is_near_R

    def table(self, values: ScoredTokens, so_far: Any) -> Tensor:
        """Count the tokens and the responses that stay: float64 [2]."""
        mask_R = self.mask(values, None)
        return torch.stack([mask_R.double(), values.response_shares() * mask_R]).sum(1)

    def decide(self, total: Tensor, so_far: Any) -> Near:
        """Return the counts of all ranks."""
        return Near(*(round(count) for count in total.tolist()))

    def num_trained_tokens(self, found: Near) -> int:
        """Return the divisor: the tokens that stay."""
        return found.num_tokens

    def num_trained_responses(self, found: Near) -> int:
        """Return the divisor of any other `loss.mean_over`: the responses that stay."""
        return found.num_responses


def keep_near(inputs: LossInputs[Near], options: KeepNearOptions) -> TokenLoss:
    """Compute -w r A per token; the rule sets the micro-batch's mask."""
    ratios = inputs.ratios(options)
    return inputs.weighted(ratios, ratios.ratio_R)


KEEP_NEAR = Loss(keep_near, rule=KeepNear)
