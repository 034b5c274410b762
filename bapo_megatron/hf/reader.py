"""Reading tensors, or slices of them, from a Hugging Face checkpoint folder with one safetensors file or several."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import CheckpointError, plural
from bapo_megatron.hf.shape import ModelShape, hf_tensors
from bapo_megatron.hf.splits import Size
from bapo_megatron.hf.stacks import stacks
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # a buffer in old checkpoints
EVERYTHING = (slice(None),)


class HFReader:
    """Slices of the tensors in a checkpoint folder, whose files are opened once and mapped, not loaded.

    Example:
        with HFReader(path) as read:
            top = read("model.embed_tokens.weight", (slice(0, 100),))  # [100, hidden]

    Args:
        headers_only: reads no values, so that a file may be larger than this machine's memory.

    Raises:
        CheckpointError: the folder has no safetensors weights, a file is missing or torn, or index and files disagree.
    """

    def __init__(self, path: str | Path, *, headers_only: bool = False) -> None:
        self.path = Path(path)
        weight_map = _weight_map(self.path)
        files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        self._handles = {name: self._open(self.path / name, "np" if headers_only else "pt") for name in files}
        self._files_in_use: set[str] = set()
        self._file_of = {tensor: name for name, handle in self._handles.items() for tensor in handle.keys()}  # noqa: SIM118
        self._places: dict[str, tuple[str, int, slice]] = {}  # an expert's tensor -> its stack, index and rows
        if weight_map is not None:
            self._compare_with_index(weight_map)

    @staticmethod
    def _open(file: Path, framework: str) -> safe_open:
        try:
            return safe_open(file, framework=framework)
        except RuntimeError as error:
            advice = "torch reserves memory for the whole file: free some, or take a machine with more"
            raise CheckpointError(f"cannot read {file}: {error}; {advice}") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; copy or download the file again") from error

    def _compare_with_index(self, weight_map: dict[str, str]) -> None:
        for tensor, name in weight_map.items():
            if tensor not in self._handles[name].keys():  # noqa: SIM118
                raise CheckpointError(f"{self.path / INDEX} says that {tensor} is in {name}, which does not hold it")
        for name, handle in self._handles.items():
            for tensor in handle.keys():  # noqa: SIM118
                if weight_map.get(tensor) != name:
                    raise CheckpointError(f"{self.path / name} holds {tensor}, which {INDEX} does not place there")

    def __enter__(self) -> HFReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._handles.clear()  # closes the files: safetensors has no close()

    def __call__(self, name: str, index: tuple[slice, ...] = EVERYTHING) -> Tensor:
        """Read one tensor, or a slice of it, in the checkpoint's own dtype.

        Raises:
            CheckpointError: the values include nan or infinity, or the file cannot be read.
        """
        stack, expert, rows = self._places.get(name, (name, None, slice(0)))
        file = self._file_of[stack]
        if file not in self._files_in_use:
            self._files_in_use.add(file)
            HEARTBEAT.beat(TRAINER, f"loading {self.path.name}: {len(self._files_in_use)}/{len(self._handles)} shards")
        try:
            held = self._handles[file].get_slice(stack)
            tensor = held[index] if expert is None else held[(slice(expert, expert + 1), *_within(rows, index))][0]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} of {self.path / file}: {error}") from error
        check_finite(tensor, f"{name} in {self.path / file}")
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or name in self._places

    def check(self, shape: ModelShape) -> None:
        """Check names, shapes and types against config.json, and warn of tensors that stay unread.

        Raises:
            CheckpointError: see `check_headers`; or a tied output layer differs from the embedding.
        """
        unread = self.check_headers(shape)
        if shape.tied_embeddings and "lm_head.weight" in self:
            self._check_tied(shape)
        if unread:
            log.warning(
                "%s holds %s that are left out, as only text is trained: %s",
                self.path,
                plural(len(unread), "tensor"),
                list_some(sorted({f"{start}*" for start in shape.unread for name in unread if name.startswith(start)})),
            )

    def check_headers(self, shape: ModelShape) -> list[str]:
        """Check names, shapes and types against config.json, and return the names of tensors that stay unread.

        Raises:
            CheckpointError: lists missing, unexpected, mis-shaped and quantised tensors.
        """
        wanted = self._wanted(shape)
        slices = {name: self._handles[file].get_slice(name) for name, file in self._file_of.items()}
        embedding = wanted[shape.embedding_name]
        tied = {"lm_head.weight": embedding} if shape.tied_embeddings else {}
        unread = [name for name in slices if name.startswith(shape.unread)]
        known = {*wanted, *tied, *unread}

        def named(name: str) -> str:
            return f"{name} ({self._file_of[name]})"

        complaints = {
            "missing": [name for name in wanted if name not in slices],
            "unexpected": [named(name) for name in slices if name not in known and not name.endswith(_COMPUTED_SUFFIX)],
            "of another shape": [
                f"{named(name)} is {slices[name].get_shape()}, config.json says {list(size)}"
                for name, size in (wanted | tied).items()
                if name in slices and tuple(slices[name].get_shape()) != size
            ],
            "of a type that is not supported": [
                f"{named(name)} is {slices[name].get_dtype()}"
                for name in wanted
                if name in slices and slices[name].get_dtype() not in FLOATS
            ],
        }
        if found := in_words(complaints):
            raise CheckpointError(f"weights in {self.path} do not fit its config.json; {found}")
        return unread

    def _wanted(self, shape: ModelShape) -> dict[str, Size]:
        """Return names and shapes of the tensors that the folder needs, with the stacks that it has; remember these."""
        wanted = hf_tensors(shape)
        for stack in stacks(shape).values():
            if stack.name in self._file_of and self._file_of.keys().isdisjoint(stack.places):
                for name, place in stack.places.items():
                    del wanted[name]
                    self._places[name] = stack.name, *place
                wanted[stack.name] = stack.size
        return wanted

    def _check_tied(self, shape: ModelShape, chunk_rows: int = 4096) -> None:
        """Check that a stored output layer equals the tied embedding: transformers would use one that differs."""
        for start in range(0, shape.vocab_size, chunk_rows):
            rows = (slice(start, start + chunk_rows),)
            if not torch.equal(self("lm_head.weight", rows), self(shape.embedding_name, rows)):
                raise CheckpointError(
                    f"lm_head.weight in {self.path / self._file_of['lm_head.weight']} differs from the embedding, but "
                    "config.json sets tie_word_embeddings: set it to false, or remove the tensor"
                )


def _within(rows: slice, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return an index of rows and columns as one of a stack, of which `rows` are meant."""
    start, stop, _ = index[0].indices(rows.stop - rows.start)
    return slice(rows.start + start, rows.start + stop), *index[1:]


def digest_of(read: Callable[[str], Tensor], names: Iterable[str]) -> int:
    """Return a digest of tensors with 128 bits: the sum of each one's, so that several processes can share the work.

    It tells models apart, and guards against mix-ups, not an adversary.
    """
    total = 0
    for name in names:
        tensor = read(name).contiguous()
        one = xxhash.xxh3_128(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        one.update(tensor.flatten().view(torch.uint8).numpy().data)
        total += one.intdigest()
    return total % 2**128


def weight_files(path: Path) -> list[Path]:
    """List the safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: it has none, or one is missing.
    """
    weight_map = _weight_map(path)
    files = [path / name for name in (sorted(set(weight_map.values())) if weight_map is not None else [SINGLE])]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
    return files


def check_finite(tensor: Tensor, what: str) -> None:
    """Check that every value is finite, without a copy of the tensor.

    Raises:
        CheckpointError: a value is nan or infinite.
    """
    if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise CheckpointError(f"{what} holds nan or infinity")


def _weight_map(path: Path) -> dict[str, str] | None:
    """Map tensor names to file names by the index; return None for a folder with a single file."""
    index = path / INDEX
    if (path / SINGLE).exists():
        if index.exists():
            raise CheckpointError(f"{path} holds both {SINGLE} and {INDEX}: delete the wrong one")
        return None
    if not index.exists():
        advice = "add the index of its files" if any(path.glob("*.safetensors")) else "save the model as safetensors"
        raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}: {advice}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    if strange := sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name):
        raise CheckpointError(f"{index} names {strange[0]!r}, which is not a file of this folder")
    return weight_map


def misfits(wanted: Mapping[str, Size], held: Mapping[str, Size], source: str) -> dict[str, list[str]]:
    """List missing, unexpected and mis-shaped tensors by kind.

    Args:
        source: who wants the shapes, such as "config.json says".
    """
    return {
        "missing": [name for name in wanted if name not in held],
        "unexpected": [name for name in held if name not in wanted],
        "of another shape": [
            f"{name} is {list(held[name])}, {source} {list(size)}"
            for name, size in wanted.items()
            if held.get(name, size) != size
        ],
    }


def in_words(complaints: Mapping[str, list[str]]) -> str:
    """Join what is wrong with tensors, by kind; empty if nothing is."""
    return "; ".join(f"{len(names)} {what}: {list_some(names)}" for what, names in complaints.items() if names)


def list_some(names: list[str], limit: int = 8) -> str:
    """Join the first few names, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
