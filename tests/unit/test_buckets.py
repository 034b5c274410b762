"""Buckets: what goes in comes out, aligned, within the size limit."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.sync.buckets import TensorSpec, digest, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.float8_e4m3fn]
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=12)


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


@settings(deadline=None, max_examples=200)
@given(tensors, st.integers(1, 600))
def test_round_trip(kinds: list[tuple[torch.dtype, list[int]]], max_bytes: int) -> None:
    named = {f"w{i}": random_tensor(dtype, shape) for i, (dtype, shape) in enumerate(kinds)}
    received: dict[str, torch.Tensor] = {}
    for bucket in pack(iter(named.items()), max_bytes):
        assert bucket.data.dtype == torch.uint8
        assert len(bucket.specs) == 1 or bucket.data.nbytes <= max_bytes
        offset = 0
        for spec in bucket.specs:
            assert offset % named[spec.name].element_size() == 0
            offset += spec.num_bytes
        received |= dict(unpack(bucket.data.clone(), bucket.specs))
    assert received.keys() == named.keys()
    for name, tensor in named.items():
        assert received[name].shape == tensor.shape
        assert received[name].dtype == tensor.dtype
        assert digest(received[name]) == digest(tensor)


def test_layout_is_the_bytes_one_after_the_other() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3], dtype=torch.bfloat16)
    (bucket,) = pack([("second", second), ("first", first)], 1024)
    assert [spec.name for spec in bucket.specs] == ["first", "second"]
    assert bucket.specs[1] == TensorSpec("second", "bfloat16", (1,))
    assert bytes(bucket.data.tolist()) == first.numpy().tobytes() + b"\x40\x40"


def test_views_and_strides_are_flattened_in_row_major_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    (bucket,) = pack([("t", tensor)], 1024)
    assert torch.equal(unpack(bucket.data, bucket.specs)[0][1], tensor)
    assert digest(tensor) == hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_pack_is_lazy() -> None:
    read = []

    def source():
        for i in range(10):
            read.append(i)
            yield f"w{i}", torch.zeros(4)

    next(pack(source(), 32))
    assert len(read) == 3, "two tensors fill the bucket, the third one closes it"


def test_bad_input_is_refused() -> None:
    data = torch.zeros(6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="6 bytes"):
        unpack(data, [TensorSpec("a", "float32", (2,))])
    with pytest.raises(ValueError, match=r"b: byte offset 2 is not aligned to float32"):
        unpack(data, [TensorSpec("a", "bfloat16", (1,)), TensorSpec("b", "float32", (1,))])
    with pytest.raises(ValueError, match="complex64"):
        next(pack([("c", torch.zeros(1, dtype=torch.complex64))], 64))
    with pytest.raises(ValueError, match="empty"):
        next(pack([("e", torch.zeros(0))], 64))
