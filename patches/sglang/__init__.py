"""Corrections of SGLang: `apply_cpu_compat()` picks the file for the installed version."""

from importlib.metadata import version

SUPPORTED = "0.5.23"


def apply_cpu_compat() -> None:
    """Let SGLang be imported on a machine without CUDA; do nothing with CUDA, or when called again.

    Raises:
        RuntimeError: another version of SGLang is installed. What it imports is version-specific, so guessing would
            fail later and less clearly.
    """
    import torch

    if torch.cuda.is_available():
        return
    installed = version("sglang")
    if installed != SUPPORTED:
        raise RuntimeError(
            f"running without a GPU needs sglang {SUPPORTED}, found {installed}: "
            f"run scripts/install_sglang_cpu.sh, or add patches/sglang/ for {installed}"
        )
    from bapo_megatron_patches.sglang import v0_5_23

    v0_5_23.apply()
