"""Reading, splitting and writing Hugging Face weights, in one process and without Megatron."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.reader import INDEX, SINGLE, HFReader
from bapo_megatron.hf.shape import ModelShape, entries, hf_tensors, model_shape
from bapo_megatron.hf.splits import Interleaved
from bapo_megatron.hf.writer import write_safetensors
from bapo_megatron.learner.slicing import from_shards, to_shard

HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 2,
}


def make_shape(family: str, **change: Any) -> ModelShape:
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 11,  # no tensor-parallel size divides it
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
    }
    return model_shape(config | (HYBRID if family == "qwen3_5_text" else {}) | change)


def random_weights(shape: ModelShape) -> dict[str, Tensor]:
    return {name: torch.randn(size) for name, size in hf_tensors(shape).items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_splitting_and_joining_is_bit_exact_and_complete(family: str, tensor: int, tmp_path: Path) -> None:
    shape = make_shape(family)
    weights = random_weights(shape)
    save_file(weights, tmp_path / SINGLE)
    left = dict(weights)
    with HFReader(tmp_path) as read:
        for entry in entries(shape):
            shards = [to_shard(entry, read, rank, tensor) for rank in range(tensor)]
            assert len({s.shape for s in shards}) == 1, entry
            for name, whole in zip(entry.hf_names, from_shards(entry, shards), strict=True):
                assert torch.equal(whole, left.pop(name)), name
    assert not left


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    shape = make_shape("llama")
    save_file(random_weights(shape), tmp_path / SINGLE)
    embedding = next(iter(entries(shape)))
    with HFReader(tmp_path) as read:
        last = to_shard(embedding, read, 3, 4)
    assert last.shape == (3, 16)
    assert last[:2].abs().min() > 0
    assert last[2].abs().max() == 0


def test_query_heads_stand_with_their_key_value_head(tmp_path: Path) -> None:
    """Rank 1 of 4 holds group 1: query heads 2 and 3, key head 1, value head 1."""
    shape = make_shape("llama")
    weights = random_weights(shape)
    save_file(weights, tmp_path / SINGLE)
    qkv = next(e for e in entries(shape) if isinstance(e.split, Interleaved))
    with HFReader(tmp_path) as read:
        shard = to_shard(qkv, read, 1, 4)
    q, k, v = (weights[name] for name in qkv.hf_names)
    assert torch.equal(shard, torch.cat([q[12:24], k[6:12], v[6:12]]))


def test_many_files_are_written_and_read(tmp_path: Path) -> None:
    shape = make_shape("qwen3")
    weights = random_weights(shape)
    write_safetensors(iter(weights.items()), tmp_path, max_file_bytes=4000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == set(weights)
    with HFReader(tmp_path) as read:
        read.check(shape)
        for name, weight in weights.items():
            assert torch.equal(read(name, (slice(None),)), weight)


def test_wrong_names_and_shapes_are_listed(tmp_path: Path) -> None:
    shape = make_shape("llama")
    weights = random_weights(shape)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.zeros(15)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(6)
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as error, HFReader(tmp_path) as read:
        read.check(shape)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight (model.safetensors)" in str(error.value)
    assert "1 of another shape: model.norm.weight (model.safetensors) is [15]" in str(error.value)


def test_missing_and_torn_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds neither"):
        HFReader(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match=SINGLE):
        HFReader(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="holds both"):
        HFReader(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
        HFReader(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / INDEX))):
        HFReader(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        HFReader(inside)


def test_an_index_that_disagrees_with_the_files_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "2.safetensors")
    cases = (
        ({"a": "1", "b": "1", "c": "1"}, r"says that c is in 1\.safetensors, which does not hold it"),
        ({"a": "1", "c": "2"}, r"1\.safetensors holds b, which .* does not place there"),
        ({"a": "1", "b": "1", "c": "3"}, r"cannot read .*3\.safetensors"),
    )
    for places, message in cases:
        weight_map = {name: f"{file}.safetensors" for name, file in places.items()}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            HFReader(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_that_is_not_finite_is_named_by_whoever_reads_the_value(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = torch.ones(4, 4, dtype=dtype)
    weight[2, 1] = value
    save_file({"a": weight}, tmp_path / SINGLE)
    with HFReader(tmp_path) as read:
        assert read("a", (slice(0, 2),)).shape == (2, 4)
        with pytest.raises(CheckpointError, match=rf"a in {re.escape(str(tmp_path / SINGLE))} holds nan or infinity"):
            read("a", (slice(2, 4),))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    shape = make_shape("llama")
    weights = random_weights(shape)
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / SINGLE)
    with HFReader(tmp_path) as read, pytest.raises(CheckpointError, match=r"up_proj\.weight .* is F8_E4M3"):
        read.check(shape)


def test_an_output_layer_that_differs_from_tied_embeddings_is_refused(tmp_path: Path) -> None:
    shape = make_shape("llama", tie_word_embeddings=True, vocab_size=5000)
    weights = random_weights(shape)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / SINGLE)
    with HFReader(tmp_path) as read:
        read.check(shape)
    weights["lm_head.weight"][4999, 0] += 1
    save_file(weights, tmp_path / SINGLE)
    with HFReader(tmp_path) as read, pytest.raises(CheckpointError, match=r"lm_head\.weight .* differs"):
        read.check(shape)


def test_one_file_has_no_index_and_many_say_how_many_they_are(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(5)}
    for max_file_bytes, names in (
        (200, [SINGLE]),
        (199, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]),
        (1, [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)] + [INDEX]),
    ):
        folder = tmp_path / str(max_file_bytes)
        folder.mkdir()
        assert write_safetensors(weights.items(), folder, max_file_bytes) == {"float32"}
        assert sorted(p.name for p in folder.iterdir()) == names
        with HFReader(folder) as read:
            assert all(torch.equal(read(name), weight) for name, weight in weights.items())


def test_the_stream_is_copied(tmp_path: Path) -> None:
    """A tensor may be overwritten as soon as the next one is requested."""
    scratch = torch.empty(3)
    write_safetensors(((f"w{i}", scratch.fill_(i)) for i in range(3)), tmp_path)
    with HFReader(tmp_path) as read:
        assert [read(f"w{i}").tolist() for i in range(3)] == [[i] * 3 for i in range(3)]
