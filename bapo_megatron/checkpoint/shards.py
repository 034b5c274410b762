"""Writing one rank's pieces of a model: copied to the CPU now, written as Hugging Face tensors later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from bapo_megatron.checkpoint.folder import HF_CONFIG, Manifest, StoredBox, digest_of, stored_key, write_index
from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.hf.reader import check_finite
from bapo_megatron.hf.writer import MAX_FILE_BYTES, copy_companions, save_tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor."""

    part: str  # weight, or one of Adam's moments
    name: str  # Hugging Face's name
    shape: tuple[int, ...]  # the whole tensor's shape
    start: tuple[int, ...]
    size: tuple[int, ...]
    values: Tensor  # the box's values in its order, perhaps strided and in another shape

    @classmethod
    def whole(cls, part: str, name: str, tensor: Tensor) -> Piece:
        size = tuple(tensor.shape)
        return cls(part, name, size, (0,) * tensor.dim(), size, tensor)

    @property
    def dtype(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


class Snapshot:
    """One rank's pieces at one moment, to be written by that rank; all ranks' manifests together form the index.

    Args:
        pieces: consumed once, by `write`; several of one tensor come in the order of their rows.
        facts: `folder.Facts`, the same on every rank.
        hf_path: Hugging Face folder whose config.json and tokenizer are saved too.
        is_detached: training does not change the pieces before `write`.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        facts: Mapping[str, Any],
        *,
        rank: int = 0,
        hf_path: Path | None = None,
        is_detached: bool = False,
    ) -> None:
        self.facts = facts
        self.pieces = pieces
        self._rank = rank
        self._hf_path = hf_path
        self._buffer: HostBuffer | None = None
        self._is_detached = is_detached

    def detach(self, buffer: HostBuffer | None = None) -> None:
        """Copy the pieces to the CPU, so that training can change the originals before `write`.

        Copies from a GPU are ordered on the current stream and may still be running on return.

        Args:
            buffer: destination, reserved for this snapshot until `write` returns; None means a new one.
        """
        if self._is_detached:
            return
        self._buffer = buffer or HostBuffer()
        pieces = list(self.pieces)
        copies = self._buffer.copy([piece.values for piece in pieces])
        self.pieces = [replace(piece, values=copy) for piece, copy in zip(pieces, copies, strict=True)]

    def write(self, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> Manifest:
        """Write this rank's files, once. Not collective; may run in any thread after `detach`.

        Needs CPU memory for one file's pieces, besides the copies of `detach`.

        Raises:
            CheckpointError: the disk is full, or a value is nan or infinite, so that loading would refuse it.
        """
        if self._buffer is not None:
            self._buffer.wait()
        manifest: Manifest = {"files": {}, "tensors": {}}
        for number, pieces in enumerate(_in_files(self.pieces, max_file_bytes)):
            name = f"rank-{self._rank:05d}-{number:03d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for (part, tensor), group in groupby(pieces, key=lambda p: (p.part, p.name)):
                of_tensor = [(p, StoredBox(name, p.start, p.size)) for p in group]
                boxes = [box for _, box in of_tensor]
                for p, box in of_tensor:
                    key = stored_key(part, tensor, box, boxes)
                    tensors[key] = p.values.detach().cpu().reshape(p.size).contiguous()
                saved = {"dtype": p.dtype, "shape": list(p.shape), "boxes": []}
                manifest["tensors"].setdefault(part, {}).setdefault(tensor, saved)["boxes"] += [
                    [box.file, list(box.start), list(box.size)] for box in boxes
                ]
            assert len(tensors) == len(pieces), "a file holds a piece twice"
            for key, values in tensors.items():
                check_finite(values, key)
            save_tensors(tensors, folder / name)
            manifest["files"][name] = [(folder / name).stat().st_size, digest_of(folder / name)]
        self.pieces = ()
        return manifest

    def complete(self, folder: Path, manifests: Iterable[Manifest]) -> None:
        """Turn the shards into a saved model. Call on one rank, once all have written.

        Raises:
            CheckpointError: the disk is full.
        """
        files = {}
        if self._hf_path is not None:
            (folder / HF_CONFIG).mkdir()
            copy_companions(self._hf_path, folder / HF_CONFIG, set())
            copied = sorted(file for file in (folder / HF_CONFIG).rglob("*") if file.is_file())
            files = {str(file.relative_to(folder)): [file.stat().st_size, digest_of(file)] for file in copied}
        write_index(folder, self.facts, [*manifests, {"files": files, "tensors": {}}])


def _in_files(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    pending: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if pending and num_bytes + piece.values.nbytes > max_bytes:
            yield pending
            pending, num_bytes = [], 0
        pending.append(piece)
        num_bytes += piece.values.nbytes
    if pending:
        yield pending
