"""What FP8 depends on, of this rank's GPU and the installed packages. Does not import Megatron."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from bapo_megatron.config.precision import Machine, Version


def this_machine() -> Machine:
    """The facts, of the current CUDA device where there is one."""
    if not torch.cuda.is_available():
        return Machine(transformer_engine=_transformer_engine())
    return Machine(torch.cuda.get_device_capability(), _version(torch.version.cuda or ""), _transformer_engine())


def _transformer_engine() -> Version | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return _version(importlib.metadata.version("transformer_engine"))


def _version(text: str) -> Version:
    """The leading numbers: "2.11.0+abc" is (2, 11, 0)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
