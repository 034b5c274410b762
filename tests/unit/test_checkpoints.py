"""Checkpoints of a whole run: which are kept, which is the latest, and what a kill or a full disk leaves behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
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


NUM_FILES = 20


class Counting:
    """A learner whose weights are the number of the step, in many files."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def save(self, folder: Path) -> None:
        for i in range(NUM_FILES):
            (folder / str(i)).write_text(str(self.step))

    def load(self, folder: Path) -> None:
        steps = {(folder / str(i)).read_text() for i in range(NUM_FILES)}
        assert len(steps) == 1, f"files of different steps: {steps}"
        self.step = int(steps.pop())


def resume(folder: Path) -> Counting:
    learner = Counting()
    store = CheckpointStore(folder, keep_last=1)
    if (latest := store.latest()) is not None:
        state = store.load(latest, learner)  # type: ignore[arg-type]
        assert state["step"] == state["also"] == learner.step
    return learner


def save_for_ever(folder: Path, saved: Connection) -> None:
    learner = resume(folder)
    store = CheckpointStore(folder, keep_last=1)
    while True:
        learner.step += 1
        store.save(learner.step, learner, {"also": learner.step})  # type: ignore[arg-type]
        saved.send(learner.step)


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Whoever is killed while saving goes on after the last save that returned, or the one that was under way."""
    rng = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bapo_megatron.checkpoints"])
    last = num_torn = 0
    for _ in range(15):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(tmp_path, writer), daemon=True)
        process.start()
        writer.close()
        assert reader.poll(60), "no checkpoint was saved in 60 s"
        time.sleep(rng.uniform(0.0, 0.02))
        process.kill()
        process.join()
        try:
            while True:
                last = reader.recv()
        except EOFError:
            pass
        num_torn += any(tmp_path.glob(".writing-*"))
        assert resume(tmp_path).step in (last, last + 1)
    assert num_torn > 0, "no kill came in the middle of a save"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-000007" / "learner").mkdir(parents=True)
    CheckpointStore(tmp_path, keep_last=1).save(8, Counting(8), None)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000008"]


def test_a_rewound_run_keeps_the_checkpoint_it_has_just_saved(tmp_path: Path) -> None:
    class Weightless:
        def save(self, folder: Path) -> None:
            pass

    for step in (10, 20, 30):
        CheckpointStore(tmp_path, keep_last=2).save(step, Weightless(), None)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000020", "step-000030"]
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / "latest").write_text("step-000020")
    store.save(25, Weightless(), None)  # type: ignore[arg-type]
    assert store.latest() == tmp_path / "step-000025"
    assert (tmp_path / "step-000030").is_dir()


@pytest.mark.parametrize(
    ("after_bytes", "what"),
    [(0, "model-00000"), (20_000, "model-00000"), (60_000, "File too large"), (3, "")],
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
