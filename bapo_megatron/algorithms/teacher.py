"""Advantages from a teacher: on-policy distillation.

    A_t = coef x (log pi_T(y_t | x, y_<t) - log mu(y_t | x, y_<t))

pi_T is the teacher and mu the policy that sampled the token, both at the rollout's temperature. A_t is in nats, and
coef is a plain factor. The mean of A_t over mu is -coef x KL(mu || pi_T), so updates have more negative advantage than
positive. The gradient of sum_t A_t log pi at pi = mu is -coef x the gradient of the reverse KL, without the terms by
which a token changes the KL of later ones (thinkingmachines.ai/blog/on-policy-distillation; `incorporate_kl_penalty`
in tinker-cookbook's distillation/train_on_policy.py, with a discount of 0; `apply_opd_kl_to_advantages` in slime's
backends/megatron_utils/loss.py). A token that the teacher has not scored has A_t = 0.

Shape legend: T tokens of a batch.
"""

import torch
from torch import Tensor

from bapo_megatron.tokens import TEACHER_LOGPROBS


def teacher_advantages(teacher_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, coef: float) -> Tensor:
    """Return A_t of the formula, float64 [T]."""
    gap_T = teacher_logprobs_T.double() - behaviour_logprobs_T.double()
    return coef * torch.where(is_scored(teacher_logprobs_T), gap_T, 0.0)


def is_scored(teacher_logprobs_T: Tensor) -> Tensor:
    """Return whether the teacher has scored each token, bool [T]."""
    return teacher_logprobs_T != TEACHER_LOGPROBS.filler
