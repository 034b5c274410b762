"""Environment variables of trainer and engines. CUDA, NCCL, torch and Transformer Engine read them once, so they are
set before torch is imported. A value that the user has set always wins.

Trainer and engines share NCCL groups, so both get the same `nccl_variables`. SGLang 0.5.23 sets unset ones to the same
values itself (srt/entrypoints/engine.py, `_set_envs_and_config`), so attached servers have them too.
"""

import os
from collections.abc import Mapping
from typing import Any

TRAINER_VARIABLES = {
    # One queue of kernels: collectives start in program order, and so overlap with the products that follow.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Packs differ in length, so freed blocks of fixed size would not fit the next pack.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # If no fused kernel accepts a pack, fail: unfused attention needs memory for every pair of tokens.
    "NVTE_UNFUSED_ATTN": "0",
}
_DETERMINISTIC_VARIABLES = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention adds gradients in a fixed order
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one workspace for each stream, so that products are split the same way
}
_CPU_VARIABLES = {
    # Megatron-Core marks its fused kernels for torch's compiler, which takes seconds to import and is not used here.
    "TORCHDYNAMO_DISABLE": "1",
}
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # the drivers': NVIDIA, WSL, AMD
_OLD_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"  # before torch 2.9; the new name would hide it


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is loaded, without importing torch."""
    return any(os.path.exists(device) for device in _GPU_DEVICES)


def nccl_variables(sglang_extra: Mapping[str, Any]) -> dict[str, str]:
    """Return NCCL's variables for a trainer rank or an engine.

    Args:
        sglang_extra: `[sglang.extra]`. SGLang enables what its own arguments need, whatever the environment says.
    """
    symmetric, multicast = (bool(sglang_extra.get(name)) for name in ("enable_symm_mem", "enable_nccl_nvls"))
    needed = {"NCCL_CUMEM_ENABLE": symmetric, "NCCL_NVLS_ENABLE": symmetric or multicast}
    return {name: "1" if is_needed else os.environ.get(name, "0") for name, is_needed in needed.items()}


def trainer_variables(sglang_extra: Mapping[str, Any], *, deterministic: bool = False) -> dict[str, str]:
    """Return all variables for a trainer rank, beginning with `nccl_variables`.

    Args:
        deterministic: `run.deterministic`.
    """
    variables = TRAINER_VARIABLES if has_gpu_driver() else TRAINER_VARIABLES | _CPU_VARIABLES
    if deterministic:
        variables = variables | _DETERMINISTIC_VARIABLES
    own = {name: os.environ.get(name, value) for name, value in variables.items()}
    if _OLD_ALLOC_CONF in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
        del own["PYTORCH_ALLOC_CONF"]
    return nccl_variables(sglang_extra) | own
