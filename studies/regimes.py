"""REINFORCE with a constant baseline, and a constant: advantages that studies name by dotted path.

These advantages are not centred on the group: with few right answers, failures outweigh successes, and groups without
any right answer count too. Rewards are 0 or 1.
"""

from bapo_megatron.algorithms.advantages import GroupView


def baseline_40(group: GroupView) -> list[float]:
    """Compute r - 0.4."""
    return [sample.reward - 0.4 for sample in group.samples]


def baseline_50(group: GroupView) -> list[float]:
    """Compute r - 0.5, which gives failures and successes the same weight."""
    return [sample.reward - 0.5 for sample in group.samples]


def constant(group: GroupView) -> list[float]:
    """Return -0.3 for every response, whatever its reward: the control of teacher.toml."""
    return [-0.3 for _ in group.samples]
