"""Buckets: what goes in comes out, aligned, within the size limit."""

from itertools import islice

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.engines.wire import Bucket, TensorSpec, digest, in_order, pack_bucket, plan_buckets, unpack_bucket
from bapo_megatron.errors import EngineError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.float8_e4m3fn]
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=12)


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def manifest_of(named: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in named.items()]


def filled(named: dict[str, torch.Tensor], bucket: Bucket) -> torch.Tensor:
    data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    pack_bucket(bucket, [named[spec.name] for spec in bucket.specs], data)
    return data


@settings(deadline=None, max_examples=200)
@given(tensors, st.integers(1, 600))
def test_round_trip(kinds: list[tuple[torch.dtype, list[int]]], max_bytes: int) -> None:
    named = {f"w{i}": random_tensor(dtype, shape) for i, (dtype, shape) in enumerate(kinds)}
    weights = in_order(iter(named.items()), manifest_of(named))
    received: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(manifest_of(named), max_bytes):
        assert len(bucket.specs) == 1 or bucket.num_bytes <= max_bytes
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        held = dict(islice(weights, len(bucket.specs)))
        pack_bucket(bucket, [held[spec.name] for spec in bucket.specs], data)
        received |= dict(unpack_bucket(data.clone(), bucket.specs))
    assert next(weights, None) is None
    assert received.keys() == named.keys()
    for name, tensor in named.items():
        assert received[name].shape == tensor.shape
        assert received[name].dtype == tensor.dtype
        assert digest(received[name]) == digest(tensor)


def test_layout_is_the_bytes_one_after_the_other() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3], dtype=torch.bfloat16)
    named = {"second": second, "first": first}
    (bucket,) = plan_buckets(manifest_of(named), 1024)
    assert [spec.name for spec in bucket.specs] == ["first", "second"]
    assert bucket.specs[1] == TensorSpec("second", "bfloat16", (1,))
    assert bytes(filled(named, bucket).tolist()) == first.numpy().tobytes() + b"\x40\x40"


def test_the_tensors_of_an_expert_stay_together() -> None:
    expert = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    names = [expert.format(layer, n, p) for layer in range(2) for n in range(12) for p in ("gate", "up", "down")]
    manifest = [TensorSpec(name, "float32", (1,)) for name in ("model.norm.weight", *names)]
    buckets = plan_buckets(manifest, 44)
    assert [spec for bucket in buckets for spec in bucket.specs] == manifest
    assert [len(bucket.specs) for bucket in buckets] == [10, 9, 9, 9, 9, 9, 9, 9]
    assert [len(bucket.specs) for bucket in plan_buckets(manifest, 4)] == [1, *[3] * 24], "even if too large"


def test_views_and_strides_are_flattened_in_row_major_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    (bucket,) = plan_buckets(manifest_of({"t": tensor}), 1024)
    assert torch.equal(unpack_bucket(filled({"t": tensor}, bucket), bucket.specs)[0][1], tensor)
    assert digest(tensor) == xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())


@pytest.mark.parametrize("change", ["one bit", "two weights swapped", "length"])
def test_a_digest_tells_contents_apart(change: str) -> None:
    tensor = torch.arange(1000.0)
    other = tensor.clone()
    if change == "one bit":
        other.view(torch.uint8)[1234] ^= 1
    elif change == "length":
        other = torch.cat([other, torch.zeros(1)])
    else:
        other[[3, 700]] = other[[700, 3]]
    assert digest(tensor) != digest(other)


def test_no_more_is_read_than_the_bucket_holds() -> None:
    read = []

    def source():
        for i in range(10):
            read.append(i)
            yield f"w{i}", torch.zeros(4)

    manifest = [TensorSpec(f"w{i}", "float32", (4,)) for i in range(10)]
    buckets = plan_buckets(manifest, 32)
    assert [len(bucket.specs) for bucket in buckets] == [2] * 5
    list(islice(in_order(source(), manifest), len(buckets[0].specs)))
    assert read == [0, 1]


def test_a_learner_that_yields_something_else_is_found_out() -> None:
    manifest = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (2,))]
    for weights, message in (
        ([("b", torch.zeros(2))], r"to send a float32 \[2\] next, but got b float32 \[2\]"),
        ([("a", torch.zeros(3))], r"but got a float32 \[3\]"),
        ([("a", torch.zeros(2).half())], r"but got a float16 \[2\]"),
        ([("a", torch.zeros(2))], r"to send b float32 \[2\] next, but got nothing"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(1))], "to send nothing more"),
    ):
        with pytest.raises(EngineError, match=message):
            list(in_order(iter(weights), manifest))


def test_bad_input_is_refused() -> None:
    data = torch.zeros(6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="6 bytes"):
        unpack_bucket(data, [TensorSpec("a", "float32", (2,))])
    with pytest.raises(ValueError, match=r"b: byte offset 2 is not aligned to float32"):
        unpack_bucket(data, [TensorSpec("a", "bfloat16", (1,)), TensorSpec("b", "float32", (1,))])
    with pytest.raises(ValueError, match="complex64"):
        plan_buckets([TensorSpec("c", "complex64", (1,))], 64)
    with pytest.raises(ValueError, match="empty"):
        plan_buckets([TensorSpec("e", "float32", (0,))], 64)
