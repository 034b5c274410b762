"""A Hopper GPU for code that only asks for one, on a machine without GPUs: imports, and Triton's compiler.

`pretend()` comes before what asks at import time. Nothing is computed on the GPU: the first tensor on it is an error.

`compile_only` compiles the Triton kernels that are called in its block, and launches none: results are left unset.
Example:

    with compile_only(90) as compiled:
        logprobs_triton.row_statistics(...)
    compiled == {"statistics_kernel": 10_000}   # bytes of machine code for sm_90
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * GIB,
    multi_processor_count=132,
    shared_memory_per_block_optin=232_448,
    regs_per_multiprocessor=65_536,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    gcnArchName="",
)
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": PROPERTIES.name,
    "get_device_properties": PROPERTIES,
    "mem_get_info": (78 * GIB, 80 * GIB),
    "is_bf16_supported": True,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
}


def pretend() -> None:
    """Let torch.cuda answer like a machine with one Hopper GPU."""
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)


@contextmanager
def compile_only(architecture: int) -> Iterator[Counter[str]]:
    """Compile kernels for an architecture, such as 90; yield the bytes of machine code by the kernel's name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    limits = {"max_shared_mem": PROPERTIES.shared_memory_per_block_optin, "multiprocessor_count": 132}
    limits |= {"warpSize": 32, "max_num_regs": PROPERTIES.regs_per_multiprocessor}
    machine = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,  # Triton keeps what it has compiled by the device's number
        get_current_stream=lambda *_: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cpu"),
        utils=SimpleNamespace(get_device_properties=lambda *_: limits),
    )
    compiled = Counter[str]()
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[self.fn.__name__] += len(kernel.asm["cubin"])
        return kernel

    before = driver._active  # without a GPU there may be none, and asking for it fails
    driver.set_active(machine)
    JITFunction.run = only_compile
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before
