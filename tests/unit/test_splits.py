"""Splits of parameters: whole tensors, shards and pieces of them follow from one description."""

from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.hf.families import ATTENTION, COLUMNS, COPY, MIXTURE_LAYER, QKV, ROWS, VOCAB, Block, Parameter
from bapo_megatron.hf.shape import Dense, Experts, LayerShape, layer_entries
from bapo_megatron.hf.splits import Copy, EachExpert, Entry, EvenRows, GatedInterleaved, Shard, Split
from bapo_megatron.learner.slicing import from_shards, place_shard, to_shard
from tests.unit.test_hf_convert import make_shape


@st.composite
def split_entries(draw: st.DrawFn) -> tuple[Entry, int]:
    """Return a parameter, and a number of ranks that it can be split over."""
    ranks = draw(st.integers(1, 8))
    many = st.integers(1, 3).map(lambda n: n * ranks)  # a size that ranks split evenly
    inner = draw(st.sampled_from([(), (5,), (3, 2)]))  # a vector, a matrix, and a tensor of three dimensions
    split: Split
    expert, sizes = None, {}
    match draw(st.sampled_from(["copy", "vocab", "rows", "columns", "qkv", "parts", "gated", "expert"])):
        case "copy":
            split, shapes = COPY, [(draw(st.integers(1, 9)), *inner)]
        case "vocab":  # any size, even fewer rows than ranks, whose last ones then have only padding
            split, shapes = VOCAB, [(draw(st.integers(1, 30)), *inner)]
        case "rows":
            split, shapes = ROWS, [(draw(many), *inner) for _ in range(draw(st.integers(1, 3)))]
        case "columns":
            split, shapes = COLUMNS, [(draw(st.integers(1, 4)), draw(many), *inner)]
        case "qkv":
            groups, head, each = draw(many), draw(st.integers(1, 3)), draw(st.integers(1, 3))
            split, sizes = QKV, {"G": groups}
            shapes = [(groups * head * each, *inner), (groups * head, *inner), (groups * head, *inner)]
        case "parts":
            sizes = {letter: draw(many) for letter in "kvn"}
            split = EvenRows(("kkv", "v", "n"))
            shapes = [(2 * sizes["k"] + sizes["v"], *inner), (sizes["v"], *inner), (sizes["n"], *inner)]
        case "gated":
            groups, head, each = draw(many), draw(st.integers(1, 3)), draw(st.integers(1, 3))
            split, sizes = GatedInterleaved("G"), {"G": groups, "D": head}
            shapes = [(2 * groups * head * each, *inner), (groups * head, *inner), (groups * head, *inner)]
        case _:
            sizes = {"X": draw(many)}
            expert = draw(st.integers(0, sizes["X"] - 1))
            inner_split = draw(st.sampled_from([ROWS, COPY]))
            split, shapes = EachExpert(inner_split), [(draw(st.integers(1, 5)), *inner)]
    names = tuple(f"t{i}" for i in range(len(shapes)))
    return Entry("p", None, expert, split, names, tuple(shapes), sizes), ranks


def tensors_of(entry: Entry) -> dict[str, Tensor]:
    counted = torch.arange(1.0, 1 + sum(map(prod, entry.hf_shapes))).split([prod(shape) for shape in entry.hf_shapes])
    return {name: part.view(shape) for name, part, shape in zip(entry.hf_names, counted, entry.hf_shapes, strict=True)}


def shards_of(entry: Entry, tensors: dict[str, Tensor], ranks: int) -> list[Tensor]:
    if entry.axis == "dense":
        return [to_shard(entry, lambda name, index: tensors[name][index], rank, ranks) for rank in range(ranks)]
    shards = [torch.empty(0)] * ranks
    (owner,) = (rank for rank in range(ranks) if entry.shard(rank, ranks).boxes)
    shards[owner] = to_shard(entry, lambda name, index: tensors[name][index], owner, ranks)
    return shards


@settings(deadline=None, max_examples=400)
@given(case=split_entries())
def test_joining_and_placing_undo_splitting(case: tuple[Entry, int]) -> None:
    """Every value returns to its place; each value is written once by some rank, and padding never."""
    entry, ranks = case
    tensors = tensors_of(entry)
    shards = shards_of(entry, tensors, ranks)
    for name, whole in zip(entry.hf_names, from_shards(entry, shards), strict=True):
        assert torch.equal(whole, tensors[name])
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank, shard in enumerate(shards):
        assert shard.shape == entry.shard(rank, ranks).shape
        for piece in place_shard(entry, "weight", shard, rank, ranks):
            place = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            found[piece.name][place] += piece.values.reshape(piece.size)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    if entry.axis == "dense" and not isinstance(entry.split, Copy):
        assert len({shard.shape for shard in shards}) == 1
        assert torch.cat([shard.flatten() for shard in shards]).count_nonzero() == sum(map(prod, entry.hf_shapes))


def test_parts_of_a_fused_tensor_are_split_each() -> None:
    """Rank 1 of 2 holds the second half of k, of k and v, and of z."""
    entry = Entry("p", 0, None, EvenRows(("kkv", "v")), ("qkv", "z"), ((8, 1), (4, 1)), {"k": 2, "v": 4})
    shard = shards_of(entry, tensors_of(entry), 2)[1]
    assert shard.flatten().tolist() == [2, 4, 7, 8, 11, 12]
    with pytest.raises(AssertionError, match="the parts of qkv have 8 of its 9 rows"):
        Entry("p", 0, None, EvenRows(("kkv",)), ("qkv",), ((9, 1),), {"k": 2, "v": 4}).shard(0, 2)


def test_gates_stand_behind_the_queries_of_their_group() -> None:
    """With 2 groups of 2 heads of 1 value, rank 0 has queries 1, 3 and gates 2, 4, then the group's key and value."""
    entry = Entry("p", 0, None, GatedInterleaved("G"), ("q", "k", "v"), ((8,), (2,), (2,)), {"G": 2, "D": 1})
    assert [shard.tolist() for shard in shards_of(entry, tensors_of(entry), 2)] == [
        [1, 3, 2, 4, 9, 11],
        [5, 7, 6, 8, 10, 12],
    ]


EXPERTS = (
    *MIXTURE_LAYER.parameters[len(ATTENTION) - 1 :],
    Parameter(
        "mlp.shared_experts.linear_fc1.weight",
        ROWS,
        {"mlp.shared_expert.gate_proj.weight": "SE", "mlp.shared_expert.up_proj.weight": "SE"},
    ),
)
SHARED = Block(EXPERTS)


def owners(entries: Sequence[Entry], ranks: int) -> dict[str, list[int]]:
    return {e.megatron_name: [rank for rank in range(ranks) if e.owned(rank, ranks)] for e in entries}


def test_experts_have_names_numbers_and_owners_of_their_own() -> None:
    layer = LayerShape(Experts(num_experts=4, num_chosen=2, ffn_size=10, normalised=True, shared_ffn_size=6), SHARED)
    found = list(layer_entries(make_shape("llama"), layer, 1))
    assert [entry.axis for entry in found] == ["dense"] * 2 + ["expert"] * 8 + ["dense"]
    third = found[6]
    assert found[7].megatron_name == "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight", "one by one"
    assert third.megatron_name == "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert third.hf_names[1] == "model.layers.1.mlp.experts.2.up_proj.weight"
    assert (third.expert, third.hf_shapes) == (2, ((10, 16), (10, 16)))
    assert found[-1].hf_shapes == ((6, 16), (6, 16))
    of_four = owners(found, 2)
    assert of_four["decoder.layers.1.mlp.router.weight"] == [0]
    assert of_four["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"] == [0, 1]
    for number, owner in enumerate([0, 0, 1, 1]):
        assert of_four[f"decoder.layers.1.mlp.experts.local_experts.{number}.linear_fc2.weight"] == [owner]
    assert found[2].shard(0, 2).shape == (20, 16)
    assert found[2].shard(1, 2) == Shard((0,), ())


def test_a_dense_layer_has_no_sizes_of_experts() -> None:
    with pytest.raises(KeyError, match="X"):
        list(layer_entries(make_shape("llama"), LayerShape(Dense(24), SHARED)))


def test_a_size_that_no_letter_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp\.odd\.weight: there is no size Z"):
        Parameter("mlp.odd.weight", ROWS, {"mlp.odd.weight": "ZE"})
