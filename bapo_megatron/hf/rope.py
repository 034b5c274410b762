"""Rotary frequencies of every supported rope type, as transformers computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.hf.shape import ModelShape


def rotary_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cosine and sine (1 but for yarn)."""
    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / shape.rope["rope_theta"] ** exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=shape.num_heads * shape.head_dim,  # not read where there is a head_dim, but checked
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=dict(shape.rope),
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
