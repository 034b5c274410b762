"""Micro-batches on the way to the model. All padding is done before, by `buffer/packing.py`."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from bapo_megatron.learner.parallel import ParallelLayout
from bapo_megatron.types import MicroBatch, MiniBatch


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch with all tensors on `device`."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(MicroBatch)}
    return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


def check_packed_for(layout: ParallelLayout, minibatch: MiniBatch) -> None:
    """A mini-batch that was packed for another rank would give wrong numbers, not an error."""
    for pack in minibatch.micro_batches:
        assert int(pack.cu_seqlens_S1[-1]) == pack.num_tokens * layout.context_size, "packed for other context ranks"
    if layout.pipeline_size > 1:
        lengths = {pack.num_tokens for pack in minibatch.micro_batches}
        assert len(lengths) == 1, f"packs of a pipeline need one length, not {sorted(lengths)}"
