"""A full disk: one clear error, and the previous checkpoint stays the latest."""

import contextlib
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bapo_megatron import trainer
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config import load
from bapo_megatron.config.load import load_config
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl
from tests.distributed import HANG_S, run_distributed
from tests.unit.saveable import TinyModel, save_whole, settings


@contextlib.contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this size, as on a disk that is then full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("after_bytes", "what"),
    [
        (0, "rank-00000-000.safetensors"),
        (20_000, "rank-00000-000.safetensors"),
        (60_000, "state.json: "),
        (3, "rank-00000-000.safetensors"),
    ],
    ids=["immediately", "in the weights", "in the state of the rollouts", "after three bytes"],
)
def test_a_full_disk_is_a_clear_error_and_the_previous_checkpoint_stays_the_latest(
    tmp_path: Path, after_bytes: int, what: str, asynchronous: bool
) -> None:
    store = CheckpointStore(tmp_path, settings(asynchronous=asynchronous))
    state: dict[str, Any] = {"rollout": "x" * 100_000}
    first = save_whole(store, 1, 1.0, 1000, state)
    with full_disk(after_bytes), pytest.raises(CheckpointError, match=r"cannot save .*step-000002") as raised:
        save_whole(store, 2, 2.0, 1000, state)
    assert what in str(raised.value)
    assert "the previous checkpoint is still the latest" in str(raised.value)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", "latest"}, "no half-written file takes up room"

    model = TinyModel(0.0, 1000)
    assert store.latest() == first
    assert store.load(first, {"learner": model})["rollout"] == state["rollout"]
    assert model.value == 1.0
    assert save_whole(store, 2, 2.0, 1000, state) == store.latest(), "there is room again"


def test_a_disk_that_is_full_from_the_start_has_no_previous_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, settings())
    with full_disk(0), pytest.raises(CheckpointError, match=r"File too large.*; no checkpoint was saved before it$"):
        save_whole(store, 1, 1.0, 1000, None)


def test_a_pointer_that_cannot_be_written_leaves_the_previous_checkpoint_the_latest(tmp_path: Path) -> None:
    """By then, the new folder is complete."""
    store = CheckpointStore(tmp_path, settings())
    first = store.save(1, {"learner": TinyModel(1.0)}, None)
    (tmp_path / ".latest.new").mkdir()
    with pytest.raises(CheckpointError, match="the previous checkpoint is still the latest"):
        store.save(2, {"learner": TinyModel(2.0)}, None)
    assert store.latest() == first
    assert store.resume({"learner": TinyModel(0.0)}) is not None


def check_one_full_rank(rank: int, world_size: int, folder: Path) -> None:
    """Each rank verifies some files, one of which is torn later; and a save of other ranks is late."""
    for asynchronous in (False, True):
        store = CheckpointStore(folder / str(asynchronous), settings(asynchronous=asynchronous, keep_last=2))
        if rank == 0:
            store.folder.mkdir()
        dist.barrier()
        save_whole(store, 1, 1.0)
        limit = full_disk(100) if rank == 1 else contextlib.nullcontext()
        with limit, pytest.raises(CheckpointError) as raised:
            save_whole(store, 2, 2.0)
        assert re.search(r"cannot save .*step-000002: trainer rank 1: cannot write .*rank-00001-000", str(raised.value))
        dist.barrier()
        assert {p.name for p in store.folder.iterdir()} == {"step-000001", "latest"}
        dist.barrier()
        save_whole(store, 2, 2.0)
        model, said = TinyModel(0.0), []
        dist.barrier()
        if rank == 0:
            (store.folder / "step-000002" / "learner" / "rank-00001-000.safetensors").unlink()
        dist.barrier()
        state = CheckpointStore(store.folder, settings(), said.append).resume({"learner": model})
        assert state is not None
        assert (state["step"], model.value) == (1, 1.0)
        (warning,) = said
        assert "skipping step-000002" in warning
        assert "rank-00001-000.safetensors is missing" in warning
        dist.barrier()


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_stops_all(tmp_path: Path) -> None:
    run_distributed(check_one_full_rank, 2, tmp_path)


def test_a_run_that_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    config = load_config(["demo"], [f"run.dir={tmp_path}", "run.name=full"])
    with full_disk(0), pytest.raises(UserError, match=r"cannot write .*/full: File too large; make room there"):
        RunDir.open(config)
    (tmp_path / "other" / ".lock").mkdir(parents=True)  # as on a read-only disk, it cannot be opened
    with pytest.raises(UserError, match=r"cannot write .*/other: Is a directory"):
        RunDir.open(load_config(["demo"], [f"run.dir={tmp_path}", "run.name=other"]))


def test_a_disk_that_fills_up_while_metrics_are_written_is_one_error(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1})
    with full_disk(20), pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: File too large"):
        writer.write({"step": 2, "reward/mean": 0.5})
    writer.close()
    JsonlWriter(tmp_path / "metrics.jsonl").close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1], "the torn line is cut off"


def fail_to_train(folder: Path, told: int) -> None:
    os.environ["RANK"] = "0"
    os.dup2(told, 1)  # a pipe is not a file, so the limit does not apply
    load.load_config = lambda *_: (_ for _ in ()).throw(UserError("no room"))  # type: ignore[assignment]
    with full_disk(0):
        raise SystemExit(trainer.run_rank(RunDir.attach(folder), []))


def test_an_error_that_cannot_be_left_in_a_file_is_told(tmp_path: Path) -> None:
    RunDir.open_path(tmp_path, "").close()
    reader, writer = os.pipe()
    rank = multiprocessing.get_context("fork").Process(target=fail_to_train, args=(tmp_path, writer))
    rank.start()
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == "bapo: no room\n"
    rank.join(HANG_S)
    assert rank.exitcode == 2
