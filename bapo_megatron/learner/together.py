"""What ranks tell each other about checkpoints: small JSON values, over CPU tensors. Imports no Megatron."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """This process among the trainer's; (0, 1) where it is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all ranks, in their order, on every rank. Collective over all ranks."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor(text.numel()))
    longest = max(int(length) for length in lengths)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, torch.cat([text, text.new_zeros(longest - text.numel())]))
    return [_decode(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]


def _decode(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def first_complaint(complaint: str | None) -> str | None:
    """The complaint of the lowest rank that has one, on every rank. Collective over all ranks."""
    found = [(rank, text) for rank, text in enumerate(gather_json(complaint)) if text is not None]
    if not found:
        return None
    rank, text = found[0]
    return text if rank_and_size()[1] == 1 else f"trainer rank {rank}: {text}"
