"""The learner: the policy on Megatron-Core, behind the protocol of `base.py`. Start at `megatron.MegatronLearner`."""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from bapo_megatron.errors import UserError

# Megatron-Core repeats these in every process, and the user can do nothing about them.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",  # the distributed optimizer's float32 shards are views
):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")

REMOVE_ENGINE = "pip uninstall transformer-engine transformer-engine-torch"
_NOT_USED = ("wandb", "tensorboard", "flash_attn.cute")


@contextmanager
def lean_import() -> Iterator[None]:
    """Let Megatron-Core be imported without modules that a run does not use and that take up to a second each.

    They are torch's compiler, which its decorators import even if disabled, wandb and tensorboard, which it wants for
    its own logs, and flash_attn.cute, which SGLang brings and no layer here calls.

    Raises:
        UserError: Megatron-Core fails because the installed Transformer Engine cannot be imported.
    """
    import torch

    compiler = torch.compile
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.compile = lambda function: function  # type: ignore[assignment]
    hidden = [name for name in _NOT_USED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # as if they were not installed
    try:
        yield
    except Exception as error:
        if problem := _broken_transformer_engine():
            raise UserError(problem) from error
        raise
    finally:
        torch.compile = compiler
        for name in hidden:
            del sys.modules[name]


def _broken_transformer_engine() -> str:
    """Say why Transformer Engine cannot be imported, and what to do; "" if it can be, or is not installed.

    Its own `__init__` hides that the part for torch does not load, so Megatron-Core takes it for a whole one.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # an import of compiled code can raise anything
        import torch

        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return (
            f"Transformer Engine does not load with torch {torch.__version__} ({type(error).__name__}: {reason}); "
            f"compile it again with scripts/install_gpu.sh compiled, or remove it: {REMOVE_ENGINE}"
        )
    return ""
