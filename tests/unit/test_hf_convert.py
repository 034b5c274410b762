"""Reading, splitting and writing Hugging Face weights, in one process and without Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.hf.names import entries, from_shards, to_shard
from bapo_megatron.learner.hf.reader import INDEX, SINGLE, HFReader
from bapo_megatron.learner.hf.shapes import ModelShape, hf_tensors, model_shape
from bapo_megatron.learner.hf.writer import write_safetensors


def make_shape(family: str, **change: Any) -> ModelShape:
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 11,  # divides by none of the tensor-parallel sizes
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
    }
    return model_shape(config | change)


def random_weights(shape: ModelShape) -> dict[str, Tensor]:
    return {name: torch.randn(size) for name, size in hf_tensors(shape).items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_splitting_and_joining_is_bit_exact_and_complete(family: str, tensor: int, tmp_path: Path) -> None:
    shape = make_shape(family)
    weights = random_weights(shape)
    save_file(weights, tmp_path / SINGLE)
    left = dict(weights)
    with HFReader(tmp_path) as read:
        for entry in entries(shape):
            shards = [to_shard(entry, shape, read, rank, tensor) for rank in range(tensor)]
            assert len({s.shape for s in shards}) == 1, entry
            for name, whole in zip(entry.hf_names, from_shards(entry, shape, shards), strict=True):
                assert torch.equal(whole, left.pop(name)), name
    assert not left


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    shape = make_shape("llama")
    save_file(random_weights(shape), tmp_path / SINGLE)
    embedding = next(iter(entries(shape)))
    with HFReader(tmp_path) as read:
        last = to_shard(embedding, shape, read, 3, 4)
    assert last.shape == (3, 16)
    assert last[:2].abs().min() > 0
    assert last[2].abs().max() == 0


def test_query_heads_stand_with_their_key_value_head(tmp_path: Path) -> None:
    """Rank 1 of 4 holds group 1: query heads 2 and 3, key head 1, value head 1."""
    shape = make_shape("llama")
    weights = random_weights(shape)
    save_file(weights, tmp_path / SINGLE)
    qkv = next(e for e in entries(shape) if e.kind == "qkv")
    with HFReader(tmp_path) as read:
        shard = to_shard(qkv, shape, read, 1, 4)
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
    assert "1 unexpected: model.layers.0.self_attn.q_norm.weight" in str(error.value)
    assert "1 of another shape: model.norm.weight is [15], config.json says [16]" in str(error.value)


def test_output_layer_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    shape = make_shape("llama", tie_word_embeddings=True)
    weights = random_weights(shape) | {"lm_head.weight": torch.zeros(11, 16)}
    save_file(weights, tmp_path / SINGLE)
    with HFReader(tmp_path) as read:
        read.check(shape)


def test_missing_and_torn_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds neither"):
        HFReader(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match=SINGLE):
        HFReader(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
        HFReader(tmp_path)
