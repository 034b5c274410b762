"""Which modules the layers are made of: Megatron's own with our norm and packed attention, or Transformer Engine's.

Transformer Engine's linears apply the norm before them (`TELayerNormColumnParallelLinear`), so its weight is theirs:
`learner/hf/names.py` maps the two sets of names onto each other. That path has not yet run on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm  # there without Transformer Engine, but cannot be built
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.learner.attention import PackedAttention, TransformerEngineAttention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark that makes `finalize_model_grads` sum its gradient under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Parameter has no such field)


def with_bias(linear: type) -> type:
    """The linear with a bias, whatever `add_bias_linear` says of all linears."""

    class Biased(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"bias": True}))

    Biased.__name__ = Biased.__qualname__ = f"Biased{linear.__name__}"
    return Biased


def block_spec(config: TransformerConfig, shape: ModelShape, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank, or of one of its chunks; `config.transformer_impl` chooses the modules."""
    layer, norm = _transformer_engine(config) if config.transformer_impl == "transformer_engine" else _local(config)
    parts = layer.submodules
    if shape.out_bias:
        attention = parts.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    if shape.mlp_bias:
        mlp = parts.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)
    layers = [copy.deepcopy(layer) for _ in range(get_num_layers_to_build(config, vp_stage=chunk))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """Megatron's parallel linears; also what trains without a GPU."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def _transformer_engine(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """Transformer Engine's linears, with the norms inside, and attention."""
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer.submodules.self_attention.submodules.core_attention = TransformerEngineAttention
    return layer, TENorm
