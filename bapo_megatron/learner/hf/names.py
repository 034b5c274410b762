"""Splitting Hugging Face tensors over tensor-parallel ranks, and joining the parts again, by `hf.families.Kind`."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.hf.shape import Entry, ModelShape

# Transformer Engine's linears hold the weight of the norm before them: its name there -> its name in Megatron's layers.
_NORMS_IN_LINEARS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Slicer(Protocol):
    """A reader of slices of HF tensors, rows first, then columns, that leaves the rest unread."""

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor: ...


def canonical(name_in_layer: str) -> str:
    """Return the name in Megatron's own layer of a parameter of that layer or of Transformer Engine's."""
    return _NORMS_IN_LINEARS.get(name_in_layer, name_in_layer)


def to_shard(entry: Entry, shape: ModelShape, read: Slicer, rank: int, size: int) -> Tensor:
    """Read the part of the parameter that tensor-parallel rank `rank` of `size` holds, slice by slice."""
    if entry.kind == "copy":
        return read(entry.hf_names[0], (slice(None),))
    if entry.kind == "column":
        columns = entry.hf_shapes[0][1] // size
        return read(entry.hf_names[0], (slice(None), slice(rank * columns, (rank + 1) * columns)))
    if entry.kind == "vocab":
        rows = shape.padded_vocab_size(size) // size
        part = read(entry.hf_names[0], (slice(min(rank * rows, shape.vocab_size), (rank + 1) * rows),))
        return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])
    parts = []
    for name, hf_shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
        rows = hf_shape[0] // size
        parts.append(read(name, (slice(rank * rows, (rank + 1) * rows),)))
    if entry.kind == "qkv":
        groups = shape.num_kv_heads // size
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    return torch.cat(parts)


def place_shard(entry: Entry, shape: ModelShape, part: str, shard: Tensor, rank: int, size: int) -> Iterator[Piece]:
    """Place the shard of tensor-parallel rank `rank` of `size` in its HF tensors, without padding; undo `to_shard`.

    Args:
        part: of the checkpoint: the weight, or one of Adam's moments.
    """

    def placed(i: int, first: int, values: Tensor, dim: int = 0) -> Piece:
        whole = entry.hf_shapes[i]
        length = values.numel() * whole[dim] // prod(whole)
        start = tuple(first if d == dim else 0 for d in range(len(whole)))
        return Piece(part, entry.hf_names[i], whole, start, (*whole[:dim], length, *whole[dim + 1 :]), values)

    if entry.kind == "copy":
        yield placed(0, 0, shard)
    elif entry.kind == "column":
        yield placed(0, rank * shard.shape[1], shard, dim=1)
    elif entry.kind == "vocab":
        first = rank * shard.shape[0]
        if first < shape.vocab_size:
            yield placed(0, first, shard[: shape.vocab_size - first])
    elif entry.kind == "gate_up":
        for i, half in enumerate(shard.chunk(2)):
            yield placed(i, rank * half.shape[0], half)
    else:
        for i, rows in enumerate(_split_qkv(shape, shard)):
            yield placed(i, rank * entry.hf_shapes[i][0] // size, rows)


def _split_qkv(shape: ModelShape, shard: Tensor) -> Sequence[Tensor]:
    """Return views [groups, rows of a group, ...] of the query, key and value rows."""
    heads_per_group = shape.num_heads // shape.num_kv_heads
    sizes = [heads_per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    return shard.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)


def from_shards(entry: Entry, shape: ModelShape, shards: Sequence[Tensor]) -> list[Tensor]:
    """Join all tensor-parallel parts, in rank order, to whole HF tensors; undo `to_shard`."""
    if entry.kind == "copy":
        return [shards[0]]
    if entry.kind == "column":
        return [torch.cat(list(shards), dim=1)]
    if entry.kind == "vocab":
        return [torch.cat(list(shards))[: shape.vocab_size]]
    if entry.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    parts = zip(*(_split_qkv(shape, shard) for shard in shards), strict=True)
    return [torch.cat(part).flatten(0, 1) for part in parts]
