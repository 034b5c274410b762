"""Score centering: a policy gradient without the mean update of its sampler's tokens (arXiv 2609.20807).

With s_v the gradient of log p_v, a token a that the sampler q drew moves the policy p by A f_a s_a. The factor f is 1,
or the truncated or masked ratio p / q. If A says nothing about the token, the mean over the sampler's tokens is still
A sum_v q_v f_v s_v. Step by step it draws p towards q, or away from it if A < 0. Its estimate is taken off each token's
update: to the loss of the token, -A f_a log p_a,

    A C is added, with C = sum_c m_c log p_c, and m_c = q_c f(p_c / q_c) a constant.

The classes c are the sampler's K likeliest tokens, and all other tokens together. So the others count as if the sampler
had the policy's proportions among them. This is the estimate of the paper's Eq. 14 and of NeMo-RL's
`compute_score_centering_term` (algorithms/loss/score_centering.py), with the same gradient: with
rho = q_others / p_others and q_v = rho p_v, the others have the weighted score

    sum_v q_v f(1 / rho) s_v = q_others f(p_others / q_others) x gradient of log p_others

Example: p = (0.6, 0.4), q = (0.5, 0.5), f = 1. By logits, a token's score is s_a = e_a - p. Its mean under q is q - p =
(-0.1, 0.1), which is also the gradient of C, so that the mean of what is left is 0.

Shape legend: R rows (one per response token), K likeliest tokens, X = K + 1 classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Factor = Callable[[Tensor], Tensor]
"""Maps ratios p / q to factors of the policy gradient, of the same shape."""


class Centering(NamedTuple):
    """Sums over the sampler's likeliest tokens at each place, [R]; 0 where masked."""

    centre_R: Tensor  # C, nats, with gradient
    kl_R: Tensor  # KL(q || p) over the classes, nats
    mass_R: Tensor  # the sampler's probability of its K likeliest tokens


def centering(policy_RX: Tensor, sampler_RK: Tensor, mask_R: Tensor, factor: Factor) -> Centering:
    """Compute C from log-probs of the classes under the policy, with gradient, and of the K tokens under the sampler.

    The sampler's probability of all others is 1 - sum_k q_k, computed in float64, and at least 0. If it is 0, the
    ratio counts as 1, whose factor then weighs nothing.
    """
    # Select the inputs, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    policy_RX = torch.where(mask_R[:, None], policy_RX, 0.0)
    log_p_RX, q_RK = policy_RX.detach().double(), torch.where(mask_R[:, None], sampler_RK, 0.0).double().exp()
    q_RX = torch.cat([q_RK, (1 - q_RK.sum(1, keepdim=True)).clamp(min=0)], 1)
    log_q_RX = torch.where(q_RX > 0, q_RX.log(), log_p_RX)
    mass_RX = q_RX * factor((log_p_RX - log_q_RX).exp())
    kl_R = (q_RX * (log_q_RX - log_p_RX)).sum(1)
    values = ((mass_RX.to(policy_RX.dtype) * policy_RX).sum(1), kl_R, q_RK.sum(1))
    return Centering(*(torch.where(mask_R, x_R, 0.0).to(policy_RX.dtype) for x_R in values))
