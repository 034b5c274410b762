"""Advantages from a teacher: on-policy distillation.

    A_t = coef x (log pi_T(y_t | x, y_<t) - log mu(y_t | x, y_<t))

pi_T is the teacher and mu the policy that sampled the token, both at the rollout's temperature. A_t is in nats, and
coef is a plain factor. The mean of A_t over mu is -coef x KL(mu || pi_T), so updates have more negative advantage than
positive. The gradient of sum_t A_t log pi at pi = mu is -coef x the gradient of the reverse KL, without the terms by
which a token changes the KL of later ones (thinkingmachines.ai/blog/on-policy-distillation; `incorporate_kl_penalty`
in tinker-cookbook's distillation/train_on_policy.py, with a discount of 0; `apply_opd_kl_to_advantages` in slime's
backends/megatron_utils/loss.py).

Shape legend: T tokens of a batch.
"""

from torch import Tensor


def teacher_advantages(teacher_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, coef: float) -> Tensor:
    """Return A_t of the formula, float64 [T]."""
    return coef * (teacher_logprobs_T.double() - behaviour_logprobs_T.double())
