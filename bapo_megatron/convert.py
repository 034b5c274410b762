"""`bapo convert`: check checkpoints and convert them between Hugging Face and training format, tensor by tensor.

    <hf folder> or <run>, <run>/checkpoints/step-N, its learner/      ->  Hugging Face folder
    a run, or a checkpoint, that trains adapters (LoRA)               ->  Hugging Face folder, merged, or PEFT folder
    <hf folder>                                                       ->  learner checkpoint at version 0

No process group and no Megatron: the learner's checkpoints do not depend on the layout.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from bapo_megatron.assets import SHIPPED_MODELS, hub, resolve_model_path
from bapo_megatron.checkpoint.folder import HF_CONFIG, INDEX, WEIGHT, Index, read_index
from bapo_megatron.checkpoint.saving import remove
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import CheckpointError, closest, did_you_mean, plural
from bapo_megatron.hf.adapters import Adapters
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.peft import adapter_tensors, write_peft
from bapo_megatron.hf.reader import HFReader, check_finite, digest_of
from bapo_megatron.hf.shape import ModelShape, base_tensors, entries, hf_tensors
from bapo_megatron.hf.stacks import stacked
from bapo_megatron.hf.writer import MAX_FILE_BYTES, atomic_folder, copy_companions, write_safetensors
from bapo_megatron.runtime.files import similar_paths

Target = Literal["hf", "training", "peft"]
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Conversion:
    """Facts about a checkpoint that was read completely and is valid."""

    shape: ModelShape
    version: int | None  # optimizer updates of a training checkpoint; None for a Hugging Face folder
    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]  # the source's, the most common first

    def __str__(self) -> str:
        after = "" if self.version is None else f", after {plural(self.version, 'update')}"
        return (
            f"{self.shape.family}, {plural(self.shape.num_layers, 'layer')}, {self.num_parameters:,} parameters in "
            f"{self.num_tensors} tensors, {' and '.join(self.dtypes)}{after}: names, shapes and values are in order"
        )


def convert(
    source: Path,
    target: Path | None = None,
    *,
    to: Target = "hf",
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    own: Family | None = None,
    base: Path | None = None,
) -> Conversion:
    """Read and check a whole checkpoint; write it to `target`, if given, in one atomic move.

    Args:
        source: Hugging Face folder, run directory (its latest checkpoint), checkpoint, or a checkpoint's learner/.
        target: new or empty folder.
        to: "hf"; "peft" for the adapters alone; or "training" for a learner checkpoint at version 0, whose Adam moments
            are zero.
        dtype: a key of DTYPES; None leaves the weights as they are.
        max_file_bytes: the most bytes of tensors in one weight file; conversion takes as much memory.
        own: see `model_shape`.
        base: the Hugging Face folder with the weights that a source with adapters does not train; None means where the
            run had it.

    Raises:
        CheckpointError: the source is torn, unsupported, or exceeds the range of `dtype`; or the target exists or is
            not writable. The target is then unchanged.
    """
    source_folder, index = _find(source)
    companions = source_folder if index is None else source_folder / HF_CONFIG  # config.json and tokenizer
    shape = ModelFacts.of(companions, own).shape
    if index is not None:
        if (adapters := index.facts["model"].get("adapters")) is not None:
            shape = shape.with_adapters(Adapters(adapters["rank"], adapters["alpha"], tuple(adapters["targets"])))
        index.check_model(shape)
        index.verify()
        if target is not None and to == "training":
            raise CheckpointError(f"{source} is a training checkpoint already: copy it, or convert it with --to hf")
    if to == "peft" and (shape.adapters is None or index is None):
        raise CheckpointError(f"{source} has no adapters (LoRA), so there is nothing to write as a PEFT folder")
    if to == "training" and (lacking := [entry.megatron_name for entry in entries(shape) if not entry.stored]):
        raise CheckpointError(
            f"{source} has no {lacking[0]}, which only a run can make: start the run from this folder instead"
        )
    counts: Counter[str] = Counter()
    num_parameters = 0
    with (
        _opened(source_folder, index, shape, base) as read,
        atomic_folder(target) if target else nullcontext() as folder,
    ):

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_parameters
            for name in adapter_tensors(shape) if to == "peft" else hf_tensors(shape):
                tensor = read(name)
                counts[str(tensor.dtype).removeprefix("torch.")] += 1
                num_parameters += tensor.numel()
                if dtype is not None:
                    tensor = tensor.to(EXPORT_DTYPES[dtype])
                    check_finite(tensor, f"{name} of {source_folder}, once converted to {dtype},")
                yield name, tensor

        if folder is None:
            for _ in tensors():
                pass
        elif to == "hf":
            copy_companions(companions, folder, write_safetensors(stacked(tensors(), shape), folder, max_file_bytes))
        elif to == "peft":
            assert shape.adapters is not None
            assert index is not None
            write_peft(folder, tensors(), shape.adapters, str(_base_folder(index, base)))
        else:
            # version 0 without moments, as a run's only rank would write it
            pieces = (Piece.whole(WEIGHT, name, tensor) for name, tensor in tensors())
            facts = {"version": 0, "skipped_updates": 0, "model": shape.to_json()}
            snapshot = Snapshot(pieces, facts, hf_path=companions)
            snapshot.complete(folder, [snapshot.write(folder, max_file_bytes)])
    version = index.facts["version"] if index else None
    return Conversion(shape, version, counts.total(), num_parameters, tuple(name for name, _ in counts.most_common()))


@contextmanager
def _opened(
    folder: Path, index: Index | None, shape: ModelShape, base: Path | None
) -> Iterator[Callable[[str], Tensor]]:
    """Yield a reader of whole tensors by name, which merges adapters into the weights that have them.

    Raises:
        CheckpointError: names or shapes do not fit the model; or weights that are not trained are missing, or others.
    """
    with ExitStack() as stack:
        if index is None:
            (weights := stack.enter_context(HFReader(folder))).check(shape)
            yield weights
            return
        (shards := stack.enter_context(ShardReader(index, WEIGHT))).check(shape)
        if (held := index.facts.get("base")) is None:
            yield shards
            return
        (weights := stack.enter_context(HFReader(_base_folder(index, base)))).check(shape)
        if f"{digest_of(weights, base_tensors(shape)):032x}" != held["digest"]:
            raise CheckpointError(
                f"{folder} holds adapters of other weights than those in {weights.path}: name the folder with the same "
                "weights with bapo convert --base"
            )
        kept = index.tensors[WEIGHT]

        def read(name: str) -> Tensor:
            if name in kept:
                return shards(name)
            a, b = (f"{name.removesuffix('.weight')}.lora_{one}.weight" for one in "AB")
            weight = weights(name).float()
            return weight + shape.adapters.scale * shards(b) @ shards(a) if a in kept and shape.adapters else weight

        yield read


def _base_folder(index: Index, base: Path | None) -> Path:
    """Return the folder of the weights that are not trained. Raises CheckpointError if it is not there."""
    folder = base or Path(index.facts["base"]["path"])
    if not folder.is_dir():
        raise CheckpointError(
            f"{index.folder} holds adapters of the model in {folder}, which is not there: name its folder with "
            "bapo convert --base"
        )
    return folder


@contextmanager
def hf_folder(
    source: str | Path, scratch: Path | None = None, own: Family | None = None
) -> Iterator[tuple[Path, int | None]]:
    """Yield a checkpoint as a Hugging Face folder, and its weight version if it is a training checkpoint.

    Args:
        source: as `convert` takes it, the name of a shipped model, or a name on the Hugging Face hub. A run stands for
            its latest checkpoint, or for a Hugging Face folder inside it that is newer.
        scratch: new folder for a converted copy, which is deleted afterwards; None means a temporary one.
        own: see `model_shape`.

    Raises:
        CheckpointError: see `convert` and `resolve_model_path`.
    """
    source = _newest_export(Path(source)) or source
    if is_hf(source):
        yield resolve_model_path(str(source), setting="the checkpoint"), None
        return
    with ExitStack() as stack:
        if scratch is None:
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="bapo-model-"))) / "model"
        stack.callback(remove, scratch)
        version = convert(Path(source), scratch, own=own).version
        yield resolve_model_path(str(scratch), setting="the converted checkpoint"), version


def _newest_export(run: Path) -> Path | None:
    """Return the newest Hugging Face folder inside a run if no checkpoint is newer."""
    if not (run / "checkpoints").is_dir():
        return None
    written = {folder: (folder / "config.json").stat().st_mtime for folder in run.iterdir() if is_hf(folder)}
    newest = max(written, key=lambda folder: written[folder], default=None)
    latest = CheckpointStore(run / "checkpoints", CheckpointConfig()).latest()
    return newest if newest and (latest is None or latest.stat().st_mtime <= written[newest]) else None


def is_hf(source: str | Path) -> bool:
    """Return whether `source` has, or names, weights in Hugging Face format."""
    if str(source) in SHIPPED_MODELS or (Path(source) / "config.json").is_file():
        return True
    return not Path(source).exists() and hub.is_hub_name(str(source))


def _find(source: Path) -> tuple[Path, Index | None]:
    """Return the folder of the weights, and the index of a training checkpoint."""
    if (source / "checkpoints").is_dir():
        latest = CheckpointStore(source / "checkpoints", CheckpointConfig()).latest()
        if latest is None:
            raise CheckpointError(f"{source} is a run without a checkpoint yet")
        source = latest
    for folder in (source / "learner", source):
        if (folder / INDEX).is_file() or (folder / HF_CONFIG).is_dir() or (folder / "state.json").is_file():
            return folder, read_index(folder)
    if not source.exists():
        meant = did_you_mean(*closest(str(source), SHIPPED_MODELS) or similar_paths(source))
        raise CheckpointError(f"there is nothing at {source}; {meant or 'give a model, a run or a checkpoint'}")
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} is neither a Hugging Face folder (no config.json) nor a run or training checkpoint"
        )
    return source, None
