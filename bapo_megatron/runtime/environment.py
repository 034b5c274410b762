"""Environment variables of trainer and engines, and the CPUs of a rank. CUDA, NCCL, torch and Transformer Engine read
the variables once, so they are set before torch is imported. A value that the user has set always wins.

Trainer and engines share NCCL groups, so both get the same `nccl_variables`. SGLang 0.5.23 sets unset ones to the same
values itself (srt/entrypoints/engine.py, `_set_envs_and_config`), so attached servers have them too.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINER_VARIABLES = {
    # One queue of kernels: collectives start in program order, and so overlap with the products that follow.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Packs differ in length, so freed blocks of fixed size would not fit the next pack.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # If no fused kernel accepts a pack, fail: unfused attention needs memory for every pair of tokens.
    "NVTE_UNFUSED_ATTN": "0",
    # NVTE_USE_CUTLASS_GROUPED_GEMM, one kernel for all experts, is the user's choice: docs/moe.md says why.
}
_DETERMINISTIC_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one workspace for each stream, so that products are split the same way
}
_CPU_VARIABLES = {
    # Megatron-Core marks its fused kernels for torch's compiler, which takes seconds to import and is not used here.
    "TORCHDYNAMO_DISABLE": "1",
}
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # the drivers': NVIDIA, WSL, AMD
_WORD_BITS = 64  # of NVML's masks of CPUs
_OLD_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"  # before torch 2.9; the new name would hide it
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", _OLD_ALLOC_CONF)


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is loaded, without importing torch."""
    return any(os.path.exists(device) for device in _GPU_DEVICES)


def bind_to_gpu(local_rank: int) -> str:
    """Run this process on the CPUs next to its GPU, as far as it may use them, and return which CPUs it has.

    Threads and child processes that start later inherit them. It has no effect if the driver does not know the CPUs.

    Args:
        local_rank: index of the GPU among those that CUDA_VISIBLE_DEVICES names, or among all.
    """
    try:
        import pynvml
    except ImportError:
        return "any CPU: nvidia-ml-py is not installed"
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        gpu = str(local_rank) if named is None else named.split(",")[local_rank].strip()
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(gpu)) if gpu.isdecimal() else by_uuid(gpu)
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // _WORD_BITS))
    except (pynvml.NVMLError, IndexError) as error:
        return f"any CPU: the driver does not name the CPUs next to the GPU ({error})"
    near = {cpu for cpu in range(_WORD_BITS * len(words)) if words[cpu // _WORD_BITS] >> cpu % _WORD_BITS & 1}
    if not (cpus := near & os.sched_getaffinity(0)):
        return f"any CPU: this process may use none of the {len(near)} next to GPU {gpu}"
    os.sched_setaffinity(0, cpus)
    return f"CPUs next to GPU {gpu}: {len(cpus)}"


def nccl_variables(sglang_extra: Mapping[str, Any]) -> dict[str, str]:
    """Return NCCL's variables for a trainer rank or an engine.

    Args:
        sglang_extra: `[sglang.extra]`. SGLang enables what its own arguments need, whatever the environment says.
    """
    symmetric, multicast = (bool(sglang_extra.get(name)) for name in ("enable_symm_mem", "enable_nccl_nvls"))
    cumem = "1" if symmetric else os.environ.get("NCCL_CUMEM_ENABLE", str(int(multicast)))  # multicast allocates by it
    nvls = "1" if symmetric or multicast else os.environ.get("NCCL_NVLS_ENABLE", "0")
    return {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls}


def trainer_variables(
    sglang_extra: Mapping[str, Any], *, deterministic: bool = False, run_dir: Path | None = None
) -> dict[str, str]:
    """Return all variables for a trainer rank, beginning with `nccl_variables`.

    Args:
        deterministic: `run.deterministic`.
        run_dir: `run.dir`, which keeps compiled kernels for the next start: containers lose torch's own folders.
    """
    variables = TRAINER_VARIABLES if has_gpu_driver() else TRAINER_VARIABLES | _CPU_VARIABLES
    if deterministic:
        variables = variables | _DETERMINISTIC_VARIABLES
    if run_dir is not None and has_gpu_driver():
        compiled = run_dir.absolute() / ".compiled"
        variables = variables | {
            "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
        }
    own = {name: os.environ.get(name, value) for name, value in variables.items()}
    if _OLD_ALLOC_CONF in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
        del own["PYTORCH_ALLOC_CONF"]
    return nccl_variables(sglang_extra) | own
