"""A tiny Qwen3.5, dense or with experts, whose states matter: a wrong one changes log-probs by 0.1 to 1, rounding by
some millionths."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.hf_models import stack_experts

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def save_hybrid(
    folder: Path,
    seed: int,
    max_context: int,
    *,
    vocab_size: int = 96,
    published: bool = False,
    rope: dict[str, Any] | None = None,
    experts: bool = False,
) -> Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM:
    """Save and return a random model of two layers with linear attention and two with full attention.

    Args:
        published: save it as the published models are, as the text part of one that also knows images.
        rope: `rope_parameters` other than the default.
        experts: make each MLP a mixture, whose router chooses differently from token to token.
    """
    torch.manual_seed(seed)
    kind = Qwen3_5MoeTextConfig if experts else Qwen3_5TextConfig
    config = kind(
        **(_EXPERTS if experts else {"intermediate_size": 96}),
        vocab_size=vocab_size,
        hidden_size=64,
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
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.02,
        rope_parameters=rope,
    )
    model = (Qwen3_5MoeForCausalLM if experts else Qwen3_5ForCausalLM)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.normal_(-2, 0.5)  # slow decay
            elif name.endswith("dt_bias"):
                parameter.normal_(-1, 0.5)
            elif parameter.dim() == 1 or "conv1d" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                parameter.normal_(0, 0.5)
        model.lm_head.weight.mul_(4)  # so that distributions are not flat
    model.save_pretrained(folder)
    if experts and published:
        stack_experts(model, folder)
    if published:
        file, weights = folder / "config.json", load_file(folder / "model.safetensors")
        parts = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
        if experts:
            parts = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
        file.write_text(json.dumps(parts | {"tie_word_embeddings": False, "text_config": json.loads(file.read_text())}))
        renamed = {re.sub(r"^model\.", "model.language_model.", name): weight for name, weight in weights.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return model
