"""The advantage of MaxRL (arXiv 2602.02710): the rarer a success, the more it counts."""

from bapo_megatron.algorithms.advantages import GroupView


def max_rl(group: GroupView) -> list[float]:
    """Compute (r - mean) / mean for rewards that are not negative; 0 where all are 0."""
    rewards = [sample.reward for sample in group.samples]
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]
