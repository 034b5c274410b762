"""Facts about GPUs, from their makers' data sheets: dense peak rates of the SXM boards, not what a program reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GPU:
    """One kind of GPU.

    Example: GPUS["h100"].memory_gib is 79.1, of the 80 GB in its name: what CUDA reports as the total.
    """

    name: str
    memory_gib: float
    bf16_flops: float  # per second, dense (data sheets of Hopper and Blackwell print twice that, "with sparsity")
    fp8_flops: float  # per second, dense; 0 where the chip has no FP8
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # in one direction; data sheets print the sum of both

    def flops(self, dtype: str) -> float:
        """Peak rate of matrix products: float32 runs as TF32, at half the rate of bfloat16."""
        return self.bf16_flops if dtype == "bfloat16" else self.bf16_flops / 2


# Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2022), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU"
# (2024), "DGX B200" (2024, an eighth of the system).
GPUS = {
    "a100": GPU("A100 SXM 80 GB", 79.1, 312e12, 0.0, 2.039e12, 300e9),
    "h100": GPU("H100 SXM 80 GB", 79.1, 989e12, 1979e12, 3.35e12, 450e9),
    "h200": GPU("H200 SXM 141 GB", 139.8, 989e12, 1979e12, 4.8e12, 450e9),
    "b200": GPU("B200 SXM 180 GB", 178.0, 2250e12, 4500e12, 8.0e12, 900e9),
}


def visible_indexes(setting: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """The GPUs that CUDA shows to a process: the list ends before the first entry that names none, and is empty where
    one is named twice (CUDA C++ Programming Guide, "CUDA Environment Variables"). A part of a GPU (MIG) is none.

    Args:
        setting: CUDA_VISIBLE_DEVICES: indexes, or beginnings of UUIDs. None: unset, which shows all.
        uuids: of all GPUs, in the driver's order, which is CUDA's too where all are alike.

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
