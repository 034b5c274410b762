"""Checkpoints of a whole run: which are kept, which is the latest, and that kill -9 leaves a whole one."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bapo_megatron.checkpoints import CheckpointStore

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
