"""A stand-in for a learner that saves and loads real shards, for tests of checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.checkpoint.folder import WEIGHT, read_index
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.runtime.ranks import rank_and_size


class TinyModel:
    """One tensor, whose rows are split evenly over ranks; all values are equal. Implements `Saveable`."""

    def __init__(self, value: float, rows: int = 100, columns: int = 10, hf_path: Path | None = None) -> None:
        self.rank, size = rank_and_size()
        self.shape = (rows * size, columns)
        self.weight = torch.full((rows, columns), float(value))
        self.hf_path = hf_path

    def snapshot(self) -> Snapshot:
        start = (self.rank * self.weight.shape[0], 0)
        piece = Piece(WEIGHT, "w", self.shape, start, tuple(self.weight.shape), self.weight)
        return Snapshot(
            [piece], {"version": 0, "skipped_updates": 0, "model": {}}, rank=self.rank, hf_path=self.hf_path
        )

    def load(self, folder: Path) -> None:
        """Read the whole tensor, on every rank."""
        with ShardReader(read_index(folder), WEIGHT) as read:
            whole: Tensor = read("w")
        assert whole.shape == self.shape
        assert whole.unique().numel() == 1, "values of different steps"
        self.weight.fill_(float(whole[0, 0]))

    @property
    def value(self) -> float:
        return float(self.weight[0, 0])


def settings(**change: object) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"keep_last": 1} | change)


def save_whole(store: CheckpointStore, step: int, value: float, rows: int = 100, state: Any = None) -> Path:
    """Save, and return once the checkpoint is there, even if it is written in the background."""
    path = store.save(step, {"learner": TinyModel(value, rows)}, state)
    store.close()
    return path
