"""What a Hugging Face config.json says about a policy, and whether a layout can hold it. Imports no torch, no Megatron.

Dimension legend, used for the shapes of `hf_tensors`:
    V vocabulary, H hidden, F feed-forward, N attention heads, K key-value heads, D head dimension
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from plain Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of one dense decoder, read from config.json."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    rope: dict[str, Any]  # rope_type, rope_theta and the factors of that type, as in transformers' rope_parameters

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    def padded_vocab_size(self, tensor: int) -> int:
        """Vocabulary rows rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor) * tensor


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a Hugging Face checkpoint: {file} is missing (model.path)") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return config


def model_shape(hf_config: dict[str, Any]) -> ModelShape:
    """Read a config.json.

    Raises:
        CheckpointError: the architecture, or an option of it, is not supported; lists all reasons.
    """
    problems = unsupported(hf_config)
    if problems:
        raise CheckpointError("; ".join(problems))
    num_heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // num_heads
    return ModelShape(
        family=hf_config["model_type"],
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_size=hf_config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        vocab_size=hf_config["vocab_size"],
        norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        tied_embeddings=hf_config.get("tie_word_embeddings", False),
        max_positions=hf_config.get("max_position_embeddings", 32768),
        rope=_rope(hf_config),
    )


def unsupported(hf_config: dict[str, Any]) -> list[str]:
    """Why this architecture cannot be trained, empty where it can."""
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        return [f"model_type {family!r} is not supported; supported are {', '.join(sorted(FAMILIES))} (dense)"]
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    problems = [f"config.json has no {key!r}" for key in required if not isinstance(hf_config.get(key), int)]
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf_config.get(key):
            problems.append(f"config.json sets {key}, which is not supported")
    if hf_config.get("hidden_act", "silu") != "silu":
        problems.append(f"activation {hf_config['hidden_act']!r} is not supported; supported is silu")
    rope_type = _rope(hf_config)["rope_type"]
    if rope_type not in ROPE_TYPES:
        problems.append(f"rope scaling {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    return problems


def _rope(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings under transformers 5's names; older files spread them over rope_theta and rope_scaling."""
    rope = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf_config.get("rope_theta", 10000.0))
    return rope


def validate_layout(hf_config: dict[str, Any], tensor: int, pipeline: int, virtual_pipeline: int = 1) -> list[str]:
    """Why this model cannot be split this way; each message names the numbers and a working alternative.

    Args:
        hf_config: a config.json, see `load_hf_config`.
        tensor: tensor-parallel size (parallel.tensor).
        pipeline: pipeline-parallel size (parallel.pipeline).
        virtual_pipeline: chunks of each stage (parallel.virtual_pipeline).
    """
    problems = unsupported(hf_config)
    if problems:
        return problems
    shape = model_shape(hf_config)
    split = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "feed-forward rows": shape.ffn_size,
    }
    if bad := [f"{count} {what}" for what, count in split.items() if count % tensor]:
        works = [n for n in range(1, shape.num_heads + 1) if all(count % n == 0 for count in split.values())]
        problems.append(
            f"parallel.tensor={tensor} does not divide {', '.join(bad)}; parallel.tensor can be {_choices(works)}"
        )
    if shape.num_layers % pipeline:
        works = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        problems.append(
            f"parallel.pipeline={pipeline} does not divide {shape.num_layers} layers; "
            f"parallel.pipeline can be {_choices(works)}"
        )
    elif shape.num_layers // pipeline % virtual_pipeline:
        per_stage = shape.num_layers // pipeline
        works = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
        problems.append(
            f"parallel.virtual_pipeline={virtual_pipeline} does not divide the {per_stage} layers of a stage; "
            f"it can be {_choices(works)}"
        )
    if shape.num_heads % shape.num_kv_heads:
        problems.append(f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads")
    return problems


def _choices(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + " or " + str(values[-1]) if len(values) > 1 else str(values[0])


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights in a checkpoint of this model, in the order of the layers."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = (shape.hidden_size,)
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            tensors[f"{attention}.{name}.weight"] = (rows, shape.hidden_size)
            if shape.qkv_bias:
                tensors[f"{attention}.{name}.bias"] = (rows,)
        if shape.qk_norm:
            tensors[f"{attention}.q_norm.weight"] = tensors[f"{attention}.k_norm.weight"] = (shape.head_dim,)
        tensors[f"{attention}.o_proj.weight"] = (shape.hidden_size, query)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = (shape.hidden_size,)
        tensors[f"{mlp}.gate_proj.weight"] = tensors[f"{mlp}.up_proj.weight"] = (shape.ffn_size, shape.hidden_size)
        tensors[f"{mlp}.down_proj.weight"] = (shape.hidden_size, shape.ffn_size)
    tensors["model.norm.weight"] = (shape.hidden_size,)
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    return tensors
