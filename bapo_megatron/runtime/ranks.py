"""This process's place in the trainer: its rank, exchanging small values, and stopping all ranks together.

Flags and JSON values travel as CPU tensors over the default process group. Does not import Megatron.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of trainer ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in rank order, on every rank. Collective over all ranks."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor(text.numel()))
    longest = max(int(length) for length in lengths)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, torch.cat([text, text.new_zeros(longest - text.numel())]))
    return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]


def share_flag(value: bool | None) -> bool:
    """Return rank 0's flag on every rank; `value` is None on the others. Collective over all ranks."""
    rank, size = rank_and_size()
    assert (value is None) == (rank != 0), "rank 0 alone decides"
    if size == 1:
        return bool(value)
    flag = torch.tensor(bool(value), dtype=torch.uint8)
    dist.broadcast(flag, src=0)
    return bool(flag)


class StopFile:
    """A file whose existence asks the run to stop; a path of None never does. All ranks make the same calls."""

    def __init__(self, path: Path | None = None) -> None:
        self.has_ended_early = False
        self._path = path
        self._was_asked = False

    def steps(self, steps: range) -> Iterator[int]:
        """Yield the steps up to the one after which `is_asked` is true; none if it is true before the first."""
        if self.is_asked():
            self.has_ended_early = len(steps) > 0
            return
        for step in steps:
            yield step
            if self._was_asked and step != steps[-1]:
                self.has_ended_early = True
                return

    def is_asked(self) -> bool:
        """Return whether the step that ends now is the last one. Collective if there is a path: rank 0 looks for it."""
        if self._path is not None:
            self._was_asked = share_flag(self._path.exists() if rank_and_size()[0] == 0 else None)
        return self._was_asked
