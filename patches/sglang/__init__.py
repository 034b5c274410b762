"""Corrections of SGLang: for the installed version, `apply_cpu_compat()` or, with a GPU, `apply_gpu_compat()`."""

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
    _check_version("running without a GPU")
    from bapo_megatron_patches.sglang import v0_5_23

    v0_5_23.apply()


def apply_gpu_compat(*, has_kernels: bool) -> None:
    """Let SGLang serve dense models on a GPU with another torch than its own.

    Args:
        has_kernels: whether its compiled kernels work; if not, its computations in torch and Triton replace them.

    Raises:
        RuntimeError: see `apply_cpu_compat`.
    """
    _check_version("serving without SGLang's compiled kernels, or with another torch than its own,")
    from bapo_megatron_patches.sglang import v0_5_23

    v0_5_23.apply_on_gpu(has_kernels=has_kernels)


def _check_version(what: str) -> None:
    installed = version("sglang")
    if installed != SUPPORTED:
        raise RuntimeError(
            f"{what} needs sglang {SUPPORTED}, found {installed}: "
            f"run scripts/install_sglang_cpu.sh, or add patches/sglang/ for {installed}"
        )
