"""Maximum likelihood: sum_t log pi_theta(t)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from bapo_megatron.config.schema_loss import LossConfig

if TYPE_CHECKING:
    from bapo_megatron.algorithms.losses import LossInputs, TokenLoss


class SftLoss(LossConfig):
    """Maximum likelihood of all trained tokens, without advantages, for instance as a warm start."""

    name: Literal["sft"] = "sft"

    def tokens(self, inputs: LossInputs[Any]) -> TokenLoss:
        """Compute -log pi per trained token, in nats, without advantages or bounds."""
        return inputs.plain(-inputs.log_probs_R.where(inputs.batch.mask_R, 0.0))
