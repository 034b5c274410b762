"""Judges of responses, the scorer that runs them under a deadline, and the shaping of rewards.

Start at `scorer.RewardScorer`.
"""

# shaping.py is left out: it imports torch, which `bapo check` and judge processes do not need.
from bapo_megatron.rewards.scorer import RewardScorer

__all__ = ["RewardScorer"]
