"""Corrections of megatron-core.

`apply_cpu_compat()` lets it run without CUDA. `apply_engine_compat()` finds kernels of Transformer Engine.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

TRIED = {"0.16.1": "Python 3.11", "0.19.2": "Python 3.12 and newer"}
"""Each version that the tests have run with, and the Python that gets it (requirements/cpu.txt)."""

ADVISED = "0.16.1" if sys.version_info < (3, 12) else "0.19.2"


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
    """Let megatron-core use kernels that it does not find in Transformer Engine 2.11; do nothing without it.

    Why: it splits queries, keys and values by `attention._SplitAlongDim` (extensions/transformer_engine.py,
    0.16.1:2290, 0.19.2:3319), which is now `utils.SplitAlongDim`, and otherwise by torch.split, whose backward pass
    copies all three gradients into one tensor. 0.19.2 also asks for `multi_tensor_scale_tensor`
    (optimizer/clip_grads.py:15), which 2.11 lacks, and otherwise takes the norm of each gradient by itself.

    When it can go: when megatron-core and Transformer Engine know the same names.
    """
    try:
        from transformer_engine.pytorch import optimizers
        from transformer_engine.pytorch.utils import SplitAlongDim
    except ImportError:
        return
    attention: Any = importlib.import_module("megatron.core.transformer.attention")
    if attention.SplitAlongDim is None:
        attention.SplitAlongDim = SplitAlongDim.apply
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clipping.l2_norm_impl is importlib.import_module("megatron.core.utils").local_multi_tensor_l2_norm:
        clipping.multi_tensor_applier = optimizers.multi_tensor_applier
        clipping.l2_norm_impl = optimizers.multi_tensor_l2norm
        clipping.multi_tensor_scale_impl = optimizers.multi_tensor_scale
