"""From sums over tokens, spread over micro-batches and data ranks, to one update's metrics, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.losses import LossResult
from bapo_megatron.learner.parallel import ParallelLayout

# Name in LossResult -> name in the run's metrics; any other name appears as loss/<name>.
_MEANS = {
    "policy_loss": "loss/policy",
    "clipped_high": "loss/clip_high_share",
    "clipped_low": "loss/clip_low_share",
    "dual_clipped": "loss/dual_clip_share",
    "positive_tokens": "loss/positive_token_share",
    "negative_tokens": "loss/negative_token_share",
    "ratio": "loss/ratio_mean",
    "age": "staleness/mean",
}
_MAXIMA = {"ratio": "loss/ratio_max", "age": "staleness/max"}


class TokenMetrics:
    """Adds up the losses' sums and maxima; knows their names also on stages that compute no loss.

    Args:
        example: the loss of an empty micro-batch, for the names.
    """

    def __init__(self, layout: ParallelLayout, example: LossResult) -> None:
        self._layout = layout
        self._sums, self._maxima = list(example.sums), list(example.maxima)

    def reduce(self, results: Sequence[LossResult], num_trained_tokens: int) -> dict[str, float]:
        """Means per trained token, and maxima, over all micro-batches of all data ranks; two small all-reduces.

        Args:
            results: of this rank's micro-batches; empty where not on the last pipeline stage.
        """
        sums = self._over_data([r.sums for r in results], self._sums, dist.ReduceOp.SUM)
        maxima = self._over_data([r.maxima for r in results], self._maxima, dist.ReduceOp.MAX)
        assert sums.pop("tokens") == num_trained_tokens, "the ranks trained other tokens than the plan said"
        metrics = {_MEANS.get(name, f"loss/{name}"): value / num_trained_tokens for name, value in sums.items()}
        metrics |= {_MAXIMA.get(name, f"loss/{name}_max"): value for name, value in maxima.items()}
        metrics["train/tokens"] = float(num_trained_tokens)
        return metrics

    def _over_data(
        self, parts: Sequence[dict[str, Tensor]], names: list[str], op: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        table = None
        if self._layout.is_last_stage:
            rows = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
            table = rows.sum(0) if op == dist.ReduceOp.SUM else rows.amax(0)
        return dict(zip(names, self._layout.reduce_over_data(table, op).tolist(), strict=True))
