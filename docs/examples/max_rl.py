"""The advantage of MaxRL (arXiv 2602.02710): the rarer a success, the more it counts."""

from torch import Tensor


def max_rl(rewards_G: Tensor) -> Tensor:
    """Compute (r - mean) / mean for rewards that are not negative; 0 where all are 0."""
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else rewards_G * 0
