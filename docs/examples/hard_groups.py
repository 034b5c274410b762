"""A filter of groups: train on prompts that the policy solves sometimes, but not nearly always."""

from bapo_megatron.config.schema import Config
from bapo_megatron.types import Group


def hard_groups(group: Group, config: Config) -> bool:
    """Keep a group whose rewards differ, with a mean of at most 0.75. Called once all its responses are judged."""
    rewards = group.rewards
    return len(set(rewards)) > 1 and sum(rewards) / len(rewards) <= 0.75
