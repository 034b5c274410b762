"""Shards of a model: written at one split, read at any other, slice by slice; and files that do not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.checkpoint import shard_reader
from bapo_megatron.checkpoint.folder import INDEX, WEIGHT, Facts, digest_of, read_index, seal, write_index
from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.errors import CheckpointError, TornCheckpointError
from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.learner.slicing import place_shard, to_shard
from tests.unit.test_hf_convert import make_shape, random_weights

FACTS: Facts = {"version": 3, "skipped_updates": 0, "model": {}}


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, list[list[int]], tuple[slice, ...]]:
    """Return a tensor, its cuts along each dimension, and a slice of it."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(a, b) for a, b in bounds[: draw(st.integers(1, len(shape)))])
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape), cuts, index


@settings(deadline=None, max_examples=60)
@given(case=cut_tensors(), num_ranks=st.integers(1, 3))
def test_any_slice_is_read_from_any_boxes(
    case: tuple[Tensor, list[list[int]], tuple[slice, ...]], num_ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensor, cuts, index = case
    folder = tmp_path_factory.mktemp("shards")
    starts = torch.cartesian_prod(*(torch.tensor(c[:-1]) for c in cuts)).view(-1, len(cuts)).tolist()
    manifests = []
    for number, start in enumerate(starts):
        end = [next(c for c in cut if c > s) for s, cut in zip(start, cuts, strict=True)]
        part = tensor[tuple(slice(a, b) for a, b in zip(start, end, strict=True))]
        piece = Piece(WEIGHT, "w", tuple(tensor.shape), tuple(start), tuple(part.shape), part)
        manifests.append(Snapshot([piece], FACTS, rank=number).write(folder))
    write_index(folder, FACTS, manifests)
    written = read_index(folder)
    written.verify()
    with ShardReader(written, WEIGHT) as read:
        assert torch.equal(read("w", index), tensor[index])
        assert torch.equal(read("w"), tensor)


def write_split(folder: Path, shape: ModelShape, weights: dict[str, Tensor], size: int, **change: Tensor) -> None:
    """Write the tensors as `size` tensor-parallel ranks would."""

    def read(name: str, index: tuple[slice, ...]) -> Tensor:
        return weights[name][index]

    manifests = []
    for rank in range(size):
        pieces = [
            piece
            for entry in entries(shape)
            for piece in place_shard(entry, WEIGHT, to_shard(entry, read, rank, size), rank, size)
        ]
        manifests.append(Snapshot(pieces, FACTS, rank=rank).write(folder, max_file_bytes=3000))
    write_index(folder, {**FACTS, "model": shape.to_json()}, manifests)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_one_split_is_read_at_any_other_bit_by_bit(family: str, writers: int, tmp_path: Path) -> None:
    shape = make_shape(family)
    weights = random_weights(shape)
    write_split(tmp_path, shape, weights, writers)
    assert len(list(tmp_path.glob("*.safetensors"))) > writers
    with ShardReader(read_index(tmp_path), WEIGHT) as read:
        read.check(shape)
        for name, weight in weights.items():
            assert torch.equal(read(name), weight), "no padding, in the order of Hugging Face"
        for entry in entries(shape):
            for readers in (1, 2, 4):
                for rank in range(readers):
                    want = to_shard(entry, lambda name, index: weights[name][index], rank, readers)
                    assert torch.equal(to_shard(entry, read, rank, readers), want), entry


def test_a_slice_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 boxes of 10 rows, rows 35 to 52 touch three boxes; only the wanted rows of these are read."""
    tensor = torch.randn(80, 3)
    manifests = [
        Snapshot(
            [Piece(WEIGHT, "w", (80, 3), (i * 10, 0), (10, 3), tensor[i * 10 : i * 10 + 10])], FACTS, rank=i
        ).write(tmp_path)
        for i in range(8)
    ]
    write_index(tmp_path, FACTS, manifests)
    taken: list[tuple[str, list[int]]] = []

    class Spy:
        """An open file, or a tensor in it, that records what is taken."""

        def __init__(self, file: Path, opened: Any) -> None:
            self.file, self.opened = file, opened

        def get_slice(self, key: str) -> "Spy":
            return Spy(self.file, self.opened.get_slice(key))

        def get_shape(self) -> list[int]:
            return self.opened.get_shape()

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            values = self.opened[index]
            taken.append((self.file.name[:10], list(values.shape)))
            return values

    monkeypatch.setattr(shard_reader, "safe_open", lambda file, framework: Spy(file, safe_open(file, framework)))
    with ShardReader(read_index(tmp_path), WEIGHT) as read:
        assert torch.equal(read("w", (slice(35, 53),)), tensor[35:53])
    assert taken == [("rank-00003", [5, 3]), ("rank-00004", [10, 3]), ("rank-00005", [3, 3])]


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(UP), f"1 missing: {UP}"),
        (lambda w: w.update(stray=torch.ones(2)), "1 unexpected: stray"),
        (
            lambda w: w.update({UP: torch.ones(16, 24)}),
            f"1 of another shape: {UP} is [16, 24], config.json says [24, 16]",
        ),
    ],
)
def test_names_and_shapes_must_fit_the_model(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    shape = make_shape("llama")
    weights = random_weights(shape)
    change(weights)
    snapshot = Snapshot([Piece.whole(WEIGHT, name, tensor) for name, tensor in weights.items()], FACTS)
    snapshot.complete(tmp_path, [snapshot.write(tmp_path)])
    with pytest.raises(CheckpointError, match=re.escape(message)), ShardReader(read_index(tmp_path), WEIGHT) as read:
        read.check(shape)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the one file, and its digest in the index."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    body = json.loads((folder / INDEX).read_text())
    del body["xxh3_128"]
    body["files"][file.name] = [file.stat().st_size, digest_of(file)]
    (folder / INDEX).write_text(seal(body))
    read_index(folder).verify()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda t: t["weight/w"].view(-1)[5].fill_(float("nan")),
            CheckpointError,
            "weight of w in .* holds nan or inf",
        ),
        (
            lambda t: t.update({"weight/w": torch.ones(4, 3)}),
            TornCheckpointError,
            r"weight/w of .* is \[4, 3\], the index",
        ),
        (lambda t: t.update(other=t.pop("weight/w")), TornCheckpointError, "cannot read weight/w of .*safetensors"),
    ],
    ids=["nan", "mis-shaped", "missing"],
)
def test_a_file_that_does_not_hold_what_the_index_says(
    change: Callable[[dict[str, Tensor]], Any], error: type[CheckpointError], message: str, tmp_path: Path
) -> None:
    snapshot = Snapshot([Piece.whole(WEIGHT, "w", torch.ones(3, 4))], FACTS)
    snapshot.complete(tmp_path, [snapshot.write(tmp_path)])
    rewrite(tmp_path, change)
    with pytest.raises(error, match=message), ShardReader(read_index(tmp_path), WEIGHT) as read:
        read("w")


@pytest.mark.parametrize("rows", [(0, 3), (0, 2, 2)], ids=["a gap", "an overlap"])
def test_boxes_must_cover_a_tensor_once(rows: tuple[int, ...], tmp_path: Path) -> None:
    boxes = [["file", [start, 0], [2 if start == 0 else 1, 2]] for start in rows]
    saved = {"dtype": "float32", "shape": [4, 2], "boxes": boxes}
    manifest = {"files": {"file": [0, ""]}, "tensors": {WEIGHT: {"w": saved}}}
    with pytest.raises(CheckpointError, match=r"weight of w in .* is not covered exactly once by its boxes"):
        write_index(tmp_path, FACTS, [manifest])
    assert not (tmp_path / INDEX).exists()


def test_what_is_written_later_is_what_was_there_at_the_snapshot(tmp_path: Path) -> None:
    """This includes a piece that is a strided view, as in fused query, key and value."""
    values = torch.arange(24.0).view(2, 3, 4)
    snapshot = Snapshot([Piece(WEIGHT, "w", (4, 4), (0, 0), (4, 4), values[:, :2])], FACTS)
    want = values[:, :2].flatten(0, 1).clone()
    snapshot.detach()
    values.zero_()
    snapshot.complete(tmp_path, [snapshot.write(tmp_path)])
    with ShardReader(read_index(tmp_path), WEIGHT) as read:
        assert torch.equal(read("w"), want)


def test_snapshots_may_share_a_buffer_one_after_the_other(tmp_path: Path) -> None:
    """This includes several types and files: pieces are views of one block."""
    buffer = HostBuffer()
    for number, size in enumerate((7, 5, 9)):
        tensors = {f"w{i}": torch.rand(size, i + 1).to([torch.float32, torch.bfloat16][i % 2]) for i in range(6)}
        snapshot = Snapshot([Piece.whole(WEIGHT, name, tensor) for name, tensor in tensors.items()], FACTS)
        snapshot.detach(buffer)
        folder = tmp_path / str(number)
        folder.mkdir()
        snapshot.complete(folder, [snapshot.write(folder, max_file_bytes=200)])
        assert len(list(folder.glob("*.safetensors"))) > 1
        with ShardReader(read_index(folder), WEIGHT) as read:
            for name, tensor in tensors.items():
                assert torch.equal(read(name), tensor)
