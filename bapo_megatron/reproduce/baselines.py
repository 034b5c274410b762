"""REINFORCE with a constant baseline: advantages of the study `regimes`, named there by dotted path.

They are not centred on the group: with few right answers, failures outweigh successes, and groups without any right
answer count too. Rewards are 0 or 1. Shape legend: G responses in the group.
"""

from torch import Tensor


def baseline_40(rewards_G: Tensor) -> Tensor:
    """Compute r - 0.4."""
    return rewards_G - 0.4


def baseline_50(rewards_G: Tensor) -> Tensor:
    """Compute r - 0.5, which weighs a failure like a success."""
    return rewards_G - 0.5
