"""Copies kept in one block of CPU memory: what they hold, how much memory they take, and when it is reused."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.checkpoint.host_buffer import HostBuffer

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape) * 100).to(dtype)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6))
def test_copies_are_those_tensors_and_stay_so(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    buffer = HostBuffer()
    tensors = [random(shape, dtype) for shape, dtype in specs]
    want = [tensor.clone() for tensor in tensors]
    copies = buffer.copy(tensors)
    buffer.wait()
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(copies, want, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.shape == tensor.shape
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)
    assert buffer.num_bytes < sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors) + 1


def test_a_strided_tensor_is_copied_in_its_order() -> None:
    values = torch.arange(24.0).view(2, 3, 4)[:, :2].transpose(0, 2)
    (copy,) = HostBuffer().copy([values])
    assert copy.is_contiguous()
    assert torch.equal(copy, values)


def test_memory_is_used_again_while_it_suffices() -> None:
    buffer = HostBuffer()
    (first,) = buffer.copy([torch.ones(100)])
    (second,) = buffer.copy([torch.full((80,), 2.0)])
    assert second.data_ptr() == first.data_ptr()
    assert first[0] == 2, "overwritten"
    num_bytes = buffer.num_bytes
    (third,) = buffer.copy([torch.full((1000,), 3.0)])
    assert buffer.num_bytes > num_bytes
    assert second[0] == 2, "the old block can still be read"
    assert third[-1] == 3


class OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Cuda:
    """A stand-in for the parts of torch.cuda that lock pages; `locked` maps addresses to bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.log: list[str] = []
        self.status = 0
        cuda = self

        class Event:
            def record(self) -> None:
                cuda.log.append("record")

            def synchronize(self) -> None:
                cuda.log.append("synchronize")

        def check(status: int) -> None:
            if status:
                raise torch.cuda.CudaError(status)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "check_error", check)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self.locked
        self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        self.log.append("unlock")
        return self.status


def test_copies_from_a_gpu_lock_no_more_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of page-locked memory would take 4 MiB and keep them."""
    cuda, buffer = Cuda(monkeypatch), HostBuffer()
    tensors: Any = [torch.ones(2**19 + 16).as_subclass(OnGpu), torch.ones(3)]
    (first, _) = buffer.copy(tensors)
    assert list(cuda.locked.values()) == [buffer.num_bytes] == [4 * (2**19 + 16) + 64]
    assert cuda.locked.keys() == {first.data_ptr()}
    buffer.wait()
    assert cuda.log == ["record", "synchronize"]
    buffer.copy(tensors)
    assert len(cuda.locked) == 1
    assert cuda.log == ["record", "synchronize", "record"], "reused"


def test_pages_are_unlocked_before_they_are_freed_and_after_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, buffer = Cuda(monkeypatch), HostBuffer()
    buffer.copy([torch.ones(10).as_subclass(OnGpu)])
    buffer.copy([torch.ones(1000).as_subclass(OnGpu)])
    assert list(cuda.locked.values()) == [buffer.num_bytes], "it has grown, and the smaller block is free"
    assert cuda.log == ["record", "synchronize", "unlock", "record"]
    del buffer
    gc.collect()
    assert cuda.locked == {}
    assert cuda.log[-2:] == ["synchronize", "unlock"]


def test_memory_that_served_the_cpu_is_locked_when_a_gpu_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, buffer = Cuda(monkeypatch), HostBuffer()
    buffer.copy([torch.ones(10)])
    assert cuda.locked == {}
    buffer.copy([torch.ones(10).as_subclass(OnGpu)])
    assert len(cuda.locked) == 1


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    cuda.status = 2
    monkeypatch.setattr(torch.cuda, "CudaError", RuntimeError)  # its message comes from CUDA
    with pytest.raises(RuntimeError):
        HostBuffer().copy([torch.ones(10).as_subclass(OnGpu)])
