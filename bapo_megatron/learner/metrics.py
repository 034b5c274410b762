"""From sums over tokens, spread over micro-batches and data ranks, to one update's metrics, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.losses import LossResult
from bapo_megatron.algorithms.mismatch import Mismatch
from bapo_megatron.learner.parallel import ParallelLayout

# Name in LossResult -> name in the run's metrics; other names stay as they are, below loss/ where they have no folder.
_MEANS = {
    "policy_loss": "loss/policy",
    "clipped_high": "loss/clip_high_share",
    "clipped_low": "loss/clip_low_share",
    "dual_clipped": "loss/dual_clip_share",
    "positive_tokens": "loss/positive_token_share",
    "negative_tokens": "loss/negative_token_share",
    "ratio": "loss/ratio_mean",
    "age": "staleness/mean",
    "importance_weight": "loss/importance_weight_mean",
    "importance_capped": "loss/importance_capped_share",
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

    def reduce(
        self, outcomes: Sequence[tuple[LossResult, Mismatch]], num_trained_tokens: int
    ) -> tuple[dict[str, float], Mismatch]:
        """Over all micro-batches of all data ranks: means per trained token and maxima, and the mismatch of all tokens
        (on the CPU). Two small all-reduces.

        Args:
            outcomes: of this rank's micro-batches; empty where not on the last pipeline stage.
        """
        num_sums = len(self._sums)
        added = self._over_data([_table(r.sums, self._sums, m.sums) for r, m in outcomes], dist.ReduceOp.SUM)
        largest = self._over_data([_table(r.maxima, self._maxima, m.largest) for r, m in outcomes], dist.ReduceOp.MAX)
        sums = dict(zip(self._sums, added[:num_sums].tolist(), strict=True))
        assert sums.pop("tokens") == num_trained_tokens, "the ranks trained other tokens than the plan said"
        metrics = {_MEANS.get(name, _filed(name)): value / num_trained_tokens for name, value in sums.items()}
        for name, value in zip(self._maxima, largest[:-1].tolist(), strict=True):
            metrics[_MAXIMA.get(name, f"loss/{name}_max")] = value
        metrics["train/tokens"] = float(num_trained_tokens)
        return metrics, Mismatch(added[num_sums:], largest[-1])

    def _over_data(self, tables: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
        table = None
        if self._layout.is_last_stage:
            rows = torch.stack(list(tables))
            table = rows.sum(0) if op == dist.ReduceOp.SUM else rows.amax(0)
        return self._layout.reduce_over_data(table, op).cpu()


def _filed(name: str) -> str:
    return name if "/" in name else f"loss/{name}"


def _table(scalars: dict[str, Tensor], names: list[str], more: Tensor) -> Tensor:
    """The scalars in the order of `names`, then `more`: float64."""
    return torch.cat([torch.stack([scalars[name].double() for name in names]), more.reshape(-1)])
