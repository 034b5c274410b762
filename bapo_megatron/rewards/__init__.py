"""Judges of responses, the scorer that runs them under a deadline, and the shaping of rewards."""

# Not shaping.py: it imports torch, which `bapo check` and judge processes do without.
from bapo_megatron.rewards.scorer import RewardScorer

__all__ = ["RewardScorer"]
