"""For all tests."""

import os

import torch

# Read when Triton is imported, which Megatron does where it is installed: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
