"""The NCCL that torch has loaded, and whether several processes may use one GPU in its groups.

By default NCCL refuses a group with two ranks on one GPU. From 2.30.7 on, its own variable allows that, slowly, because
the ranks' kernels take turns. Every layout can then be tested on one GPU. Only tests need this, so there is no setting.
"""

import ctypes
import os
from pathlib import Path

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARES_SINCE = (2, 30, 7)
# NCCL's words for two ranks on one GPU: of versions that always refuse, and of those that know the variable.
_REFUSALS = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")


def loaded_version() -> tuple[int, int, int] | None:
    """Ask the NCCL that torch calls for its version; None if torch has none.

    `torch.cuda.nccl.version()` is a constant of torch's build, also if LD_PRELOAD replaces the library.
    """
    import torch

    of_torch = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    for library in (None, str(of_torch)):  # as the linker searches: what is preloaded, then what torch depends on
        try:
            get_version = ctypes.CDLL(library).ncclGetVersion
        except (OSError, AttributeError):
            continue
        code = ctypes.c_int()  # 23007 is 2.30.7
        if get_version(ctypes.byref(code)) == 0:
            return code.value // 10_000, code.value // 100 % 100, code.value % 100
    return None


def may_share_gpus() -> bool:
    """Return whether the user lets ranks and servers share GPUs."""
    return os.environ.get(SHARING_VARIABLE) == "1"


def sharing_problem() -> str:
    """Say what is missing for two ranks on one GPU; empty if nothing is."""
    found = loaded_version()
    if found is not None and found >= SHARES_SINCE and may_share_gpus():
        return ""
    name = "no NCCL is loaded" if found is None else f"NCCL {_shown(found)} is loaded"
    return f"{name}, {SHARING_VARIABLE} is {os.environ.get(SHARING_VARIABLE) or 'unset'}"


def sharing_remedy() -> str:
    """Say how two ranks may use one GPU."""
    return (
        f"set {SHARING_VARIABLE}=1 for all processes, and load NCCL {_shown(SHARES_SINCE)} or newer "
        "(LD_PRELOAD=.../nvidia/nccl/lib/libnccl.so.2)"
    )


def refuses_sharing(error: str) -> bool:
    """Return whether an error of NCCL says that two ranks of a group use one GPU."""
    return any(words in error for words in _REFUSALS)


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
