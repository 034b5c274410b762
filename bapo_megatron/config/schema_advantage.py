"""The settings of [advantage], and of the critic behind some of them, [critic]."""

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from bapo_megatron.config.base import Section
from bapo_megatron.config.dotted import ADVANTAGE


class AdvantageConfig(Section):
    """From the rewards of a group to advantages."""

    kind: str = "grpo"
    """One for each response, from its group: grpo: (r - mean) / std; dr_grpo: r - mean; rloo: r - mean of the others;
    or a function of your own, "my_package.my_module:my_advantage". One for each token, from a critic (see [critic]):
    gae: generalized advantage estimation; n_step: n-step returns."""
    whiten_batch: bool = False
    """Whiten the advantages over the responses of the batch: with dr_grpo, REINFORCE++ with a group baseline."""
    gamma: float = Field(1.0, gt=0, le=1)
    """gae, n_step: discount of rewards per token; 1 is none, as usual where the reward comes at the end."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae: 1 is the whole return less the value, without bias; smaller trusts the critic more: the reward fades by this
    factor per token, and values take its place."""
    n_step: PositiveInt = 128
    """n_step: tokens until the critic's value stands in for the rest of the response."""
    whiten_tokens: bool = True
    """gae, n_step: give the advantages of a batch's trained tokens mean 0 and standard deviation 1, as PPO does."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return ADVANTAGE.known(kind)

    @property
    def compares_responses(self) -> bool:
        """Whether advantages come from the rewards of a group; else from a critic's values."""
        return self.kind not in ("gae", "n_step")


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
