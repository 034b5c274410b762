"""GPUs and models that plans can use without access to them.

GPUs: dense peak rates of the SXM boards, from the makers' data sheets; programs reach less. Models: the config.json of
each model in a shipped recipe, in known_models.toml. An existing folder takes precedence.
"""

import math
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.hf.shape import load_hf_config, with_text_settings

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU model.

    Example: GPUS["h100"].memory_gib is 79.1, CUDA's total for 80 GB.
    """

    name: str
    memory_gib: float
    bf16_flops: float  # per second, dense (Hopper and Blackwell data sheets print twice that, "with sparsity")
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # in one direction; data sheets print the sum of both

    def flops(self, dtype: str) -> float:
        """Return the peak rate of matrix products: float32 runs as TF32, at half the rate of bfloat16."""
        return self.bf16_flops if dtype == "bfloat16" else self.bf16_flops / 2


# Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2022), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU"
# (2024), "DGX B200" (2024, an eighth of the system).
GPUS = {
    "a100": GPU("A100 SXM 80 GB", 79.1, 312e12, 2.039e12, 300e9),
    "h100": GPU("H100 SXM 80 GB", 79.1, 989e12, 3.35e12, 450e9),
    "h200": GPU("H200 SXM 141 GB", 139.8, 989e12, 4.8e12, 450e9),
    "b200": GPU("B200 SXM 180 GB", 178.0, 2250e12, 8.0e12, 900e9),
}


def device_peak_flops(dtype: str) -> float | None:
    """Return the peak rate of matrix products of this process's GPU from the table; None if the table lacks it.

    Without a GPU, measure the best rate of a matrix product with this process's threads (about 0.1 s).
    """
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        is_sxm = "PCIe" not in name and "NVL" not in name
        gpu = next((gpu for key, gpu in GPUS.items() if is_sxm and key.upper() in name.split("-")[0].split()), None)
        return gpu.flops(dtype) if gpu else None
    size = 512
    a, best_s = torch.ones(size, size), math.inf
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s


_FILE = Path(__file__).with_name("known_models.toml")
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: with_text_settings(config) for name, config in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the known config.json for a folder that is missing on this machine; None for an unknown name.

    Example: known_config("models/Qwen3-32B")["num_hidden_layers"] is 64.
    """
    folder = Path(path).expanduser()
    return None if folder.exists() else KNOWN_MODELS.get(folder.name)


_SOURCES = {
    "DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "DeepSeek-R1-Distill-Qwen-7B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "DeepSeek-R1-Distill-Qwen-32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "Qwen2.5-Math-7B": "Qwen/Qwen2.5-Math-7B",
    "OctoThinker-3B-Long-Zero": "OctoThinker/OctoThinker-3B-Long-Zero",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen3.5-9B": "Qwen/Qwen3.5-9B",
    "Qwen3.5-27B": "Qwen/Qwen3.5-27B",
    "Llama-3.3-70B-Instruct": "meta-llama/Llama-3.3-70B-Instruct",
}


def origin(path: str) -> str:
    """Say how to get a known model that is missing on this machine; empty for an unknown one."""
    name = Path(path).name
    if name == "Qwen3-32B-64k":
        edited = 'set "max_position_embeddings": 65536 and "rope_scaling" of YaRN in config.json: recipes/qwen3-32b-64k'
        return f"`hf download Qwen/Qwen3-32B --local-dir {path}`, then {edited}"
    if name == "Qwen2.5-Math-7B-64k":
        return "it is your own long-context tuning of Qwen/Qwen2.5-Math-7B"
    return f"`hf download {_SOURCES[name]} --local-dir {path}`" if name in _SOURCES else ""


def planned_config(path: str) -> dict[str, Any]:
    """Return the config.json of `model.path`, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it.
    """
    return known_config(path) or load_hf_config(resolve_model_path(path, config_only=True))
