"""A saved model as files: shards of every rank and one index, independent of the layout and free of pickle.

    <folder>/index.json                     facts (format, version, model), a digest of each file, and where each slice
                                            of each tensor lies; written last
    <folder>/rank-00002-000.safetensors     what rank 2 wrote: float32 boxes of Hugging Face tensors, by part:
                                            weight, exp_avg, exp_avg_sq (Adam's moments)
    <folder>/hf_config/                     config.json and tokenizer, for export (`bapo convert`)

Weights that are not trained, as LoRA leaves the model's, are not stored: the index names their folder, and a digest.

Tensors have Hugging Face names and shapes, so that any layout can read them: query, key and value are separate, and so
are gate and up; vocabulary padding is not stored. A box is a contiguous range along each dimension. At version 0 the
moments may be missing, which means zero.

Why our own format: megatron's dist_checkpointing and torch.distributed.checkpoint keep their metadata in a pickle. The
latter's HuggingFaceStorageWriter (torch 2.13) does not, but its planner sends pickled plans between ranks, it has
neither checksums nor an index (it infers shapes from the shards it finds, so a missing file goes unnoticed), and its
asynchronous save runs collectives in the background. Our shards are plain safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypeVar

import xxhash
from pydantic import AfterValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from bapo_megatron.errors import CheckpointError, TornCheckpointError, wrong_fields
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.hf.writer import write_durably
from bapo_megatron.runtime import memory_bytes
from bapo_megatron.runtime.files import regular_file
from bapo_megatron.types import Natural

FORMAT = 2  # format of a saved model
STATE_FORMAT = 3  # format of state.json
INDEX = "index.json"
STATE = "state.json"  # belongs to a whole checkpoint: store.py
HF_CONFIG = "hf_config"
WEIGHT = "weight"
SQUARES = "exp_avg_sq"
MOMENTS = ("exp_avg", SQUARES)
DIGEST_FIELD = "xxh3_128"
_CHUNK_BYTES = 8 << 20
_DECODED_BYTES = 4  # memory that decoding takes for each byte of JSON, at least

_T = TypeVar("_T")
Manifest = dict[str, Any]  # JSON: {"files": {file: [bytes, digest]}, "tensors": {part: {name: Saved}}} of one rank


class Origin(TypedDict):
    """A folder with tensors that a saved model needs and does not hold."""

    path: str
    digest: str  # `hf.reader.digest_of` the tensors, hexadecimal


class Facts(TypedDict):
    """The facts about a saved model."""

    version: Natural  # optimizer updates
    skipped_updates: Natural  # updates that the moments have not seen
    model: dict[str, Any]  # ModelShape.to_json
    skipped_in_a_row: NotRequired[Natural]  # only in a critic's facts
    base: NotRequired[Origin]  # the model's folder, only if not all weights are trained
    initial: NotRequired[Origin]  # the adapters that the run began with, only if lora.init_from names them


def _stays_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError("is not the name of a file in this folder")
    return name


class StoredBox(NamedTuple):
    """A part of a tensor, and the file that holds it."""

    file: str
    start: tuple[Natural, ...]
    size: tuple[Natural, ...]

    def overlaps(self, other: StoredBox) -> bool:
        sides = zip(self.start, self.size, other.start, other.size, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in sides)


def stored_key(part: str, name: str, box: StoredBox, boxes: Iterable[StoredBox]) -> str:
    """Return the name inside its file of one of a tensor's boxes: the tensor's own, except for later boxes of a file.

    A rank has several boxes of a tensor whose rows consist of parts that ranks split one by one.
    """
    is_later = any(other.file == box.file and other.start < box.start for other in boxes)
    return f"{part}/{name}" + (f"@{','.join(map(str, box.start))}" if is_later else "")


@dataclass(frozen=True, slots=True)
class Saved:
    """One whole tensor in a saved model."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    shape: tuple[Natural, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of index.json."""

    folder: Path
    facts: Facts
    files: dict[str, tuple[int, str]]  # bytes, digest
    tensors: dict[str, dict[str, Saved]]  # part -> Hugging Face name

    def verify(self, share: int = 0, num_shares: int = 1) -> None:
        """Compare every file's size, and every `num_shares`-th file's digest, with what was written.

        Raises:
            TornCheckpointError: names the first file that is missing or differs.
        """
        for number, (name, (num_bytes, digest)) in enumerate(self.files.items()):
            file = self.folder / name
            try:
                found_bytes = regular_file(file).stat().st_size
                if found_bytes != num_bytes:
                    raise TornCheckpointError(f"{file} is torn: it has {found_bytes} of {num_bytes} bytes")
                if number % num_shares == share and digest_of(file) != digest:
                    raise TornCheckpointError(f"{file} is torn: its {DIGEST_FIELD} is not the one in {INDEX}")
            except FileNotFoundError:
                raise TornCheckpointError(f"{file} is missing") from None
            except OSError as error:
                raise TornCheckpointError(f"cannot read {file}: {error}") from error

    def check_model(self, shape: ModelShape) -> None:
        """Raise CheckpointError if the saved model differs from `shape`."""
        saved = self.facts["model"]
        if other := [f"{k} is {saved[k]}, not {v}" for k, v in shape.to_json().items() if saved.get(k, v) != v]:
            raise CheckpointError(
                f"{self.folder} holds another model than model.path: {', '.join(other)}; restore the model's files, or "
                "start a run with another run.name"
            )


class _Contents(TypedDict):
    """The contents of index.json, apart from its format and digest."""

    facts: Facts
    files: dict[Annotated[str, AfterValidator(_stays_inside)], tuple[Natural, str]]
    tensors: dict[str, dict[str, Saved]]


_CONTENTS = TypeAdapter(_Contents)


def write_index(folder: Path, facts: Mapping[str, Any], manifests: Iterable[Manifest]) -> None:
    """Write the index that turns a folder of shards into a saved model.

    Args:
        facts: `Facts`, stored unchanged.
        manifests: one per rank, see `shards.Snapshot.write`.

    Raises:
        CheckpointError: the disk is full.
    """
    files: dict[str, list[Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        files |= manifest["files"]
        for part, named in manifest["tensors"].items():
            for name, saved in named.items():
                whole = tensors.setdefault(part, {}).setdefault(name, saved | {"boxes": []})
                assert whole["shape"] == saved["shape"], f"{part} of {name}"
                assert whole["dtype"] == saved["dtype"], f"{part} of {name}"
                whole["boxes"] = sorted([*whole["boxes"], *saved["boxes"]])
    body = {"format": FORMAT, "facts": facts, "files": files, "tensors": tensors}
    _check_covered(_parse(folder, body))
    write_durably(folder / INDEX, seal(body))


def read_index(folder: Path) -> Index:
    """Read the index that `write_index` wrote, without looking at the files that it names.

    Raises:
        TornCheckpointError: index.json is missing or torn, or a field of it is wrong.
        CheckpointError: it has another format.
    """
    if not (folder / INDEX).exists() and (folder / STATE).exists():
        raise _other_format(folder, 1)
    index = _parse(folder, read_sealed(folder / INDEX))
    _check_covered(index)
    return index


def seal(body: dict[str, Any]) -> str:
    """Return JSON that carries its own digest."""
    return json.dumps({DIGEST_FIELD: _digest(body), **body})


def read_sealed(file: Path, expected: int = FORMAT) -> dict[str, Any]:
    """Read a sealed file and check its digest and format.

    Raises:
        TornCheckpointError: the file is missing, or differs from what was written.
        CheckpointError: it has another format.
    """
    try:
        body = json.loads(_read_line(file))
        named = body.pop(DIGEST_FIELD, None) if isinstance(body, dict) else None
        digest = _digest(body)
    except FileNotFoundError:
        raise TornCheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise TornCheckpointError(f"cannot read {file}: {error}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TornCheckpointError(f"{file} is torn: {error or 'it does not fit into memory'}") from error
    if not isinstance(body, dict):
        raise TornCheckpointError(f"{file} is torn: it does not hold a JSON object")
    if named is None and body.get("format") not in (None, expected):
        raise _other_format(file.parent, body["format"], expected)
    if named != digest:
        raise TornCheckpointError(f"{file} is torn: its {DIGEST_FIELD} is not the one it names")
    if body.get("format") != expected:
        raise _other_format(file.parent, body.get("format"), expected)
    return body


def _read_line(file: Path) -> bytes:
    """Read a file of one line of JSON, and stop if it cannot be one: a crash may leave a file with terabytes of zeros.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a line of text, or is larger than what this machine could decode.
    """
    num_bytes = regular_file(file).stat().st_size
    if num_bytes > (most := memory_bytes() // _DECODED_BYTES):
        raise ValueError(f"it has {num_bytes} bytes, and this machine could decode {most}")
    chunks: list[bytes] = []
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if b"\0" in chunk:
                raise ValueError("it holds bytes that are not text")
            chunks.append(chunk)
    return b"".join(chunks)


def checked(adapter: TypeAdapter[_T], body: dict[str, Any], file: Path, context: Mapping[str, Any] | None = None) -> _T:
    """Return what a sealed file holds, with its types.

    Args:
        context: facts about the run, for validators that compare values with them.

    Raises:
        TornCheckpointError: names the file and each wrong field.
    """
    try:
        return adapter.validate_python(body, context=context)
    except ValidationError as error:
        raise TornCheckpointError(f"{file} is damaged: {wrong_fields(error)}") from error


def digest_of(file: Path) -> str:
    """Hash a file's bytes with xxh3_128, which detects loss and mix-ups, but not tampering."""
    state, buffer = xxhash.xxh3_128(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            state.update(view[:count])
    return state.hexdigest()


def _digest(body: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body).encode())


def _other_format(folder: Path, found: Any, expected: int = FORMAT) -> CheckpointError:
    return CheckpointError(f"{folder} has format {found}, this version reads format {expected}: start a new run")


def _parse(folder: Path, body: dict[str, Any]) -> Index:
    contents = checked(_CONTENTS, body, folder / INDEX)
    return Index(folder, contents["facts"], contents["files"], contents["tensors"])


def _check_covered(index: Index) -> None:
    """Check that every value of every tensor lies in exactly one box, in a file of this folder."""
    for part, named in index.tensors.items():
        for name, saved in named.items():
            what = f"{part} of {name} in {index.folder / INDEX}"
            if any(box.file not in index.files or Path(box.file).name != box.file for box in saved.boxes):
                raise CheckpointError(f"{what} lies in a file that is not listed")
            if any(not len(box.start) == len(box.size) == len(saved.shape) for box in saved.boxes):
                raise CheckpointError(f"{what} has a box with the wrong number of dimensions")
            inside = all(a >= 0 and a + n <= m for box in saved.boxes for a, n, m in _sides(box, saved.shape))
            apart = not any(one.overlaps(other) for one, other in combinations(saved.boxes, 2))
            if not (inside and apart and sum(prod(box.size) for box in saved.boxes) == prod(saved.shape)):
                raise CheckpointError(f"{what} is not covered exactly once by its boxes")


def _sides(box: StoredBox, shape: tuple[int, ...]) -> Iterable[tuple[int, int, int]]:
    return zip(box.start, box.size, shape, strict=True)
