"""The settings of [critic]."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from bapo_megatron.config.base import Section


class CriticConfig(Section):
    """The critic of advantage.kind = "gae" and "n_step": a second model of the trainer, split like the policy, which
    predicts rewards. Its Adam is that of [optimizer], but for the settings here."""

    path: str | None = None
    """Folder with its start weights: a language model, or one with a score.weight of one row in place of the output
    layer (a reward model, or the critic of a checkpoint). Unset: model.path. A new head starts at zero."""
    lr: PositiveFloat = 1e-5
    """Learning rate after warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Linear warm-up over this many updates of the critic; constant afterwards."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the start of the run that train the critic only, on responses of the policy as it is."""
    epochs_per_step: PositiveInt = 1
    """The critic's passes over each rollout batch, of train.minibatches_per_step updates each."""
    clip: PositiveFloat | None = None
    """Value clipping: a token has no gradient once its value has moved towards its return by more than this within a
    step. Unset: none."""
