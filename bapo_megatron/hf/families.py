"""The supported architectures, as data: how each differs from plain Llama, and the weights that a checkpoint holds.

This is the file to edit to support another dense decoder: docs/models.md walks through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of config.json. A string in a bias field names the key of config.json that decides."""

    qkv_bias: bool | str = False  # on the query, key and value projections
    out_bias: bool | str = False  # on the attention's output projection
    mlp_bias: bool | str = False  # on gate, up and down
    qk_norm: bool = False  # RMSNorm over the head dimension of queries and keys, before the rotary embedding
    window_switch: str | None = None  # the key of config.json that turns sliding windows on, which are refused
    defaults: dict[str, Any] = field(default_factory=dict)  # what transformers takes where config.json is silent


FAMILIES = {
    "llama": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    "qwen2": Family(
        qkv_bias=True,
        window_switch="use_sliding_window",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28},
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        window_switch="use_sliding_window",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_window_layers": 28,
        },
    ),
}

# For every family; a family's own defaults come first.
COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_window_layers": 0,
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint.

    dims, one letter per dimension: V vocabulary, E hidden size, F feed-forward size, D head dimension,
    Q query heads x D, K key-value heads x D, 1 one.
    """

    name: str
    dims: str
    only_if: str | None = None  # the field of ModelShape that says whether the tensor is there


LAYER_PREFIX = "model.layers.{layer}."
BEFORE_LAYERS = (Weight("model.embed_tokens.weight", "VE"),)
IN_LAYER = (
    Weight("input_layernorm.weight", "E"),
    Weight("self_attn.q_proj.weight", "QE"),
    Weight("self_attn.q_proj.bias", "Q", only_if="qkv_bias"),
    Weight("self_attn.k_proj.weight", "KE"),
    Weight("self_attn.k_proj.bias", "K", only_if="qkv_bias"),
    Weight("self_attn.v_proj.weight", "KE"),
    Weight("self_attn.v_proj.bias", "K", only_if="qkv_bias"),
    Weight("self_attn.q_norm.weight", "D", only_if="qk_norm"),
    Weight("self_attn.k_norm.weight", "D", only_if="qk_norm"),
    Weight("self_attn.o_proj.weight", "EQ"),
    Weight("self_attn.o_proj.bias", "E", only_if="out_bias"),
    Weight("post_attention_layernorm.weight", "E"),
    Weight("mlp.gate_proj.weight", "FE"),
    Weight("mlp.gate_proj.bias", "F", only_if="mlp_bias"),
    Weight("mlp.up_proj.weight", "FE"),
    Weight("mlp.up_proj.bias", "F", only_if="mlp_bias"),
    Weight("mlp.down_proj.weight", "EF"),
    Weight("mlp.down_proj.bias", "E", only_if="mlp_bias"),
)
AFTER_LAYERS = (
    Weight("model.norm.weight", "E"),
    Weight("lm_head.weight", "VE", only_if="has_output_layer"),
    Weight("score.weight", "1E", only_if="has_value_head"),  # as transformers' ...ForSequenceClassification has it
)
