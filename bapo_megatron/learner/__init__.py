"""The learner: the policy on Megatron-Core, behind the protocol of `base.py`."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Megatron-Core repeats these in every process, and the user can do nothing about them.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",  # the distributed optimizer's float32 shards are views
):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


@contextmanager
def lean_import() -> Iterator[None]:
    """Let Megatron-Core be imported without two modules that a run does not use and that take a second each.

    They are wandb, which it wants for its own logs, and torch's compiler, which its decorators import even if disabled.
    """
    import torch

    compiler = torch.compile
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.compile = lambda function: function  # type: ignore[assignment]
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # as if it were not installed
    try:
        yield
    finally:
        torch.compile = compiler
        if sys.modules["wandb"] is None:
            del sys.modules["wandb"]
