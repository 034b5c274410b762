"""The learner: the policy on Megatron-Core, behind the protocol of `base.py`."""

import warnings

# Megatron-Core repeats these in every process, and the user can do nothing about them.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",  # the distributed optimizer's float32 shards are views
):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
