"""Weights packed into flat byte tensors, one broadcast each, and taken apart again.

The layout is that of SGLang's FlattenedTensorBucket (srt/weight_sync/tensor_bucket.py, 0.5.23): the bytes of each
tensor one after the other, uint8, no padding, each offset a multiple of the tensor's item size. Placing larger items
first inside a bucket keeps every offset aligned.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "uint8")
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type ("float32") and shape of one tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises ValueError for a type that is not sent as weights."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors whose bytes travel together."""

    specs: tuple[TensorSpec, ...]
    data: Tensor  # uint8 [sum of num_bytes], on the device of the tensors


def pack(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`, in order; a larger tensor gets a bucket of its own. Empty tensors raise."""
    held: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named:
        if tensor.numel() == 0:
            raise ValueError(f"{name}: an empty tensor cannot be sent")
        if held and num_bytes + tensor.nbytes > max_bytes:
            yield _bucket(held)
            held, num_bytes = [], 0
        held.append((name, tensor))
        num_bytes += tensor.nbytes
    if held:
        yield _bucket(held)


def unpack(data: Tensor, specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """Views into a bucket's bytes.

    Args:
        data: uint8 [sum of num_bytes].

    Raises:
        ValueError: the specs do not describe these bytes, or an offset is not aligned.
    """
    if sum(spec.num_bytes for spec in specs) != data.numel():
        raise ValueError(f"the bucket holds {data.numel()} bytes, its tensors {sum(s.num_bytes for s in specs)}")
    tensors, offset = [], 0
    for spec in specs:
        if offset % spec.torch_dtype.itemsize:
            raise ValueError(f"{spec.name}: byte offset {offset} is not aligned to {spec.dtype}")
        tensors.append((spec.name, data[offset : offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)))
        offset += spec.num_bytes
    return tensors


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order."""
    as_bytes = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
    return hashlib.sha256(as_bytes.numpy().data).hexdigest()


def _bucket(named: list[tuple[str, Tensor]]) -> Bucket:
    ordered = sorted(named, key=lambda item: -item[1].element_size())
    specs = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in ordered)
    for spec in specs:
        spec.torch_dtype  # noqa: B018 - refuses an unknown type before it is sent
    data = torch.cat([t.detach().contiguous().flatten().view(torch.uint8) for _, t in ordered])
    return Bucket(specs, data)
