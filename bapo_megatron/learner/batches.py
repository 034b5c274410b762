"""Micro-batches as Megatron's schedules want them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from bapo_megatron.types import MicroBatch


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch with all tensors on `device`."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(MicroBatch)}
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


def pad_to(batch: MicroBatch, num_tokens: int) -> MicroBatch:
    """Append one sequence of zeros without response rows, so that the pack has `num_tokens` tokens."""
    missing = num_tokens - batch.num_tokens
    if missing == 0:
        return batch
    assert missing > 0, f"cannot pad {batch.num_tokens} tokens to {num_tokens}"
    ids_T, ends_S1 = batch.token_ids_T, batch.cu_seqlens_S1
    return replace(
        batch,
        token_ids_T=torch.cat([ids_T, ids_T.new_zeros(missing)]),
        position_ids_T=torch.cat([batch.position_ids_T, torch.arange(missing).to(batch.position_ids_T)]),
        cu_seqlens_S1=torch.cat([ends_S1, ends_S1.new_tensor([num_tokens])]),
    )


def equal_lengths(batches: list[MicroBatch], *, multiple_of: int, all_equal: bool) -> list[MicroBatch]:
    """Pad packs to a multiple of the tensor-parallel size (sequence parallelism) and, for pipelines, to one length.

    Pipeline stages exchange hidden states whose shape is agreed once per step.
    """
    lengths = [-(-batch.num_tokens // multiple_of) * multiple_of for batch in batches]
    if all_equal:
        lengths = [max(lengths)] * len(lengths)
    return [pad_to(batch, length) for batch, length in zip(batches, lengths, strict=True)]
