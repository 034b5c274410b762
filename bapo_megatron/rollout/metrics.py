"""What a batch looks like, from its groups alone; names are explained in docs/metrics.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bapo_megatron.types import Group


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and shares of one step's judged groups."""
    samples = [t for g in groups for t in g.trajectories]
    lengths = [t.num_response_tokens for t in samples]
    rewards = [r for g in groups for r in g.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_samples": float(len(samples)),
        "rollout/response_tokens_mean": statistics.fmean(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(t.finish_reason == "length" for t in samples) / len(samples),
        "rollout/resumed_token_share": sum(t.num_resumed_tokens for t in samples) / max(sum(lengths), 1),
        "rollout/zero_variance_share": sum(len(set(g.rewards)) == 1 < len(g.rewards) for g in groups) / len(groups),
    }
