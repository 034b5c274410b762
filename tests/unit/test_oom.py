"""What counts as out of memory; tests/integration/test_monitoring_run.py really runs out."""

import torch

from bapo_megatron.preflight.oom import is_out_of_memory


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
