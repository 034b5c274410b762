"""How ranks split a parameter: the one description that reading, writing and joining shards follow.

Boxes describe a rank's shard: ranges of checkpoint tensors, and where the shard holds their values. Values outside all
boxes are padding, and zero. Source of the layouts: megatron/core/transformer/{mlp,attention}.py and
tensor_parallel/layers.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Protocol

Axis = Literal["dense", "expert"]  # the ranks that split a parameter: tensor-parallel ones, or the experts'
Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous range of one tensor, and the view of a shard that holds its values in the same order."""

    tensor: int  # index in `Entry.hf_names`
    start: Size
    size: Size
    offset: int  # offset of the view, in values
    view: Size
    strides: Size


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a parameter."""

    shape: Size
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of the model, and the checkpoint tensors it consists of."""

    megatron_name: str  # with the numbers of layer and expert within the whole model
    layer: int | None
    expert: int | None
    split: Split
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Size, ...]
    sizes: Mapping[str, int]  # by the letters of `families.Parameter`
    trained: bool = True  # see `families.Parameter`
    stored: bool = True
    stacked: str | None = None  # the tensor of all experts, where folders may have one

    @property
    def axis(self) -> Axis:
        """The ranks that split it."""
        return "dense" if self.expert is None else "expert"

    def without_experts(self) -> Entry:
        """Return the same parameter in a layout that does not spread experts over ranks: tensor ranks split each."""
        return replace(self, expert=None, split=self.split.inner) if isinstance(self.split, EachExpert) else self

    def holder(self, size: int) -> int | None:
        """Return the only one of the `size` ranks of its axis that holds the parameter; None if all hold a part."""
        return None if self.expert is None else self.expert // _divided(self.sizes["X"], size)

    def shard(self, rank: int, size: int) -> Shard:
        """Describe the part that rank `rank` of the `size` ranks of its axis holds."""
        return self.split.shard(self, rank, size)

    def owned(self, rank: int, size: int) -> tuple[Box, ...]:
        """Return the boxes that a rank is responsible for; copies belong to the first rank."""
        return () if rank and isinstance(self.split, Copy) else self.shard(rank, size).boxes

    def num_values(self, size: int) -> int:
        """Count the values that the first of `size` ranks holds."""
        return prod(self.shard(0, size).shape)


def is_any(_: Entry) -> bool:
    """Return True: all parameters are meant."""
    return True


def is_trained(entry: Entry) -> bool:
    """Return whether a parameter has a gradient and moments."""
    return entry.trained


def is_stored(entry: Entry) -> bool:
    """Return whether Hugging Face folders and engines have a parameter."""
    return entry.stored


def is_kept(entry: Entry) -> bool:
    """Return whether training checkpoints hold a parameter. One that is not trained stays as the model's folder has it,
    unless the run has made it."""
    return entry.trained or not entry.stored


class Split(Protocol):
    """A way to split parameters."""

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        """See `Entry.shard`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The whole parameter on every rank."""

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        return _stacked(entry, [(0, 0, entry.hf_shapes[0][0])])


@dataclass(frozen=True, slots=True)
class Vocab:
    """Even rows, after zero rows have padded them to a multiple of the number of ranks."""

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        whole = entry.hf_shapes[0][0]
        rows = -(-whole // size)
        first = min(rank * rows, whole)
        return _stacked(entry, [(0, first, min(rows, whole - first))], num_rows=rows)


@dataclass(frozen=True, slots=True)
class EvenRows:
    """Even rows of every tensor, one after the other. For gate and up: [its rows of gate; its rows of up].

    Example: EvenRows(("kkv", "v")) for a first tensor that itself consists of k, k and v rows, each split evenly.
    """

    parts: tuple[str, ...] | None = None  # letters of the sizes of each tensor's parts; None means one part each

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        return _stacked(entry, _even_rows(entry, self.parts, rank, size))


@dataclass(frozen=True, slots=True)
class EvenColumns:
    """Even columns."""

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        rows, columns, *rest = entry.hf_shapes[0]
        own = _divided(columns, size)
        shape = (rows, own, *rest)
        box = Box(0, (0, rank * own, *(0 for _ in rest)), shape, 0, (prod(shape),), (1,))
        return Shard(shape, (box,))


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Even rows of every tensor, group by group: for each key-value head, [query heads of the group; key; value]."""

    groups: str  # letter of their number

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        num_groups = _divided(entry.sizes[self.groups], size)
        return _stacked(entry, _even_rows(entry, None, rank, size), num_groups)


@dataclass(frozen=True, slots=True)
class GatedInterleaved:
    """Even rows of queries with gates, keys and values, group by group: [queries; their gates; key; value].

    The first tensor holds, for each head, its D rows of queries and then its D rows of gates.
    """

    groups: str  # letter of their number

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        (queries, *inner), (keys, *_) = entry.hf_shapes[0], entry.hf_shapes[1]
        num_groups, head = _divided(entry.sizes[self.groups], size), entry.sizes["D"]
        shard = _stacked(entry, _even_rows(entry, None, rank, size), num_groups)
        row, heads = prod(inner), _divided(queries, 2 * head * size * num_groups)
        group = _divided(queries + 2 * keys, size * num_groups) * row
        of_queries, *others = shard.boxes
        view, strides = (num_groups, heads, 2, head * row), (group, head * row, heads * head * row, 1)
        return replace(shard, boxes=(replace(of_queries, view=view, strides=strides), *others))


@dataclass(frozen=True, slots=True)
class EachExpert:
    """One whole parameter per expert, as `inner` gives it to a single rank. Ranks hold equal runs of experts."""

    inner: Split

    def shard(self, entry: Entry, rank: int, size: int) -> Shard:
        if entry.holder(size) != rank:
            return Shard((0,), ())
        return self.inner.shard(entry, 0, 1)


def _even_rows(entry: Entry, parts: tuple[str, ...] | None, rank: int, size: int) -> Iterable[tuple[int, int, int]]:
    """Yield (tensor, first row, number of rows) of a rank's even rows of each part of each tensor."""
    for tensor, shape in enumerate(entry.hf_shapes):
        first = 0
        # a single rank holds all parts, in order
        for length in shape[:1] if parts is None or size == 1 else [entry.sizes[letter] for letter in parts[tensor]]:
            own = _divided(length, size)
            yield tensor, first + rank * own, own
            first += length
        assert first == shape[0], f"the parts of {entry.hf_names[tensor]} have {first} of its {shape[0]} rows"


def _stacked(
    entry: Entry, ranges: Iterable[tuple[int, int, int]], num_groups: int = 1, num_rows: int | None = None
) -> Shard:
    """Describe stacked ranges of rows: each group holds an even part of every range.

    Args:
        ranges: tensor, first row and number of rows of each.
        num_rows: rows of the shard, if some are padding.
    """
    ranges, inner = list(ranges), entry.hf_shapes[0][1:]
    height = sum(rows for _, _, rows in ranges) if num_rows is None else num_rows
    row, boxes, above = prod(inner), [], 0
    for tensor, first, rows in ranges:
        start, in_group = (first, *(0 for _ in inner)), _divided(rows, num_groups)
        view, strides = (num_groups, in_group * row), (height // num_groups * row, 1)
        boxes.append(Box(tensor, start, (rows, *inner), above * row, view, strides))
        above += in_group
    return Shard((height, *inner), tuple(boxes))


def _divided(number: int, size: int) -> int:
    quotient, rest = divmod(number, size)
    assert not rest, f"{size} does not divide {number}"
    return quotient
