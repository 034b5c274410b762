"""PEFT folders: adapters as `peft` saves and loads them.

adapter_config.json             rank, alpha, targets, and options that change the computation
adapter_model.safetensors       A and B of every layer, under PEFT's names
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.adapters import PEFT_PREFIX, TARGETS, Adapters
from bapo_megatron.hf.reader import check_finite, list_some
from bapo_megatron.hf.shape import ModelShape, entries, tensors_of
from bapo_megatron.hf.writer import save_tensors, write_durably

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: dict[str, tuple[Any, ...]] = {  # the values of options with which an adapter is alpha / rank * B A
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the model's own weights
}


def read_adapters(folder: Path) -> Adapters:
    """Read rank, alpha and targets of a PEFT folder.

    Raises:
        CheckpointError: the folder lacks LoRA's adapters, or has an option that changes the computation.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}; is {folder} a PEFT folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"{file}: peft_type is {kind!r}, and only LORA is supported")
    for name, plain in _PLAIN.items():
        if (value := config.get(name, plain[0])) not in plain:
            raise CheckpointError(f"{file}: {name}={json.dumps(value)} is not supported, only {json.dumps(plain[0])}")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        raise CheckpointError(f"{file}: r={json.dumps(rank)} and lora_alpha={json.dumps(alpha)} must be above 0")
    if targets == "all-linear":
        targets = list(TARGETS)
    if not isinstance(targets, list) or not targets or not set(targets) <= set(TARGETS):
        problem = f"{file}: target_modules={json.dumps(targets)} is not supported"
        raise CheckpointError(f"{problem}; it must be a list with some of {', '.join(TARGETS)}")
    return Adapters(rank, float(alpha), tuple(name for name in TARGETS if name in targets))


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
        """Compare names and shapes with a model's with adapters. Raises CheckpointError, which lists them."""
        assert self._handle is not None
        wanted = {PEFT_PREFIX + name: size for name, size in adapter_tensors(shape).items()}
        held = {name: tuple(self._handle.get_slice(name).get_shape()) for name in self._handle.keys()}  # noqa: SIM118
        complaints = {
            "missing": [name for name in wanted if name not in held],
            "unexpected": [name for name in held if name not in wanted],
            "of another shape": [
                f"{name} is {list(held[name])}, the model needs {list(size)}"
                for name, size in wanted.items()
                if held.get(name, size) != size
            ],
        }
        if found := [f"{len(names)} {what}: {list_some(names)}" for what, names in complaints.items() if names]:
            raise CheckpointError(f"adapters in {self._file} do not fit the model; " + "; ".join(found))

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor:
        assert self._handle is not None
        tensor = self._handle.get_slice(PEFT_PREFIX + name)[index]
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
