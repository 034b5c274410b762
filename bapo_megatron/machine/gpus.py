"""Kinds of GPUs: memory and dense peak rates from the makers' data sheets, which programs do not reach."""

import math
import re
import time
from dataclasses import dataclass
from functools import cache

from bapo_megatron.config.schema import ClusterConfig
from bapo_megatron.errors import UserError
from bapo_megatron.runtime import run_python

GIB = 2**30
FULL = 0.95  # usable share of a GPU's memory; fragmentation may take the rest


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU model.

    Example: GPUS["h100"].memory_gib is 79.1, CUDA's total for 80 GB.
    """

    name: str
    memory_gib: float
    bf16_flops: float  # per second, dense, with float32 sums (most data sheets print twice that, "with sparsity")
    fp8_flops: float | None  # the same; None means that the chip has no FP8
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the machine's other GPUs, in one direction; data sheets print the sum of both

    def flops(self, dtype: str) -> float:
        """Return the peak rate of matrix products: float32 runs as TF32, at half the rate of bfloat16."""
        return self.bf16_flops if dtype == "bfloat16" else self.bf16_flops / 2

    @property
    def has_multicast(self) -> bool:
        """Whether the switches between a machine's GPUs can add up and copy (NVLink SHARP, from Hopper on)."""
        return self.fp8_flops is not None and self.link_bytes_per_s > _PCIE_5


_PCIE_4, _PCIE_5 = 32e9, 64e9  # 16 lanes; NVLink bridges join only two cards

# Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2022), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU"
# (2024), "DGX B200" (2024, an eighth of the system), "HGX B300" (2025, an eighth), "GB200 NVL72" (2024, a 72nd), "L4"
# (2023), "L40S" (2023), "A10" (2021), "A40" (2022), "RTX A6000" (2021), AWS's data sheet "A10G" (2022), and the white
# papers "Ampere GA102", "Ada" and "RTX Blackwell" for GeForce cards. H20 has no public data sheet: sellers print its
# figures. Memory is CUDA's total, which drivers change by 1 %, but of B300 and GB200 the data sheet's.
GPUS = {
    "a100": GPU("A100 SXM 80 GB", 79.1, 312e12, None, 2.039e12, 300e9),
    "h100": GPU("H100 SXM 80 GB", 79.1, 989e12, 1979e12, 3.35e12, 450e9),
    "h200": GPU("H200 SXM 141 GB", 139.8, 989e12, 1979e12, 4.8e12, 450e9),
    "h20": GPU("H20 SXM 96 GB", 95.0, 148e12, 296e12, 4.0e12, 450e9),
    "b200": GPU("B200 SXM 180 GB", 178.0, 2250e12, 4500e12, 8.0e12, 900e9),
    "b300": GPU("B300 SXM 270 GB", 251.4, 2250e12, 4500e12, 8.0e12, 900e9),
    "gb200": GPU("GB200 186 GB", 173.2, 2500e12, 5000e12, 8.0e12, 900e9),
    "l4": GPU("L4 24 GB", 22.0, 121e12, 242e12, 300e9, _PCIE_4),
    "l40s": GPU("L40S 48 GB", 44.4, 362e12, 733e12, 864e9, _PCIE_4),
    "a10": GPU("A10 24 GB", 22.1, 125e12, None, 600e9, _PCIE_4),
    "a10g": GPU("A10G 24 GB", 22.1, 70e12, None, 600e9, _PCIE_4),
    "a40": GPU("A40 48 GB", 44.4, 149.7e12, None, 696e9, _PCIE_4),
    "a6000": GPU("RTX A6000 48 GB", 47.4, 154.8e12, None, 768e9, _PCIE_4),
    "rtx3090": GPU("GeForce RTX 3090 24 GB", 23.5, 71e12, None, 936e9, _PCIE_4),
    "rtx4090": GPU("GeForce RTX 4090 24 GB", 23.5, 165.2e12, 330.3e12, 1.008e12, _PCIE_4),
    "rtx5090": GPU("GeForce RTX 5090 32 GB", 31.3, 209.5e12, 419e12, 1.792e12, _PCIE_5),
}

# words in CUDA's names of GPUs that leave the kind as it is
_SAME_KIND = re.compile(r"NVIDIA|GeForce|SXM\d?|\d+GB|HBM\de?|AC")


def kind_of(name: str) -> str | None:
    """Return the kind of a GPU by the name that CUDA gives it; None if the table lacks it.

    Any other word makes it another kind, such as PCIe, NVL, Laptop, Ti, D, or MIG's slice of a GPU.

    Example: "NVIDIA A100-SXM4-80GB" is "a100", "NVIDIA GeForce RTX 4090" is "rtx4090", "NVIDIA H100 PCIe" is None.
    """
    kind = "".join(word for word in re.split(r"[ -]", name) if not _SAME_KIND.fullmatch(word)).lower()
    kind = {"rtxa6000": "a6000"}.get(kind, kind)
    return kind if kind in GPUS else None


def gpu_memory_gib(cluster: ClusterConfig) -> float | None:
    """Return the memory of one GPU of a run: the cluster's, or this machine's if none is named; None without GPUs."""
    return _this_gpu_gib() if cluster.gpu is None else cluster.gpu_memory_gib or GPUS[cluster.gpu].memory_gib


_ASK = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"


@cache
def _this_gpu_gib() -> float | None:
    """Return the memory of this machine's first visible GPU; None without one.

    Unless this process uses the GPU, another one asks: a launcher with a CUDA context would take memory from the run.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    answer, problem = run_python(_ASK)
    if problem:
        raise UserError(f"the memory of this machine's GPU is unknown ({problem}); set cluster.gpu and its memory")
    return int(answer) / GIB


def device_peak_flops(dtype: str) -> float | None:
    """Return the peak rate of matrix products of this process's GPU from the table; None if the table lacks it.

    Without a GPU, measure the best rate of a matrix product with this process's threads (about 0.1 s).
    """
    import torch

    if torch.cuda.is_available():
        kind = kind_of(torch.cuda.get_device_name())
        return GPUS[kind].flops(dtype) if kind else None
    size = 512
    a, best_s = torch.ones(size, size), math.inf
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s
