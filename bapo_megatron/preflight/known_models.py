"""config.json of the models in the shipped recipes, so that `bapo check` can plan them without their weights.

Only the keys that decide sizes and limits. Source: the named repositories on the Hugging Face hub. An existing folder
takes precedence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.hf.shape import ModelShape, load_hf_config, model_shape

_QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-7B": _QWEN2_7B | {"max_position_embeddings": 131072},
    "Qwen2.5-Math-7B": _QWEN2_7B | {"max_position_embeddings": 4096},
    # The same sizes, after your own long-context fine-tuning: the paper's BP-Math-7B is not published.
    "Qwen2.5-Math-7B-64k": _QWEN2_7B | {"max_position_embeddings": 65536, "rope_theta": 1000000.0},
    "OctoThinker-3B-Long-Zero": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "DeepSeek-R1-Distill-Qwen-32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": _QWEN3_32B,
    # The same weights; config.json is edited for long inputs by the model card, see configs/models/qwen3-32b.toml.
    "Qwen3-32B-64k": _QWEN3_32B
    | {
        "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768},
    },
}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the config.json of a model whose folder is not on this machine, or None for an unknown folder name.

    Example: known_config("models/Qwen3-32B")["num_hidden_layers"] is 64.
    """
    folder = Path(path).expanduser()
    return None if folder.exists() else KNOWN_MODELS.get(folder.name)


def planned_config(path: str) -> dict[str, Any]:
    """Return the config.json of `model.path`, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it.
    """
    return known_config(path) or load_hf_config(resolve_model_path(path))


def planned_shape(path: str) -> ModelShape:
    """Return the shape of `model.path`, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it, or the model is not supported.
    """
    return model_shape(planned_config(path))
