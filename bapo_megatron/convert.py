"""`bapo convert`: between Hugging Face folders and training checkpoints, offline, tensor by tensor; and validation.

    <hf folder> or <run>, <run>/checkpoints/step-N, its learner/      ->  Hugging Face folder
    <hf folder>                                                       ->  learner checkpoint at version 0

No process group and no Megatron: the learner's checkpoints do not depend on the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bapo_megatron.checkpoints import CheckpointStore
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.reader import HFReader, check_finite
from bapo_megatron.hf.shape import ModelShape, hf_tensors, load_hf_config, model_shape
from bapo_megatron.hf.writer import MAX_FILE_BYTES, atomic_folder, copy_companions, write_safetensors
from bapo_megatron.learner.folder import STATE, WEIGHTS, read_state, write_state

Target = Literal["hf", "training"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Summary:
    """What was read and found whole."""

    shape: ModelShape
    version: int | None  # optimizer updates of a training checkpoint; None for a Hugging Face folder
    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]  # of the source, the most common first

    def __str__(self) -> str:
        after = "" if self.version is None else f", after {self.version} updates"
        return (
            f"{self.shape.family}, {self.shape.num_layers} layers, {self.num_parameters:,} parameters in "
            f"{self.num_tensors} tensors, {' and '.join(self.dtypes)}{after}: names, shapes and values are in order"
        )


def convert(
    source: Path,
    target: Path | None = None,
    *,
    to: Target = "hf",
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Summary:
    """Read and check a whole checkpoint; write it to `target`, where one is given, in one atomic move.

    Args:
        source: Hugging Face folder, run directory (its latest checkpoint), checkpoint, or a checkpoint's learner/.
        target: does not exist, or is empty.
        to: "hf", or "training" for a learner checkpoint at version 0, whose Adam moments are zero.
        dtype: a key of DTYPES; None leaves the weights as they are.
        max_file_bytes: of tensors in one file of weights, which is also the memory that conversion takes.

    Raises:
        CheckpointError: the source is torn, of an unsupported model, or does not fit `dtype`; the target exists or
            cannot be written. The target is then as it was.
    """
    weights, learner_folder = _find_weights(source)
    shape = model_shape(load_hf_config(weights), weights)
    version = read_state(learner_folder, shape)["version"] if learner_folder else None
    if target is not None and to == "training" and learner_folder:
        raise CheckpointError(f"{source} is a training checkpoint already: copy it, or convert it with --to hf")
    counts: Counter[str] = Counter()
    num_parameters = 0
    with HFReader(weights) as read, atomic_folder(target) if target else nullcontext() as folder:
        read.check(shape)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_parameters
            for name in hf_tensors(shape):
                tensor = read(name)
                counts[str(tensor.dtype).removeprefix("torch.")] += 1
                num_parameters += tensor.numel()
                yield name, _cast(tensor, dtype, f"{name} of {weights}")

        if folder is None:
            for _ in tensors():
                pass
        else:
            _write(tensors(), weights, folder, shape, to, max_file_bytes)
    return Summary(shape, version, counts.total(), num_parameters, tuple(name for name, _ in counts.most_common()))


def _find_weights(source: Path) -> tuple[Path, Path | None]:
    """The Hugging Face folder within `source`, and the learner checkpoint that it belongs to, if any."""
    if (source / "checkpoints").is_dir():
        latest = CheckpointStore(source / "checkpoints", keep_last=1).latest()
        if latest is None:
            raise CheckpointError(f"{source} is a run without a checkpoint yet")
        source = latest
    for learner_folder in (source / "learner", source):
        if (learner_folder / STATE).is_file() and (learner_folder / WEIGHTS).is_dir():
            return learner_folder / WEIGHTS, learner_folder
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} is neither a Hugging Face folder (no config.json) nor a run or training checkpoint"
        )
    return source, None


def _cast(tensor: Tensor, dtype: str | None, what: str) -> Tensor:
    if dtype is None:
        return tensor
    cast = tensor.to(DTYPES[dtype])
    check_finite(cast, f"{what}, once converted to {dtype},")
    return cast


def _write(
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    folder: Path,
    shape: ModelShape,
    to: Target,
    max_file_bytes: int,
) -> None:
    target = folder / WEIGHTS if to == "training" else folder
    target.mkdir(exist_ok=True)
    copy_companions(source, target, write_safetensors(tensors, target, max_file_bytes))
    if to == "training":
        write_state(folder, shape, version=0, skipped_updates=0)
