"""A tiny Qwen3-MoE whose routers choose differently from token to token."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def save_mixture(
    folder: Path, seed: int, max_context: int, *, vocab_size: int = 96, initializer_range: float = 0.15
) -> Qwen3MoeForCausalLM:
    """Save and return a random model of three layers, with two of eight experts for each token."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=max_context,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=initializer_range,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model
