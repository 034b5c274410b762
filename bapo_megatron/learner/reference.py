"""Policies that are never trained, and score what the policy has sampled: the reference of the KL term (`loss.kl_coef`)
and teachers (`TeacherConfig.paths`). With LoRA, the reference may be the policy as its run began.

Every rank holds such a model's weights, without gradients or optimizer state. It is split like the learner, and may be
any model with the same vocabulary; a teacher's may have more rows of padding. Each rollout batch costs one more scoring
pass of each.
"""

from dataclasses import replace

from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.base import refuse
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.exchange import load_weights
from bapo_megatron.learner.fit import check_frozen
from bapo_megatron.learner.lora import reference_adapters
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.learner.precision import this_machine
from bapo_megatron.learner.schedule import Schedule, Scores
from bapo_megatron.learner.split_model import SplitModel, TrainedModel
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.types import MiniBatch


class FrozenPolicy(SplitModel):
    """A frozen policy that computes log-probs. Construct it on every rank, after the learner's model.

    Args:
        setting: what names it.
        path: the value of that setting; None means the policy's own model.
        policy: the policy's own model.
        local_time: the learner's clock, which counts these passes too.

    Raises:
        ConfigError: the model has a different vocabulary, or does not fit the layout or this machine.
        CheckpointError: its folder cannot be read, or its family is not supported.
    """

    def __init__(
        self, config: Config, setting: str, path: str | None, policy: ModelFacts, local_time: LocalTime
    ) -> None:
        model = policy if path is None else ModelFacts.of(resolve_model_path(path, setting=setting), policy.own)
        refuse(check_frozen(config, setting, path, model, policy, this_machine()))
        stored = model.shape
        super().__init__(config, replace(stored, vocab_size=policy.shape.vocab_size), PolicyModel)
        assert model.folder is not None, "the learner has loaded the policy from there"
        load_weights(self.model, self.shape, self.layout, model.folder, stored=stored)
        chunks, settings = self.model.requires_grad_(False).eval(), self.settings
        wrapped: list[Module] = [Float16Module(settings, c) if settings.bf16 else c for c in chunks]
        self._schedule = Schedule(wrapped, settings, self.layout, config, local_time)

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """See `Learner.log_probs`."""
        return self._schedule.log_probs(minibatch)

    def likeliest(self, minibatch: MiniBatch, top_k: int) -> list[Scores]:
        """Return the likeliest tokens of each micro-batch's rows, on the CPU, empty off the last stage. Collective."""

        def kept(scores: Scores) -> Scores:
            return Scores._make(None if x is None else x.cpu() for x in scores)

        return self._schedule.without_gradient(minibatch, kept, top_k=top_k)


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
