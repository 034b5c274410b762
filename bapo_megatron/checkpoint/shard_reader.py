"""Reading tensors, or slices of them, from the shards of a saved model, independent of the layout that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.checkpoint.folder import SQUARES, WEIGHT, Index, Saved, StoredBox, stored_key
from bapo_megatron.errors import CheckpointError, TornCheckpointError
from bapo_megatron.hf.reader import EVERYTHING, check_finite, in_words, misfits
from bapo_megatron.hf.shape import ModelShape, entries, tensors_of
from bapo_megatron.hf.splits import is_kept, is_trained


class ShardReader:
    """One part of a saved model (its weights, or a moment); reads like `hf.reader.HFReader`.

    Files are opened when first needed, and mapped instead of loaded: reading a slice touches only its own bytes.

    Args:
        part: `folder.WEIGHT` or one of `folder.MOMENTS`.
    """

    def __init__(self, index: Index, part: str) -> None:
        self._index = index
        self._part = part
        self._tensors = index.tensors.get(part, {})
        self._handles: dict[str, safe_open] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handles.clear()  # closes the files: safetensors has no close()

    def __call__(self, name: str, index: tuple[slice, ...] = EVERYTHING) -> Tensor:
        """Assemble one tensor, or a slice of it, from its boxes.

        Raises:
            TornCheckpointError: a file cannot be read, or does not hold what the index says.
            CheckpointError: a value is nan or infinite, or a mean of squares is negative.
        """
        saved = self._tensors[name]
        wanted = _ranges(saved, index)
        shape = [max(stop - start, 0) for start, stop in wanted]
        tensor = None
        for box in saved.boxes:
            common = _common(wanted, box)
            if any(a >= b for a, b in common):
                continue
            values = self._read(name, saved, box, _within(common, box.start))
            if list(values.shape) == shape:
                tensor = values
                break
            if tensor is None:
                tensor = torch.empty(shape, dtype=values.dtype)
            tensor[_within(common, [start for start, _ in wanted])] = values
        if tensor is None:
            return torch.empty(shape, dtype=getattr(torch, saved.dtype))
        what = f"{self._part} of {name} in {self._index.folder}"
        check_finite(tensor, what)
        if self._part == SQUARES and tensor.numel() and tensor.min() < 0:
            problem = f"{what} holds a negative mean of squares: the checkpoint was altered"
            raise CheckpointError(f"{problem}; remove its step folder to resume from the one before")
        return tensor

    def check(self, shape: ModelShape) -> None:
        """Compare names and shapes with the model's.

        Raises:
            CheckpointError: lists missing, unexpected and mis-shaped tensors.
        """
        wanted = tensors_of(filter(is_kept if self._part == WEIGHT else is_trained, entries(shape)))
        held = {name: saved.shape for name, saved in self._tensors.items()}
        if found := in_words(misfits(wanted, held, "config.json says")):
            raise CheckpointError(f"{self._part} in {self._index.folder} does not fit its model; {found}")

    def _read(self, name: str, saved: Saved, box: StoredBox, index: tuple[slice, ...]) -> Tensor:
        file, key = self._index.folder / box.file, stored_key(self._part, name, box, saved.boxes)
        try:
            if box.file not in self._handles:
                self._handles[box.file] = safe_open(file, framework="pt")
            stored = self._handles[box.file].get_slice(key)
            if tuple(stored.get_shape()) == box.size and (values := stored[index]).dtype == getattr(torch, saved.dtype):
                return values
        except (OSError, SafetensorError) as error:
            raise TornCheckpointError(f"cannot read {key} of {file}: {error}") from error
        raise TornCheckpointError(
            f"{key} of {file} is {stored.get_shape()}, the index says {list(box.size)}, of type {saved.dtype}"
        )


Ranges = list[tuple[int, int]]  # first index and one past the last, along each dimension


def _ranges(saved: Saved, index: tuple[slice, ...]) -> Ranges:
    """Resolve a Python index to ranges; missing dimensions are taken whole."""
    full = (*index, *(slice(None),) * (len(saved.shape) - len(index)))
    return [part.indices(length)[:2] for part, length in zip(full, saved.shape, strict=True)]


def _common(wanted: Ranges, box: StoredBox) -> Ranges:
    """Intersect the wanted ranges with a box; disjoint dimensions give empty ranges."""
    sides = zip(wanted, box.start, box.size, strict=True)
    return [(max(a, start), min(b, start + size)) for (a, b), start, size in sides]


def _within(ranges: Ranges, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the ranges as an index into a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, origin, strict=True))
