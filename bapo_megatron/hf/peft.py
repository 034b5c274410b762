"""PEFT folders: adapters as `peft` saves and loads them.

adapter_config.json             rank, alpha, targets, and options that change the computation
adapter_model.safetensors       A and B of every layer, under PEFT's names
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.adapters import PEFT_PREFIX, Adapters
from bapo_megatron.hf.peft_config import CONFIG
from bapo_megatron.hf.reader import EVERYTHING, FLOATS, check_finite, in_words, misfits
from bapo_megatron.hf.shape import ModelShape, entries, tensors_of
from bapo_megatron.hf.writer import save_tensors, write_durably

WEIGHTS = "adapter_model.safetensors"


class PeftReader:
    """Reads slices of adapters from a PEFT folder, by the names of `hf.shape.entries`. A context manager.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / WEIGHTS
        try:
            self._handle: safe_open | None = safe_open(self._file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self._file}: {error}") from error

    def __enter__(self) -> PeftReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle = None  # closes the file: safetensors has no close()

    def check(self, shape: ModelShape) -> None:
        """Check names and shapes against a model with adapters. Raises CheckpointError, which lists the differences."""
        assert self._handle is not None
        wanted = {PEFT_PREFIX + name: size for name, size in adapter_tensors(shape).items()}
        slices = {name: self._handle.get_slice(name) for name in self._handle.keys()}  # noqa: SIM118
        held = {name: tuple(one.get_shape()) for name, one in slices.items()}
        complaints = misfits(wanted, held, "the model needs")
        complaints["of a type that is not supported"] = [
            f"{name} is {one.get_dtype()}" for name, one in slices.items() if one.get_dtype() not in FLOATS
        ]
        if found := in_words(complaints):
            raise CheckpointError(f"adapters in {self._file} do not fit the model; {found}")

    def __call__(self, name: str, index: tuple[slice, ...] = EVERYTHING) -> Tensor:
        """Read one tensor, or a slice of it. Raises CheckpointError if it holds nan or infinity, or is torn."""
        assert self._handle is not None
        try:
            tensor = self._handle.get_slice(PEFT_PREFIX + name)[index]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} of {self._file}: {error}") from error
        check_finite(tensor, f"{name} in {self._file}")
        return tensor


def adapter_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of all adapters, in the order of the layers."""
    return tensors_of(entry for entry in entries(shape) if not entry.stored)


def write_peft(folder: Path, named: Iterable[tuple[str, Tensor]], adapters: Adapters, base: str) -> None:
    """Write a PEFT folder.

    Args:
        folder: an existing folder.
        named: A and B by the names of `adapter_tensors`.
        base: the folder, or name on the hub, of the model that has the adapters.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """

    def renamed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            yield PEFT_PREFIX + name, tensor.detach().cpu().contiguous()

    save_tensors(dict(renamed()), folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.targets),
        "bias": "none",
        "inference_mode": True,
    }
    write_durably(folder / CONFIG, json.dumps(config, indent=2) + "\n")
