"""A tiny Qwen3.5 whose states matter: a wrong one changes log-probs by 0.1 to 1, rounding by some millionths."""

from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig


def save_hybrid(folder: Path, seed: int, max_context: int, *, vocab_size: int = 96, eos: int = 1) -> Qwen3_5ForCausalLM:
    """Save and return a random model of two layers with linear attention and two with full attention."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        eos_token_id=eos,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.02,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.normal_(-2, 0.5)  # slow decay
            elif name.endswith("dt_bias"):
                parameter.normal_(-1, 0.5)
            elif parameter.dim() == 1 or "conv1d" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(4)  # so that distributions are not flat
    model.save_pretrained(folder)
    return model
