"""A disk that is full during a save: a clear error, and the previous checkpoint stays the latest."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bapo_megatron.checkpoints import CheckpointStore
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.writer import write_safetensors


class TinyLearner:
    """Saves one tensor of 40 kB, as the real one saves its weights."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((10_000,), value)

    def save(self, folder: Path) -> None:
        write_safetensors({"weight": self.weight}.items(), folder)

    def load(self, folder: Path) -> None:
        self.weight = load_file(folder / "model.safetensors")["weight"]


@contextlib.contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """No file grows beyond this size, as on a disk that is full by then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("after_bytes", "what"),
    [(0, "model-00000.partial"), (20_000, "model-00000.partial"), (60_000, "File too large"), (3, "")],
    ids=["at once", "in the weights", "in the state of the rollouts", "after three bytes"],
)
def test_a_full_disk_is_a_clear_error_and_the_previous_checkpoint_stays_the_latest(
    tmp_path: Path, after_bytes: int, what: str
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    state: dict[str, Any] = {"rollout": "x" * 100_000}
    first = store.save(1, TinyLearner(1.0), state)  # type: ignore[arg-type]
    with full_disk(after_bytes), pytest.raises(CheckpointError, match=r"cannot save .*step-000002") as raised:
        store.save(2, TinyLearner(2.0), state)  # type: ignore[arg-type]
    assert what in str(raised.value)
    assert "the previous checkpoint is still the latest" in str(raised.value)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", "latest"}, "nothing half-written takes up room"

    learner = TinyLearner(0.0)
    assert store.latest() == first
    assert store.load(first, learner)["rollout"] == state["rollout"]  # type: ignore[arg-type]
    assert torch.equal(learner.weight, torch.ones(10_000))
    assert store.save(2, TinyLearner(2.0), state) == store.latest(), "once there is room again"  # type: ignore[arg-type]


def test_a_pointer_that_cannot_be_written_leaves_the_previous_checkpoint_the_latest(tmp_path: Path) -> None:
    """The new folder is complete by then."""
    store = CheckpointStore(tmp_path, keep_last=1)
    first = store.save(1, TinyLearner(1.0), None)  # type: ignore[arg-type]
    (tmp_path / ".latest.new").mkdir()
    with pytest.raises(CheckpointError, match="the previous checkpoint is still the latest"):
        store.save(2, TinyLearner(2.0), None)  # type: ignore[arg-type]
    assert store.latest() == first
    assert store.load(first, TinyLearner(0.0))["step"] == 1  # type: ignore[arg-type]
