"""How Megatron's parameters are made of Hugging Face tensors: the name map as data, and the layouts it refers to.

A Megatron parameter is one rank's part ("shard") of one or several whole HF tensors:
    copy      the same on every tensor-parallel rank
    vocab     rows split evenly, after zero rows were added up to a multiple of the tensor-parallel size
    column    columns split evenly (RowParallelLinear)
    gate_up   each rank holds [its rows of gate; its rows of up]
    qkv       each rank holds, for each of its key-value heads, [query heads of the group; key head; value head]
Source: the layouts that megatron/core/transformer/{mlp,attention}.py and tensor_parallel/layers.py (0.16.1) expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bapo_megatron.hf.shape import ModelShape, hf_tensors

Kind = Literal["copy", "vocab", "column", "gate_up", "qkv"]

EMBEDDING, OUTPUT, VALUE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight", "score.weight"

_BEFORE_LAYERS: dict[str, tuple[Kind, tuple[str, ...]]] = {EMBEDDING: ("vocab", ("model.embed_tokens.weight",))}
_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("copy", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.linear_qkv.bias": (
        "qkv",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    "self_attention.q_layernorm.weight": ("copy", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("copy", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("column", ("self_attn.o_proj.weight",)),
    "self_attention.linear_proj.bias": ("copy", ("self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": ("copy", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc1.bias": ("gate_up", ("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    "mlp.linear_fc2.weight": ("column", ("mlp.down_proj.weight",)),
    "mlp.linear_fc2.bias": ("copy", ("mlp.down_proj.bias",)),
}
# Transformer Engine's linears hold the weight of the norm before them: its name in a layer, and the one used above.
_NORMS_IN_LINEARS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_AFTER_LAYERS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "decoder.final_layernorm.weight": ("copy", ("model.norm.weight",)),
    OUTPUT: ("vocab", ("lm_head.weight",)),
    VALUE_HEAD: ("copy", ("score.weight",)),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron_name: str  # with the layer's number within the whole model
    layer: int | None
    kind: Kind
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]


class Slicer(Protocol):
    """Reads a part of an HF tensor without reading the rest: rows first, then columns."""

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor: ...


def entries(shape: ModelShape) -> Iterator[Entry]:
    """All Megatron parameters of the whole model, embedding first, in a fixed order. Tied weights appear once."""
    known = hf_tensors(shape)

    def entry(name: str, layer: int | None, kind: Kind, hf_names: tuple[str, ...]) -> Iterator[Entry]:
        if all(hf_name in known for hf_name in hf_names):
            yield Entry(name, layer, kind, hf_names, tuple(known[hf_name] for hf_name in hf_names))

    for name, (kind, hf_names) in _BEFORE_LAYERS.items():
        yield from entry(name, None, kind, hf_names)
    for layer in range(shape.num_layers):
        for name, (kind, suffixes) in _LAYER.items():
            yield from entry(
                f"decoder.layers.{layer}.{name}", layer, kind, tuple(f"model.layers.{layer}.{s}" for s in suffixes)
            )
    for name, (kind, hf_names) in _AFTER_LAYERS.items():
        yield from entry(name, None, kind, hf_names)


def canonical(name_in_layer: str) -> str:
    """A parameter's name within a layer, whether the layer is Megatron's own or Transformer Engine's."""
    return _NORMS_IN_LINEARS.get(name_in_layer, name_in_layer)


def to_shard(entry: Entry, shape: ModelShape, read: Slicer, rank: int, size: int) -> Tensor:
    """Tensor-parallel rank `rank` of `size`: its part of the parameter, read slice by slice."""
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


class Placed(NamedTuple):
    """A tensor-parallel rank's part of one HF tensor: a contiguous range along each dimension."""

    hf_name: str
    shape: tuple[int, ...]  # of the whole HF tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    values: Tensor  # a view of the shard, of as many values; may be strided, and have a dimension more


def place_shard(entry: Entry, shape: ModelShape, shard: Tensor, rank: int, size: int) -> Iterator[Placed]:
    """Where the part of tensor-parallel rank `rank` of `size` belongs, without padding; undoes `to_shard`."""

    def placed(i: int, first: int, values: Tensor, dim: int = 0) -> Placed:
        whole = entry.hf_shapes[i]
        length = values.numel() * whole[dim] // prod(whole)
        start = tuple(first if d == dim else 0 for d in range(len(whole)))
        return Placed(entry.hf_names[i], whole, start, (*whole[:dim], length, *whole[dim + 1 :]), values)

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
        for i, part in enumerate(_split_qkv(shape, shard)):
            yield placed(i, rank * entry.hf_shapes[i][0] // size, part)


def _split_qkv(shape: ModelShape, shard: Tensor) -> Sequence[Tensor]:
    """Views [groups, rows of a group, ...] of the query, key and value rows."""
    heads_per_group = shape.num_heads // shape.num_kv_heads
    sizes = [heads_per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    return shard.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)


def from_shards(entry: Entry, shape: ModelShape, shards: Sequence[Tensor]) -> list[Tensor]:
    """The whole HF tensors from all tensor-parallel parts, in rank order; undoes `to_shard`."""
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
