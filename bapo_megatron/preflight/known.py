"""GPUs and models that plans can use without access to them.

GPUs: dense peak rates of the SXM boards, from their makers' data sheets; programs reach less. Models: the config.json
of the models in shipped recipes, from their repositories on the Hugging Face hub. An existing folder takes precedence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.hf.shape import ModelShape, load_hf_config, model_shape

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU model.

    Example: GPUS["h100"].memory_gib is 79.1, CUDA's total for 80 GB.
    """

    name: str
    memory_gib: float
    bf16_flops: float  # per second, dense (data sheets of Hopper and Blackwell print twice that, "with sparsity")
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # in one direction; data sheets print the sum of both

    def flops(self, dtype: str) -> float:
        """Peak rate of matrix products: float32 runs as TF32, at half the rate of bfloat16."""
        return self.bf16_flops if dtype == "bfloat16" else self.bf16_flops / 2


# Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2022), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU"
# (2024), "DGX B200" (2024, an eighth of the system).
GPUS = {
    "a100": GPU("A100 SXM 80 GB", 79.1, 312e12, 2.039e12, 300e9),
    "h100": GPU("H100 SXM 80 GB", 79.1, 989e12, 3.35e12, 450e9),
    "h200": GPU("H200 SXM 141 GB", 139.8, 989e12, 4.8e12, 450e9),
    "b200": GPU("B200 SXM 180 GB", 178.0, 2250e12, 8.0e12, 900e9),
}


def visible_indexes(setting: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the GPUs that CUDA shows to a process: those before the first invalid entry, or none if one is repeated
    (CUDA C++ Programming Guide, "CUDA Environment Variables"). A MIG instance counts as invalid.

    Args:
        setting: CUDA_VISIBLE_DEVICES: indexes, or beginnings of UUIDs. None: unset, which shows all.
        uuids: of all GPUs, in the driver's order, which is also CUDA's if all GPUs are of one model.

    Example: visible_indexes("1,0", ["GPU-a", "GPU-b", "GPU-c"]) == (1, 0)
    """
    if setting is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in setting.split(","):
        index = _index(entry.strip(), uuids)
        if index is None:
            break
        if index in found:
            return ()
        found.append(index)
    return tuple(found)


def _index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    named = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None


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
    # The same weights; config.json is edited for long inputs by the model card, see configs/recipes/qwen3-32b.toml.
    "Qwen3-32B-64k": _QWEN3_32B
    | {
        "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768},
    },
}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the known config.json for a folder missing on this machine; None for an unknown name.

    Example: known_config("models/Qwen3-32B")["num_hidden_layers"] is 64.
    """
    folder = Path(path).expanduser()
    return None if folder.exists() else KNOWN_MODELS.get(folder.name)


def planned_config(path: str) -> dict[str, Any]:
    """Return the config.json of `model.path`, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it.
    """
    return known_config(path) or load_hf_config(resolve_model_path(path, weights=False))


def planned_shape(path: str) -> ModelShape:
    """Return the shape of `model.path`, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it, or the model is not supported.
    """
    return model_shape(planned_config(path))
