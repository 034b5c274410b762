"""Judges of responses, the scorer that runs them under a deadline, and the shaping of rewards."""

from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.shaping import is_informative, shaped_reward

__all__ = ["RewardScorer", "is_informative", "shaped_reward"]
