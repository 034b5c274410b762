"""Corrections of megatron-core.

`apply_cpu_compat()` lets it run without CUDA. `apply_engine_compat()` finds a kernel that newer versions of Transformer
Engine renamed.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

<<<<<<< HEAD
TRIED = {"0.16.1": "Python 3.11", "0.19.2": "Python 3.12 and newer"}
"""Each version that the tests have run with, and the Python that gets it (requirements/cpu.txt)."""

ADVISED = "0.16.1" if sys.version_info < (3, 12) else "0.19.2"
=======
SUPPORTED = "0.16.1"
>>>>>>> te


def apply_cpu_compat() -> None:
    """Let megatron-core run on a machine without CUDA; do nothing with CUDA, or when called again.

    Raises:
        RuntimeError: the installed version of megatron-core was not tried. What `cpu` corrects depends on the version,
            so guessing would fail later and less clearly.
    """
    import torch

    if torch.cuda.is_available():
        return
    installed = version("megatron-core")
    if installed not in TRIED:
        raise RuntimeError(
            f"running without a GPU needs megatron-core {' or '.join(TRIED)}, found {installed}: "
            f"pip install megatron-core=={ADVISED}"
        )
    from bapo_megatron_patches.megatron_core import cpu

    cpu.apply()


def apply_engine_compat() -> None:
    """Let attention split queries, keys and values with Transformer Engine's kernel; do nothing without it.

    Why: megatron-core (extensions/transformer_engine.py, 0.16.1:2290, 0.19.2:3319) looks for
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
