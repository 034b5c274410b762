"""A control for BAPO's search: each update draws one of its two windows, whatever the update's tokens.

The lot is a hash of the number of the update's tokens and of the weights' version. These numbers are the same on every
rank, in every layout and after a resume; their order differs from seed to seed.
"""

import random
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, ScoredTokens, TokenLoss
from bapo_megatron.algorithms.update_rules import BoundsRule
from bapo_megatron.config.losses import Loss
from bapo_megatron.config.schema_loss import ClipBoundConfig, RatioOptions
from bapo_megatron.types import ClipBounds


class WindowOptions(RatioOptions):
    """Settings of the draw."""

    wide_share: Annotated[float, Field(ge=0, le=1)] = 0.535
    """Probability of the wide window; by default BAPO's at K = 8: 0.512 of the updates at the limits, 0.445 at the
    start (results/bapo_grpo.md)."""


class RandomWindow(BoundsRule):
    """Draws the start of [bapo]'s grid or its limits."""

    shape = (2,)

    def __init__(self, options: WindowOptions, bapo: ClipBoundConfig) -> None:
        super().__init__(options, bapo)
        self._narrow, self._wide = ((bapo.low.points[i], bapo.high.points[i]) for i in (0, -1))

    def table(self, values: ScoredTokens, so_far: Any) -> Tensor:
        """Return the number of tokens, and the sum of the weights' version over them; both are exact."""
        versions_N = (values.batch.versions_R + values.ages_R)[values.batch.mask_R]
        return torch.tensor([len(versions_N), int(versions_N.sum())], dtype=torch.float64)

    def decide(self, total: Tensor, so_far: Any) -> ClipBounds:
        """Draw a window."""
        is_wide = random.Random(str(total.tolist())).random() < self.options.wide_share
        low, high = self._wide if is_wide else self._narrow
        return ClipBounds(low, high, positive_share=float("nan"), saturated=is_wide, num_moves=0)


def _clipped(inputs: LossInputs[ClipBounds], options: WindowOptions) -> TokenLoss:
    """Return BAPO's loss."""
    return inputs.clipped(inputs.ratios(options))


RANDOM_WINDOWS = Loss(_clipped, rule=RandomWindow)
