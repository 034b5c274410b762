"""The boxes that all ranks own of a model's weights, for layouts that tests with processes have no time for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.hf.families import EMBEDDING, OUTPUT
from bapo_megatron.hf.shape import ModelShape, hf_tensors, model_shape
from bapo_megatron.learner.exchange import placed_entries
from bapo_megatron.learner.slicing import to_shard
from bapo_megatron.learner.weight_source import ModelWeights


@dataclass(frozen=True)
class Sizes:
    """Numbers of tensor ranks, stages and copies, and of the ranks that share out experts."""

    tensor: int
    stages: int
    copies: int
    expert: int = 1


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, Sizes]:
    """Return a model, and a layout that it can have."""
    tensor, stages, copies = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 6) if tensor * copies % n == 0]))
    experts = expert * draw(st.integers(1, 3))
    kv_heads = tensor * draw(st.integers(1, 2))
    config = {
        "model_type": draw(st.sampled_from(["qwen2", "qwen3", "llama", "qwen3_moe"])),
        "vocab_size": draw(st.integers(3, 19)),  # divides by nothing
        "hidden_size": 4 * draw(st.integers(1, 3)),
        "intermediate_size": tensor * draw(st.integers(1, 3)),
        "num_hidden_layers": stages * draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "moe_intermediate_size": tensor * draw(st.integers(1, 3)),
        "num_experts": experts,
        "num_experts_per_tok": 1,
    }
    shape = model_shape(config)
    return shape, Sizes(tensor, stages, copies, 1 if shape.experts is None else expert)


def rank_of(shape: ModelShape, weights: dict[str, Tensor], ranks: tuple[int, int, int], sizes: Sizes) -> ModelWeights:
    """Return the source of one rank: tensor rank, stage and copy."""
    rank, stage, copy = ranks
    layers_per_stage = shape.num_layers // sizes.stages
    chunk, layers = Module(), ModuleList(Module() for _ in range(layers_per_stage))
    for number, layer in enumerate(layers, start=1 + stage * layers_per_stage):
        layer.layer_number = number  # type: ignore[assignment]
    chunk.decoder = Module()
    chunk.decoder.layers = layers

    def axis(rank: int, size: int, copy: int, num_copies: int) -> SimpleNamespace:
        copies = SimpleNamespace(rank=lambda: copy, size=lambda: num_copies)
        return SimpleNamespace(rank=rank, size=size, copies=copies)

    axes = {"dense": axis(rank, sizes.tensor, copy, sizes.copies)}
    if sizes.expert > 1:  # ranks of experts fold over copies x tensor ranks
        own_copy, own_rank = divmod(rank + sizes.tensor * copy, sizes.expert)
        axes["expert"] = axis(own_rank, sizes.expert, own_copy, sizes.tensor * sizes.copies // sizes.expert)
    layout: Any = SimpleNamespace(axes=axes)
    of_rank = shape.experts.num_experts // sizes.expert if shape.experts else 0
    first_expert = axes["expert"].rank * of_rank if "expert" in axes else 0

    def put(name: str, values: Tensor) -> None:
        *path, last = name.split(".")
        module = chunk
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, Module())
            module = module.get_submodule(part)
        module.register_parameter(last, Parameter(values))

    for entry, its in placed_entries(shape, layout):
        if entry.holder(its.size) not in (None, its.rank):
            continue
        values = to_shard(entry, lambda name, index: weights[name][index], its.rank, its.size)
        if entry.layer is not None:
            if entry.layer // layers_per_stage == stage:
                _, _, _, rest = entry.megatron_name.split(".", 3)
                if entry.expert is not None:
                    rest = rest.replace(f".{entry.expert}.", f".{entry.expert - first_expert}.")
                put(f"decoder.layers.{entry.layer % layers_per_stage}.{rest}", values)
        elif stage == (0 if entry.megatron_name == EMBEDDING.name else sizes.stages - 1):
            put(entry.megatron_name, values)
        elif shape.tied_embeddings and entry.megatron_name == EMBEDDING.name and stage == sizes.stages - 1:
            put(OUTPUT.name, values)  # a copy that no rank sends
    if shape.experts is not None:
        for layer in layers:
            layer.mlp.local_expert_indices = range(first_expert, shape.experts.num_experts)  # type: ignore[union-attr]
    return ModelWeights(ModuleList([chunk]), shape, layout, version=0)


@settings(deadline=None, max_examples=80)
@given(layouts(), st.integers(0, 2**31))
def test_the_pieces_of_all_ranks_make_up_each_weight_once(drawn: tuple[ModelShape, Sizes], seed: int) -> None:
    shape, sizes = drawn
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(size, generator=generator) for name, size in hf_tensors(shape).items()}
    joined = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    for ranks in product(range(sizes.tensor), range(sizes.stages), range(sizes.copies)):
        source = rank_of(shape, weights, ranks, sizes)
        assert [spec.name for spec in source.manifest()] == list(weights), "the same on every rank"
        for piece in source.pieces():
            assert piece.shape == tuple(weights[piece.name].shape)
            box = joined[piece.name][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
            assert box.isnan().all(), f"{piece.name} comes twice"
            box.copy_(piece.values.reshape(piece.size))
    for name, values in joined.items():
        assert torch.equal(values.view(torch.int32), weights[name].view(torch.int32)), name
