"""Judges of responses (chains, math-verify, reasoning-gym) and the scorer that runs them under a deadline."""

from bapo_megatron.rewards.scorer import RewardScorer, Verifier, build_verifier

__all__ = ["RewardScorer", "Verifier", "build_verifier"]
