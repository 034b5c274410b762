"""Reusable CPU memory for copies of a model; page-locked for copies from a GPU."""

import mmap
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGN = 64  # tensors start at multiples of this many bytes, itself a multiple of every item size


class HostBuffer:
    """One block of memory that holds the latest copies, grows as needed, and lives as long as this object.

    The block is mapped as shared memory, so that tools count it apart from a process's own. For a GPU it is registered
    with CUDA: torch's allocator of page-locked memory would round its size up to a power of two and never release it.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_copied: torch.cuda.Event | None = None
        self._unlock: weakref.finalize[..., HostBuffer] | None = None

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of the same shapes and dtypes, overwriting the previous copies.

        Copies from a GPU are ordered on the current stream and may still be running: see `wait`.
        """
        *starts, end = accumulate((-(-t.nbytes // _ALIGN) * _ALIGN for t in tensors), initial=0)
        from_gpu = any(tensor.is_cuda for tensor in tensors)
        if end > self.num_bytes or (from_gpu and self._unlock is None):
            self._allocate(end, page_locked=from_gpu)
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            place = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor.detach(), non_blocking=True))
        if self._is_copied is not None:
            self._is_copied.record()
        return copies

    def wait(self) -> None:
        """Block until all copies are done; may run in any thread."""
        if self._is_copied is not None:
            self._is_copied.synchronize()

    def _allocate(self, num_bytes: int, *, page_locked: bool) -> None:
        if self._unlock is not None:
            self._unlock()
        self._bytes, self._is_copied, self._unlock = torch.empty(0, dtype=torch.uint8), None, None  # freed first
        if num_bytes:
            self._bytes = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        if page_locked and num_bytes:
            address = self._bytes.data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))
            self._is_copied = torch.cuda.Event()
            self._unlock = weakref.finalize(self, _unlock, address, self._is_copied)
            self._unlock.atexit = False  # nothing outlives the process


def _unlock(address: int, is_copied: torch.cuda.Event) -> None:
    """Unregister the block from CUDA before it is freed and its address is reused."""
    is_copied.synchronize()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))
