"""From the rewards of one group (all responses to one prompt) to advantages, one per response.

Each of `ADVANTAGES` maps float rewards_G to advantages_G of the same shape and type. A group of equal rewards, and so a
group of one, teaches nothing: its advantages are exactly 0, whatever rounding does to its mean. `whiten` then brings
the advantages of a whole batch to one scale, if the run asks for it.

Shape legend: G responses in the group, S responses in the batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.config.dotted import ADVANTAGE

_EPSILON = 1e-6  # added to the standard deviation, as GRPO implementations do


def grpo(rewards_G: Tensor) -> Tensor:
    """Compute (r - mean) / (std + 1e-6), std with divisor G - 1: GRPO, arXiv 2402.03300, Eq. 3."""
    advantages_G = dr_grpo(rewards_G)
    return advantages_G / (rewards_G.std() + _EPSILON) if bool(advantages_G.any()) else advantages_G


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """Compute r - mean: Dr. GRPO, arXiv 2503.20783, which leaves out the standard deviation."""
    assert rewards_G.is_floating_point(), "rewards are floats"
    is_informative = bool((rewards_G != rewards_G[:1]).any())
    return rewards_G - rewards_G.mean() if is_informative else torch.zeros_like(rewards_G)


def rloo(rewards_G: Tensor) -> Tensor:
    """Compute r - mean of the other responses: leave-one-out, arXiv 2402.14740."""
    num = rewards_G.numel()
    return dr_grpo(rewards_G) * num / max(num - 1, 1)


def whiten(advantages_S: Tensor) -> Tensor:
    """Divide by (std + 1e-6), the sample standard deviation over the batch.

    After `dr_grpo` this is REINFORCE++ with a group baseline (arXiv 2501.03262): (A - mean of the batch) / std of the
    batch, with A = r - mean of the group. The mean is not subtracted: A sums to 0 in every group, so the mean is
    rounding, and a response that teaches nothing keeps its exact 0. Statistics are over responses, not tokens (as in
    OpenRLHF), so the length of one response does not change the advantages of the others. Unlike `grpo`, a group of
    nearly equal rewards is not scaled up to the size of the others.
    """
    if not bool(advantages_S.any()):
        return advantages_S
    return advantages_S / (advantages_S.std() + _EPSILON)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Built-in advantages by `advantage.kind`."""


def advantages_of(kind: str) -> Callable[[Tensor], Tensor]:
    """Return the function that `advantage.kind` names: a built-in one, or one at a dotted path.

    Raises:
        UserError: the dotted path does not lead to such a function, or (when called) the result does not fit.
    """
    if kind in ADVANTAGES:
        return ADVANTAGES[kind]
    function = ADVANTAGE.load(kind)

    def checked(rewards_G: Tensor) -> Tensor:
        advantages_G = function(rewards_G)
        if not isinstance(advantages_G, Tensor) or advantages_G.shape != rewards_G.shape:
            raise ADVANTAGE.error(kind, f"it returned {advantages_G!r} for {rewards_G!r}")
        return advantages_G.to(rewards_G)

    return checked
