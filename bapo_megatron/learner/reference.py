"""The reference policy of the KL term (`loss.kl_coef`): a second model, which is never trained, or with LoRA the policy
as its run began.

Every rank holds the second model's weights, without gradients or optimizer state. It is split like the learner, and may
be any model with the same vocabulary. Each rollout batch costs one more scoring pass.
"""

from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.base import refuse
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.exchange import load_weights
from bapo_megatron.learner.fit import check_reference
from bapo_megatron.learner.lora import reference_adapters
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.learner.precision import this_machine
from bapo_megatron.learner.schedule import Schedule
from bapo_megatron.learner.split_model import SplitModel, TrainedModel
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.types import MiniBatch


class ReferencePolicy(SplitModel):
    """A frozen policy that computes log-probs. Construct it on every rank, after the learner's model.

    Args:
        started_from: the policy's own model, which is the reference if `loss.reference_path` is unset.
        local_time: the learner's clock, which counts these passes too.

    Raises:
        ConfigError: the reference has a different vocabulary, or does not fit the layout or this machine.
        CheckpointError: its folder cannot be read, or its family is not supported.
    """

    def __init__(self, config: Config, started_from: ModelFacts, local_time: LocalTime) -> None:
        reference, path = started_from, config.loss.reference_path
        if path is not None:
            reference = ModelFacts.of(resolve_model_path(path, setting="loss.reference_path"), started_from.own)
        refuse(check_reference(config, reference, started_from, this_machine()))
        super().__init__(config, reference.shape, PolicyModel)
        assert reference.folder is not None, "the learner has loaded the policy from there"
        load_weights(self.model, self.shape, self.layout, reference.folder)
        model, settings = self.model.requires_grad_(False).eval(), self.settings
        chunks: list[Module] = [Float16Module(settings, c) if settings.bf16 else c for c in model]
        self._schedule = Schedule(chunks, settings, self.layout, config, local_time)

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """See `Learner.log_probs`."""
        return self._schedule.log_probs(minibatch)


class OwnReference:
    """The policy without its adapters, or with those that its run began with: a reference that takes no memory.

    Args:
        policy: a model with adapters.
    """

    def __init__(self, policy: TrainedModel) -> None:
        self.policy = policy

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """See `Learner.log_probs`."""
        with reference_adapters(self.policy.model):
            return self.policy.schedule.log_probs(minibatch)
