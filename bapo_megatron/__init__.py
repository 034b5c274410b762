"""BAPO on Megatron-Core: off-policy reinforcement learning of language models with adaptive clipping."""

__version__ = "0.1.0"
