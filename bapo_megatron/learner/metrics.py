"""From the losses' per-token records to one update's metrics, the same on every rank.

TokenLoss -> sums and maxima of a micro-batch -> of this rank's micro-batches -> of all data ranks -> metrics
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.diagnostics import entropy_rule_sums, token_profile_sums
from bapo_megatron.algorithms.losses import ClippedTokenLoss, TokenLoss
from bapo_megatron.algorithms.mismatch import Mismatch, no_mismatch
from bapo_megatron.learner.parallel import ParallelLayout
from bapo_megatron.metrics import METRICS, Metric

_MEANS = [metric for metric in METRICS.values() if metric.tokens == "mean"]
_MAXIMA = [metric for metric in METRICS.values() if metric.tokens == "max"]


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums and maxima over the tokens of a micro-batch. The columns are those of all declared metrics, so that stages
    that compute no loss know them, too; a metric that does not apply is 0 and not `present`."""

    sums: Tensor  # float64: number of trained tokens, sums by `_MEANS`, then those of the mismatch
    maxima: Tensor  # float64: maxima by `_MAXIMA`, largest mismatch, then 1 for each metric that is present


def token_sums(tokens: TokenLoss, *, with_profile: bool = False) -> dict[str, Tensor]:
    """Sum the declared means that the record has over its tokens: float32 scalars by key."""
    values = {metric.key: getattr(tokens, metric.of, None) for metric in _MEANS if metric.of}
    sums = {key: values_R.sum(dtype=torch.float32) for key, values_R in values.items() if values_R is not None}
    if isinstance(tokens, ClippedTokenLoss):
        sums |= entropy_rule_sums(tokens)
        if with_profile:
            sums |= token_profile_sums(tokens)
    return sums


def token_maxima(tokens: TokenLoss) -> dict[str, Tensor]:
    """Maximise the declared maxima that the record has over its tokens: float32 scalars by key, 0 without tokens."""
    values = {metric.key: getattr(tokens, metric.of, None) for metric in _MAXIMA}
    return {
        key: values_R.float().amax() if values_R.numel() else values_R.new_zeros((), dtype=torch.float32)
        for key, values_R in values.items()
        if values_R is not None
    }


@torch.no_grad()
def summarize(tokens: TokenLoss, mismatch: Mismatch, *, with_profile: bool) -> TokenSums:
    """Reduce one micro-batch's record; what remains of it is two small rows."""
    sums, maxima = token_sums(tokens, with_profile=with_profile), token_maxima(tokens)
    device = tokens.mask_R.device
    present = torch.tensor([float(metric.key in sums or metric.key in maxima) for metric in (*_MEANS, *_MAXIMA)])
    present = present.double().to(device, non_blocking=True)
    return TokenSums(
        torch.cat([tokens.mask_R.sum().double()[None], _row(sums, _MEANS, device), mismatch.sums]),
        torch.cat([_row(maxima, _MAXIMA, device), mismatch.largest[None], present]),
    )


def reduce_tokens(
    rows: Sequence[TokenSums], num_trained_tokens: int, layout: ParallelLayout
) -> tuple[dict[str, float], Mismatch]:
    """Reduce over all micro-batches of all data ranks: means per trained token and maxima, by key, and the mismatch of
    all tokens (on the CPU). Two small all-reduces.

    Args:
        rows: of this rank's micro-batches; empty unless it is on the last pipeline stage.
    """
    num_means, num_maxima = len(_MEANS), len(_MAXIMA)
    sums = torch.zeros(1 + num_means + no_mismatch().sums.numel(), dtype=torch.float64)
    largest = torch.zeros(num_maxima + 1 + num_means + num_maxima, dtype=torch.float64)
    if rows:
        sums, largest = torch.stack([r.sums for r in rows]).sum(0), torch.stack([r.maxima for r in rows]).amax(0)
    sums, largest = layout.reduce_over_data(sums).cpu(), layout.reduce_over_data(largest, dist.ReduceOp.MAX).cpu()
    assert sums[0] == num_trained_tokens, "the ranks trained other tokens than the plan said"
    values = [x / num_trained_tokens for x in sums[1 : 1 + num_means].tolist()] + largest[:num_maxima].tolist()
    present = largest[num_maxima + 1 :].tolist()
    metrics = {m.key: x for m, x, is_present in zip((*_MEANS, *_MAXIMA), values, present, strict=True) if is_present}
    return metrics, Mismatch(sums[1 + num_means :], largest[num_maxima])


def _row(values: Mapping[str, Tensor], metrics: Sequence[Metric], device: torch.device) -> Tensor:
    absent = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([values[m.key].double() if m.key in values else absent for m in metrics])
