"""Splitting Hugging Face tensors over ranks, and joining the parts again, along the boxes of `hf.splits`."""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.hf.splits import Box, Entry

# Transformer Engine's linears hold the preceding norm's weight: its name there -> its name in Megatron's layers.
_NORMS_IN_LINEARS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Slicer(Protocol):
    """A reader of slices of HF tensors (rows first, then columns) that leaves the rest unread."""

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor: ...


# Grouped linears hold one weight for each expert, Megatron's own layers one linear: both count this rank's experts.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<own>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<grouped>\d*)"
)


def canonical(name_in_layer: str, experts: Sequence[int] | None = None) -> str:
    """Return the name that a parameter of Megatron's or Transformer Engine's layer has in `hf.shape.entries`.

    Args:
        experts: the numbers of this rank's experts, if the layer has any.
    """
    if experts is not None and (match := _EXPERT.fullmatch(name_in_layer)):
        number = experts[int(match["own"] or match["grouped"])]
        return f"mlp.experts.local_experts.{number}.{match['linear']}.weight"
    return _NORMS_IN_LINEARS.get(name_in_layer, name_in_layer)


def to_shard(entry: Entry, read: Slicer, rank: int, size: int) -> Tensor:
    """Read, slice by slice, the part of the parameter that `rank`, one of its axis's `size` ranks, holds."""
    described = entry.shard(rank, size)
    ranges = [read(entry.hf_names[box.tensor], _slices(box)) for box in described.boxes]
    shard = ranges[0].new_zeros(described.shape)
    for box, values in zip(described.boxes, ranges, strict=True):
        _view(shard, box).copy_(values.reshape(box.view))
    return shard


def place_shard(entry: Entry, part: str, shard: Tensor, rank: int, size: int) -> Iterator[Piece]:
    """Place a rank's shard in its HF tensors, without padding or copies that an earlier rank has; undo `to_shard`.

    Args:
        part: the checkpoint's part that the shard belongs to: the weight, or one of Adam's moments.
    """
    for box in entry.owned(rank, size):
        if 0 not in box.size:
            name, whole = entry.hf_names[box.tensor], entry.hf_shapes[box.tensor]
            yield Piece(part, name, whole, box.start, box.size, _view(shard, box))


def from_shards(entry: Entry, shards: Sequence[Tensor]) -> list[Tensor]:
    """Join all ranks' parts, in rank order, into whole HF tensors; undo `to_shard`."""
    wholes = [shards[0].new_empty(shape) for shape in entry.hf_shapes]
    for rank, shard in enumerate(shards):
        for box in entry.owned(rank, len(shards)):
            wholes[box.tensor][_slices(box)] = _view(shard, box).reshape(box.size)
    return wholes


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))


def _view(shard: Tensor, box: Box) -> Tensor:
    """Return the values of a box, in their order, as a view of the shard."""
    return shard.flatten()[box.offset :].as_strided(box.view, box.strides)
