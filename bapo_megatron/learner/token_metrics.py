"""From the losses' per-token records to one update's metrics, the same on every rank.

TokenLoss -> sums and maxima of a micro-batch -> of this rank's micro-batches -> of all data ranks -> metrics
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.losses import TokenLoss
from bapo_megatron.algorithms.mismatch import Mismatch, no_mismatch
from bapo_megatron.errors import UserError
from bapo_megatron.learner.parallel import ParallelLayout
from bapo_megatron.metrics import METRICS, Metric


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums and maxima over the tokens of a micro-batch.

    There is a column for every metric that a loss may have, so that stages without a loss know the columns too. A
    metric that does not apply is 0 and not `present`.
    """

    sums: Tensor  # float64: number of trained tokens, sums by `TokenMetrics.means`, then the mismatch's sums
    maxima: Tensor  # float64: maxima by `TokenMetrics.largest`, largest mismatch, then 1 for each present metric


class TokenMetrics:
    """The metrics over tokens of a loss.

    Args:
        own: the loss's own metrics, besides the metrics of metrics.toml.
    """

    def __init__(self, own: Sequence[Metric] = ()) -> None:
        self._own = own
        declared = (*METRICS.values(), *own)
        self.means = [metric for metric in declared if metric.tokens == "mean"]
        self.largest = [metric for metric in declared if metric.tokens == "max"]

    def sums(self, tokens: TokenLoss, *, with_profile: bool = False) -> dict[str, Tensor]:
        """Sum over its tokens the declared means that the record has: float32 scalars by key."""
        values = {metric.key: getattr(tokens, metric.of, None) for metric in self.means if metric.of}
        sums = {key: values_R.sum(dtype=torch.float32) for key, values_R in values.items() if values_R is not None}
        return sums | tokens.tables(with_profile=with_profile)

    def maxima(self, tokens: TokenLoss) -> dict[str, Tensor]:
        """Take the maximum over its tokens of the declared maxima that the record has: float32 scalars by key.

        They are 0 without tokens.
        """
        values = {metric.key: getattr(tokens, metric.of, None) for metric in self.largest}
        return {
            key: values_R.float().amax() if values_R.numel() else values_R.new_zeros((), dtype=torch.float32)
            for key, values_R in values.items()
            if values_R is not None
        }

    @torch.no_grad()
    def summarize(self, tokens: TokenLoss, mismatch: Mismatch, *, with_profile: bool) -> TokenSums:
        """Reduce one micro-batch's record to two small rows.

        Raises:
            UserError: the record lacks the field that one of the loss's own metrics reads.
        """
        for metric in self._own:
            if metric.of and not hasattr(tokens, metric.of):
                raise UserError(
                    f"the metric {metric.key} reads {metric.of}, a field that the record returned by its loss, "
                    f"{type(tokens).__name__}, does not have"
                )
        sums, maxima = self.sums(tokens, with_profile=with_profile), self.maxima(tokens)
        device = tokens.mask_R.device
        present = torch.tensor([float(m.key in sums or m.key in maxima) for m in (*self.means, *self.largest)])
        present = present.double().to(device, non_blocking=True)
        return TokenSums(
            torch.cat([tokens.mask_R.sum().double()[None], _row(sums, self.means, device), mismatch.sums]),
            torch.cat([_row(maxima, self.largest, device), mismatch.largest[None], present]),
        )

    def reduce(
        self, rows: Sequence[TokenSums], num_expected: int | None, layout: ParallelLayout
    ) -> tuple[dict[str, float], Mismatch]:
        """Reduce over all micro-batches of all data ranks, with two small all-reduces.

        Returns the metrics by key (means per trained token, the number of these tokens, maxima), and the mismatch of
        all tokens, on the CPU.

        Args:
            rows: one for each of this rank's micro-batches; empty unless it is on the last pipeline stage.
            num_expected: trained tokens of all ranks; None if the update rule leaves some out.
        """
        num_means, num_maxima = len(self.means), len(self.largest)
        sums = torch.zeros(1 + num_means + no_mismatch().sums.numel(), dtype=torch.float64)
        largest = torch.zeros(num_maxima + 1 + num_means + num_maxima, dtype=torch.float64)
        if rows:
            sums, largest = torch.stack([r.sums for r in rows]).sum(0), torch.stack([r.maxima for r in rows]).amax(0)
        sums, largest = layout.reduce_over_data(sums).cpu(), layout.reduce_over_data(largest, dist.ReduceOp.MAX).cpu()
        num_trained_tokens = int(sums[0])
        assert num_expected in (None, num_trained_tokens), "the ranks trained another number of tokens than planned"
        of_all = sums[1 : 1 + num_means].tolist()
        means = [x / num_trained_tokens if num_trained_tokens else math.nan for x in of_all]
        values = means + largest[:num_maxima].tolist()
        present = largest[num_maxima + 1 :].tolist()
        declared = (*self.means, *self.largest)
        metrics = {m.key: x for m, x, is_present in zip(declared, values, present, strict=True) if is_present}
        for metric in self.means:
            if metric.squared_per and metric.key in metrics:
                metrics[metric.key] = metrics[metric.key] ** 2 / (metrics[metric.squared_per] or math.nan)
        metrics["train/tokens"] = float(num_trained_tokens)
        return metrics, Mismatch(sums[1 + num_means :], largest[num_maxima])


def _row(values: Mapping[str, Tensor], metrics: Sequence[Metric], device: torch.device) -> Tensor:
    absent = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([values[m.key].double() if m.key in values else absent for m in metrics])
