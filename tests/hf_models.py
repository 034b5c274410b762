"""Tiny models of every supported family and option, in shapes that no layout divides evenly."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from bapo_megatron.hf.reader import SINGLE

VOCAB_SIZE = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,  # no tensor-parallel size divides it
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
}
_ODD_HEAD = {"head_dim": 10}  # hidden_size / num_attention_heads is 4
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama2": (LlamaConfig, SIZES | {"num_key_value_heads": 6}),
    "llama3-tied": (LlamaConfig, dict(**SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama-biases": (LlamaConfig, dict(**SIZES, **_ODD_HEAD, attention_bias=True, mlp_bias=True)),
    "llama-attention-bias": (LlamaConfig, dict(**SIZES, attention_bias=True, tie_word_embeddings=True)),
    "llama-mlp-bias-yarn": (LlamaConfig, dict(**SIZES, mlp_bias=True, rope_parameters=_YARN)),
    "qwen2": (Qwen2Config, SIZES),
    "qwen2-tied-linear": (Qwen2Config, dict(**SIZES, tie_word_embeddings=True, rope_parameters=_LINEAR)),
    "qwen3": (Qwen3Config, dict(**SIZES, **_ODD_HEAD)),
    "qwen3-tied-yarn": (Qwen3Config, dict(**SIZES, **_ODD_HEAD, tie_word_embeddings=True, rope_parameters=_YARN)),
    "qwen3-biases": (Qwen3Config, dict(**SIZES, **_ODD_HEAD, attention_bias=True)),
    "mistral": (MistralConfig, dict(**SIZES, **_ODD_HEAD, sliding_window=None)),
    "gemma": (GemmaConfig, dict(**SIZES, **_ODD_HEAD)),
    "granite": (GraniteConfig, dict(**SIZES, **_MULTIPLIERS)),
    "granite-tied-biases": (
        GraniteConfig,
        dict(**SIZES, **_MULTIPLIERS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "olmo2": (Olmo2Config, SIZES),
    "olmo2-tied-biases-yarn": (
        Olmo2Config,
        dict(**SIZES, tie_word_embeddings=True, attention_bias=True, rope_parameters=_YARN),
    ),
    "smollm3": (SmolLM3Config, SIZES),
    "smollm3-untied-biases": (
        SmolLM3Config,
        dict(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, no_rope_layer_interval=2),
    ),
    "gemma-untied-biases": (GemmaConfig, dict(**SIZES, **_ODD_HEAD, tie_word_embeddings=False, attention_bias=True)),
}

_MIXTURE = dict(**SIZES, **_ODD_HEAD, moe_intermediate_size=14)
MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3-moe-6-experts": (Qwen3MoeConfig, dict(**_MIXTURE, num_experts=6, num_experts_per_tok=1)),
    "qwen3-moe-128-experts": (
        Qwen3MoeConfig,
        dict(**_MIXTURE, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=True),
    ),
}

_HYBRID = dict(
    **SIZES,
    head_dim=16,
    full_attention_interval=3,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
)
HYBRIDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3.5": (Qwen3_5TextConfig, _HYBRID),
    "qwen3-5-yarn": (Qwen3_5TextConfig, dict(**_HYBRID, rope_parameters=_YARN | {"partial_rotary_factor": 0.25})),
}
HYBRID_MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        {name: value for name, value in _HYBRID.items() if name != "intermediate_size"}
        | {"num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 14, "shared_expert_intermediate_size": 10},
    ),
}


def make_model_config(name: str, **change: Any) -> PreTrainedConfig:
    cls, options = (MODELS | MIXTURES | HYBRIDS | HYBRID_MIXTURES)[name]
    return cls(**options | change)


def save_model(name: str, folder: Path, **change: Any) -> PreTrainedModel:
    return save_randomised(make_model_config(name, **change), folder)


def save_randomised(config: PreTrainedConfig, folder: Path, seed: int = 5) -> PreTrainedModel:
    """Save and return a model with no weight value that a mistake in a name map could hit by chance."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if config.model_type in ("qwen3_moe", "qwen3_5_moe_text"):
        model.set_experts_implementation("eager")  # the other one wants sizes that 4 divides
    randomise(model)
    model.save_pretrained(folder)
    return model


def stack_experts(model: PreTrainedModel, folder: Path) -> None:
    """Write a saved model's weights again in one file, with one tensor for all experts of a layer, as in memory."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / SINGLE)


def randomise(model: PreTrainedModel) -> None:
    """Replace all weights, norms around what leaves a value unchanged."""
    model_type = model.config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            plus_one = model_type == "gemma" or (model_type.startswith("qwen3_5") and "linear" not in name)
            is_one = "norm" in name and not plus_one  # otherwise they multiply by 1 + weight
            parameter.copy_(is_one + 0.2 * noise)
