"""Sums of tables over ranks, in hosts that train with Megatron-Core, with FSDP or in one process."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_group(table: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of a vector over the ranks of the groups, on the CPU; one all-reduce per group."""
    table = table.clone()
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend(groups[0]):
        table = table.cuda()
    for group in groups:
        dist.all_reduce(table, group=group)
    return table.cpu()


def sum_over_data_ranks(table: Tensor) -> Tensor:
    """Return the sum over the ranks that hold other tokens: a Megatron model's data and context ranks, otherwise all.

    Only the last pipeline stage of a Megatron model calls this. Under FSDP's sequence parallelism, copies of tokens
    scale both sides of the table by the same factor.
    """
    if not dist.is_initialized():
        return table
    return sum_over_group(table, _megatron_group() if _is_megatron() else dist.group.WORLD)


def has_loss() -> bool:
    """Return whether this rank computes the loss: all do, except the earlier stages of a Megatron pipeline."""
    if not _is_megatron():
        return True
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def _is_megatron() -> bool:
    if "megatron.core" not in sys.modules:  # the host would have imported it
        return False
    from megatron.core import parallel_state

    return parallel_state.model_parallel_is_initialized()


def _megatron_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)
