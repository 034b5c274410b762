"""What a Hugging Face config.json says about a model: one description for the learner and for the embedded engine.

Imports neither torch nor Megatron, so that `bapo check` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    COMMON_DEFAULTS,
    FAMILIES,
    IN_LAYER,
    LAYER_PREFIX,
    Weight,
)

# Those whose frequencies do not depend on the sequence length, and the numbers that each cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One dense decoder: its sizes, and the choices that decide its computation."""

    family: str  # model_type of config.json
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    rope: dict[str, Any]  # rope_type, rope_theta and the factors of that type, as in transformers' rope_parameters
    eos_token_ids: frozenset[int] = field(compare=False)  # when to stop sampling: no part of the computation
    has_value_head: bool = False  # a critic: one number for each token instead of a language-model head

    @property
    def has_output_layer(self) -> bool:
        """Whether the language-model head has weights of its own."""
        return not self.tied_embeddings and not self.has_value_head

    def with_value_head(self) -> ModelShape:
        """The critic with this model's body."""
        return dataclasses.replace(self, has_value_head=True, tied_embeddings=False)

    def padded_vocab_size(self, tensor: int) -> int:
        """Vocabulary rows rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor) * tensor

    def to_json(self) -> dict[str, Any]:
        """All that a checkpoint of this model must share with another to be loaded by it."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a Hugging Face checkpoint: {file} is missing (model.path)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return config


def model_shape(hf_config: dict[str, Any], where: str | Path | None = None) -> ModelShape:
    """Read a config.json.

    Args:
        where: the checkpoint's folder, for error messages.

    Raises:
        CheckpointError: the architecture, or an option of it, is not supported; lists all reasons.
    """
    if problems := unsupported(hf_config):
        raise CheckpointError((f"{Path(where) / 'config.json'}: " if where else "") + "; ".join(problems))
    name, get = hf_config["model_type"], _Settings(hf_config)
    family = FAMILIES[name]

    def decided(switch: bool | str) -> bool:
        return bool(get(switch)) if isinstance(switch, str) else switch

    num_heads, eos = get("num_attention_heads"), get("eos_token_id")
    return ModelShape(
        family=name,
        num_layers=get("num_hidden_layers"),
        hidden_size=get("hidden_size"),
        ffn_size=get("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=get("num_key_value_heads") or num_heads,
        head_dim=get("head_dim") or get("hidden_size") // num_heads,
        vocab_size=get("vocab_size"),
        norm_eps=get("rms_norm_eps"),
        tied_embeddings=get("tie_word_embeddings"),
        qkv_bias=decided(family.qkv_bias),
        out_bias=decided(family.out_bias),
        mlp_bias=decided(family.mlp_bias),
        qk_norm=family.qk_norm,
        max_positions=get("max_position_embeddings"),
        rope=_rope(get),
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
    )


def unsupported(hf_config: dict[str, Any]) -> list[str]:
    """Why this model cannot be trained or served here, empty where it can."""
    family = hf_config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return [
            f"model_type {family!r} is not supported; supported are {', '.join(sorted(FAMILIES))} (dense); "
            "docs/models.md says how to add it"
        ]
    return list(_unsupported_options(_Settings(hf_config)))


class _Settings:
    """Values of a config.json, with the family's defaults where a key is not there."""

    def __init__(self, hf_config: dict[str, Any]) -> None:
        self._values = COMMON_DEFAULTS | FAMILIES[hf_config["model_type"]].defaults | hf_config

    def __call__(self, key: str) -> Any:
        return self._values.get(key)


def _unsupported_options(get: _Settings) -> Iterator[str]:
    sizes = {key: get(key) for key in (*_REQUIRED, "max_position_embeddings")}
    sizes |= {key: get(key) for key in ("num_key_value_heads", "head_dim") if get(key) is not None}
    if bad := [key for key, value in sizes.items() if type(value) is not int or value < 1]:
        yield "; ".join(f"config.json has no {key!r} that is a positive number" for key in bad)
        return
    heads, kv_heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    if heads % kv_heads:
        yield f"{heads} attention heads cannot share {kv_heads} key-value heads"
    if (sizes.get("head_dim") or sizes["hidden_size"] // heads) % 2:
        yield "an odd head dimension cannot be rotated in pairs"
    if get("hidden_act") != "silu":
        yield f"activation {get('hidden_act')!r} is not supported; supported is silu"
    if get("quantization_config"):
        yield "config.json sets quantization_config: dequantise the checkpoint first"
    if _has_sliding_window(get):
        yield "sliding-window attention is not supported"
    rope = _rope(get)
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rotary embeddings that differ between layers are not supported"
    elif rope["rope_type"] not in ROPE_TYPES:
        yield f"rope scaling {rope['rope_type']!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
    else:
        for key in (*ROPE_TYPES[rope["rope_type"]], "rope_theta"):
            if not isinstance(rope.get(key), int | float):
                yield f"rope scaling {rope['rope_type']!r} needs the number {key!r}"
    if (rope.get("partial_rotary_factor") or get("partial_rotary_factor") or 1.0) != 1.0:
        yield "partial_rotary_factor other than 1 is not supported"


def _has_sliding_window(get: _Settings) -> bool:
    if layer_types := get("layer_types"):
        return any(kind != "full_attention" for kind in layer_types)
    switch = FAMILIES[get("model_type")].window_switch
    return switch is not None and bool(get(switch)) and get("max_window_layers") < get("num_hidden_layers")


def _rope(get: _Settings) -> dict[str, Any]:
    """Rope settings under transformers 5's names; older files spread them over rope_theta and rope_scaling."""
    rope = dict(get("rope_parameters") or get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", get("rope_theta"))
    return rope


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights in a checkpoint of this model, in the order of the layers."""
    sizes = {
        "V": shape.vocab_size,
        "E": shape.hidden_size,
        "F": shape.ffn_size,
        "D": shape.head_dim,
        "Q": shape.num_heads * shape.head_dim,
        "K": shape.num_kv_heads * shape.head_dim,
        "1": 1,
    }

    def present(weights: tuple[Weight, ...], prefix: str = "") -> dict[str, tuple[int, ...]]:
        return {
            prefix + weight.name: tuple(sizes[dim] for dim in weight.dims)
            for weight in weights
            if weight.only_if is None or getattr(shape, weight.only_if)
        }

    tensors = present(BEFORE_LAYERS)
    for layer in range(shape.num_layers):
        tensors |= present(IN_LAYER, LAYER_PREFIX.format(layer=layer))
    return tensors | present(AFTER_LAYERS)
