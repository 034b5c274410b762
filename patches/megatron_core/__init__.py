"""Corrections of megatron-core: `apply_cpu_compat()` picks the file that fits the installed version."""

from importlib.metadata import version

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
