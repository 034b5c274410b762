"""Corrections of megatron-core.

`apply_cpu_compat()` picks the file for the installed version. `apply_engine_compat()` finds a kernel that newer
versions of Transformer Engine renamed.
"""

import importlib
from importlib.metadata import version
from typing import Any

SUPPORTED = "0.16.1"


def apply_cpu_compat() -> None:
    """Let megatron-core run on a machine without CUDA; do nothing with CUDA, or when called again.

    Raises:
        RuntimeError: another version of megatron-core is installed. The list of corrected modules is version-specific,
            so guessing would fail later and less clearly.
    """
    import torch

    if torch.cuda.is_available():
        return
    installed = version("megatron-core")
    if installed != SUPPORTED:
        raise RuntimeError(
            f"running without a GPU needs megatron-core {SUPPORTED}, found {installed}: "
            f"pip install megatron-core=={SUPPORTED}, or add patches/megatron_core/ for {installed}"
        )
    from bapo_megatron_patches.megatron_core import v0_16_1

    v0_16_1.apply()


def apply_engine_compat() -> None:
    """Let attention split queries, keys and values with Transformer Engine's kernel; do nothing without it.

    Why: megatron-core 0.16.1 (extensions/transformer_engine.py:2290) looks for
    `transformer_engine.pytorch.attention._SplitAlongDim`. Newer versions, such as 2.11, call it `utils.SplitAlongDim`;
    megatron-core then falls back to torch.split, whose backward pass copies all three gradients into one tensor.

    When it can go: when megatron-core knows the new name.
    """
    attention: Any = importlib.import_module("megatron.core.transformer.attention")
    if attention.SplitAlongDim is not None:
        return
    try:
        from transformer_engine.pytorch.utils import SplitAlongDim
    except ImportError:
        return
    attention.SplitAlongDim = SplitAlongDim.apply
