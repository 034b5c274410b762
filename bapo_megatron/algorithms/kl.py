"""KL divergence from the policy to a reference policy as a term of the loss, and the controller of its coefficient.

With d = log pi_theta - log pi_ref of a sampled token, and x its estimator of KL(pi_theta || pi_ref):

             value            d x / d log pi_theta
    k1       d                1
    k2       d^2 / 2          d
    k3       e^-d - 1 + d     1 - e^-d

(joschu.net/blog/kl-approx.html.) On samples of pi_theta, k1 and k3 are unbiased in value, and k3 is never negative. As
terms of a loss their gradients differ: k1's is 0 in expectation and only adds noise; k2's is unbiased for
the gradient of KL(pi_theta || pi_ref); k3's, GRPO's choice (arXiv 2402.03300, Eq. 4), is unbiased for the gradient of
KL(pi_ref || pi_theta) (arXiv 2506.09477). Samples of older policies are not weighted, as in GRPO.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.losses import MAX_LOG_RATIO
from bapo_megatron.types import Number

if TYPE_CHECKING:
    from bapo_megatron.config.schema_loss import LossConfig

HORIZON = 10.0  # updates over which the controller corrects an error
_MAX_ERROR = 0.2  # bounds the controller's change per update, as in Ziegler et al.


def k3(difference: Tensor) -> Tensor:
    """Compute e^-d - 1 + d; a difference beyond +-20 is cut off, without gradient, as in `importance_ratio`."""
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": k3}
"""Estimators by `loss.kl_estimator`; each maps log pi_theta - log pi_ref, in nats, to nats of the same shape."""


def reference_kl(log_probs_R: Tensor, reference_logprobs_R: Tensor, mask_R: Tensor, estimator: str) -> Tensor:
    """Compute the KL per token in nats, differentiable in `log_probs_R`; 0 where masked, whatever the values."""
    # Select the inputs, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    return ESTIMATORS[estimator](torch.where(mask_R, log_probs_R - reference_logprobs_R, 0.0))


class KLState(TypedDict):
    """The state of the coefficient's controller in a checkpoint; None for a fixed coefficient."""

    coefficient: Annotated[Number, Field(ge=0)] | None


class KLCoefficient:
    """The coefficient of the KL term: fixed, or steered towards `loss.kl_target`.

    It is steered as in Ziegler et al. (arXiv 1909.08593, section 2.2): after each update with a KL of x per token,

        error = clip(x / target - 1, -0.2, 0.2);  coefficient *= 1 + error / HORIZON

    Their K = 0.1 is a horizon of 10 updates. The KL is the one that the loss saw, before the update.
    """

    def __init__(self, settings: LossConfig) -> None:
        self.value = settings.kl_coef
        self._target = settings.kl_target

    def observe(self, kl: float) -> None:
        """Adapt the coefficient to an update's mean KL per token, in nats; ignore a value that is not finite."""
        if self._target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.value *= 1 + error / HORIZON

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value; None for a fixed coefficient, so that the setting applies."""
        return {"coefficient": None if self._target is None else self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._target is not None and state["coefficient"] is not None:
            self.value = state["coefficient"]
