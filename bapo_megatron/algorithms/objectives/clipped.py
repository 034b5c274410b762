"""The clipped policy loss: BAPO, whose bounds come from its search, and GRPO, whose bounds are fixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bapo_megatron.config.schema_loss import BoundedLoss, ClippedLoss

if TYPE_CHECKING:
    from bapo_megatron.algorithms.losses import ClippedTokenLoss, LossInputs
    from bapo_megatron.types import ClipBounds


class BapoLoss(ClippedLoss):
    """Clip bounds found by the search of [bapo]."""

    name: Literal["bapo"] = "bapo"
    rule = "bapo_megatron.algorithms.bound_search:ContributionRule"
    searches_bounds = True

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute `LossInputs.clipped` with this section's weights."""
        return inputs.clipped(inputs.ratios(self), dual_clip=self.dual_clip)


class GrpoLoss(ClippedLoss, BoundedLoss):
    """Fixed clip bounds."""

    name: Literal["grpo"] = "grpo"
    other_names = ("ppo", "dapo")

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute `LossInputs.clipped` with this section's weights."""
        return inputs.clipped(inputs.ratios(self), dual_clip=self.dual_clip)
