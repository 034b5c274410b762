"""The proximal policy of `loss.proximal = "learner"`: the learner's own log-probs at the weights a step begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.learner.reference import with_reference_logprobs
from bapo_megatron.learner.scoring import batch_log_probs
from bapo_megatron.types import Batch, MiniBatch

if TYPE_CHECKING:
    from bapo_megatron.learner.megatron import MegatronLearner


def with_fixed_logprobs(batch: Batch, learner: MegatronLearner, config: Config) -> Batch:
    """The batch with what all updates of a step compare the policy with: the reference's log-probs and the proximal
    policy's, where the loss uses them. Collective."""
    batch = with_reference_logprobs(batch, learner.reference, config)
    return with_proximal_logprobs(batch, learner, config) if config.loss.proximal == "learner" else batch


def with_proximal_logprobs(batch: Batch, learner: Learner, config: Config) -> Batch:
    """The batch with `proximal_logprobs_T` at the learner's current weights: one scoring pass and one all-reduce.

    They are the step's first mini-batch's scores as well (`known_log_probs`).

    Call it on every rank, before the step's first update. A batch without a trained token stays as it is.
    """
    if not batch.num_trained_tokens:
        return batch
    proximal_T = batch_log_probs(batch, learner, config)
    return replace(batch, proximal_logprobs_T=proximal_T, proximal_version=learner.version)


def known_log_probs(minibatch: MiniBatch) -> list[Tensor]:
    """Its log-probs at the weights of `proximal_version`: one float32 [R] per micro-batch."""
    found = [batch.proximal_logprobs_R for batch in minibatch.micro_batches]
    return [log_probs_R for log_probs_R in found if log_probs_R is not None]
