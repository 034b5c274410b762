"""On-policy distillation: a token's advantage is how much likelier it is to a teacher than to the policy."""

from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, TokenLoss
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.base import Section
from bapo_megatron.config.losses import Loss, StepStream
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.base import Learner
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import MiniBatch

TEACHER = TokenStream("teacher_logprobs", "float32", kept=False)


class DistilOptions(Section):
    """The table [loss.options]."""

    teacher: str
    """A model with the policy's vocabulary."""


def teacher_of(config: Config, learner: Learner) -> Callable[[MiniBatch], list[Tensor]]:
    """Return the scoring pass of the teacher, a frozen model in the learner's layout."""
    from bapo_megatron.learner.reference import ReferencePolicy  # imports Megatron, which a check does without

    options = config.loss.function_options
    teacher = resolve_model_path(options.teacher, setting="loss.options.teacher")
    return ReferencePolicy(config, ModelFacts.of(teacher), learner.local_time).log_probs


def distil(inputs: LossInputs, options: DistilOptions) -> TokenLoss:
    """Compute -(log pi_teacher - log pi) log pi per token, whose first factor is a constant."""
    batch, mask_R = inputs.batch, inputs.batch.mask_R
    log_probs_R = torch.where(mask_R, inputs.log_probs_R, 0.0)  # a masked row may hold anything, nan included
    gap_R = torch.where(mask_R, batch.extra[TEACHER] - log_probs_R.detach(), 0.0)
    return inputs.plain(-gap_R * log_probs_R)


DISTIL = Loss(distil, streams=(StepStream(TEACHER, teacher_of),))
