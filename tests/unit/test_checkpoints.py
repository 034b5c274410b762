"""Checkpoints of a whole run: which are kept, which is the latest, and that torn ones are passed over."""

import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import AfterValidator, InstanceOf
from typing_extensions import TypedDict

from bapo_megatron.checkpoint.arrays import write_arrays
from bapo_megatron.checkpoint.folder import DIGEST_FIELD, SQUARES, Manifest, read_index, seal
from bapo_megatron.checkpoint.saving import Saving
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.errors import CheckpointError
from bapo_megatron.rollout.book import samples_fit
from bapo_megatron.rollout.group_files import GroupJson
from bapo_megatron.tokens import TokenStream
from tests.distributed import HANG_S, in_new_process
from tests.unit.saveable import TinyModel, save_whole, settings


def save(folder: Path, step: int, **change: object) -> Path:
    return CheckpointStore(folder, settings(**change)).save(step, {"learner": TinyModel(step)}, {"also": step})


def resume(folder: Path, warn: Callable[[str], None] = print) -> float:
    """Return the step that a run would resume from; 0 at the start."""
    model = TinyModel(0)
    state = CheckpointStore(folder, settings(), warn).resume({"learner": model})
    if state is not None:
        assert state["step"] == state["also"] == model.value
    return model.value


def save_until_killed(folder: Path, asynchronous: bool, kill: Callable[[], None]) -> list[int]:
    """Return the steps that were saved before a process was killed; a resumed run has the last of them, or one more."""
    newest, (reader, writer) = int(resume(folder)), os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(HANG_S))
        model, store = TinyModel(newest), CheckpointStore(folder, settings(asynchronous=asynchronous))
        kill()
        for step in itertools.count(newest + 1):
            model.weight += 1
            store.save(step, {"learner": model}, {"also": step})
            os.write(writer, bytes([step - 1 if asynchronous else step]))
    os.close(writer)
    with os.fdopen(reader, "rb") as saved:
        steps = list(saved.read())
    assert -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (signal.SIGKILL, signal.SIGXFSZ)
    newest = max([newest, *steps])
    assert resume(folder) in (newest, newest + 1)
    return steps


def before_file_operation(number: int) -> None:
    """Have this process killed before the `number`-th time that it opens, makes, renames or removes a file."""
    left = number

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def inside_file(num_bytes: int) -> None:
    """Have this process killed when it writes more than `num_bytes` of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def kill_in_all_places(folder: Path, asynchronous: bool) -> int:
    """Kill a save before each file operation and inside files; return how often it left a torn folder."""
    torch.set_num_threads(1)  # a forked process waits forever for threads that torch started before
    num_torn = 0
    for number in range(200):
        steps = save_until_killed(folder, asynchronous, functools.partial(before_file_operation, number))
        num_torn += any(folder.glob(".writing-*"))
        if len(steps) > 1:  # every operation of a complete save has had its turn
            break
    for num_bytes in (0, 1, 9, 100, 1000, 4000):
        save_until_killed(folder, asynchronous, functools.partial(inside_file, num_bytes))
        assert any(folder.glob(".writing-*"))
    assert number < 199
    return num_torn


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    assert in_new_process(kill_in_all_places, tmp_path, asynchronous) > 10


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-000007" / "learner").mkdir(parents=True)
    save(tmp_path, 8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000008"]


def test_a_rewound_run_keeps_the_checkpoint_it_has_just_saved(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000020", "step-000030"]
    (tmp_path / "latest").write_text("step-000020")
    assert resume(tmp_path) == 20
    assert CheckpointStore(tmp_path, settings()).latest() == tmp_path / "step-000020"
    assert save(tmp_path, 25) == CheckpointStore(tmp_path, settings()).latest()
    assert (tmp_path / "step-000030").is_dir()
    assert resume(tmp_path) == 25
    save(tmp_path, 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000030"]


# torn checkpoints


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two checkpoints, each with two models and companions."""
    folder, hf_path = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("hf")
    (hf_path / "config.json").write_text('{"model_type": "llama"}')
    (hf_path / "tokenizer.json").write_text("{}")
    store = CheckpointStore(folder, settings(keep_last=2))
    for step in (1, 2):
        parts = {"learner": TinyModel(step, 3, 5, hf_path), "critic": TinyModel(-step, 2, 3)}
        store.save(step, parts, {"text": "x" * 30})
    return folder


def both(folder: Path) -> tuple[float | None, str]:
    """Return which step is resumed from, after checking both models, and what was printed on the way."""
    models = {"learner": TinyModel(0, 3, 5), "critic": TinyModel(0, 2, 3)}
    said: list[str] = []
    state = CheckpointStore(folder, settings(), said.append).resume(models)
    assert state is None or models["learner"].value == -models["critic"].value == state["step"]
    return (None if state is None else models["learner"].value), "\n".join(said)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_any_file_cut_at_any_byte_changed_or_missing_is_named_and_the_one_before_is_used(two_steps: Path) -> None:
    assert both(two_steps) == (2, "")
    files = files_of(two_steps / "step-000002")
    assert {file.name for file in files} == {
        "state.json",
        "index.json",
        "config.json",
        "tokenizer.json",
        "rank-00000-000.safetensors",
    }
    assert len(files) == 7
    for file in files:
        whole = file.read_bytes()
        for i in range(len(whole)):
            if i % 24 == 0 or not 4 <= i < len(whole) - 4:
                for torn in (whole[:i], whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]):
                    file.write_bytes(torn)
                    assert_passed_over(two_steps, file)
        file.unlink()
        assert_passed_over(two_steps, file)
        file.write_bytes(whole)
    assert both(two_steps) == (2, "")


def assert_passed_over(folder: Path, file: Path) -> None:
    step, said = both(folder)
    assert step == 1
    assert re.fullmatch(rf"warning: skipping step-000002: .*{re.escape(str(file))}.*", said), said


def test_a_pointer_that_is_cut_or_names_nothing(two_steps: Path) -> None:
    pointer = two_steps / "latest"
    note = "continuing from the newest whole checkpoint"
    for length in range(len("step-000002")):
        pointer.write_text("step-000002"[:length])
        assert both(two_steps) == (2, f"warning: {pointer} names no checkpoint: {note}")
    pointer.write_bytes(b"step-" + b"9" * 5000)
    assert both(two_steps) == (2, f"warning: {pointer} names no checkpoint: {note}")
    pointer.write_text("step-000009")
    missing = two_steps / "step-000009" / "state.json"
    assert both(two_steps) == (2, f"warning: skipping step-000009: {missing} is missing")
    with pytest.raises(CheckpointError, match="does not name a complete checkpoint"):
        CheckpointStore(two_steps, settings()).latest()
    pointer.write_text("step-000001")
    assert both(two_steps) == (1, "")
    pointer.unlink()
    missing = f"warning: {pointer} cannot be read (No such file or directory): {note}"
    assert both(two_steps) == (2, missing), "nothing starts over silently"
    assert CheckpointStore(two_steps, settings(), [].append).latest() == two_steps / "step-000002"
    pointer.mkdir()
    assert both(two_steps) == (2, f"warning: {pointer} cannot be read (Is a directory): {note}")
    pointer.rmdir()
    os.mkfifo(pointer)
    assert both(two_steps) == (2, f"warning: {pointer} cannot be read (not a regular file): {note}")
    pointer.unlink()
    pointer.write_text("step-000002")


def test_when_none_is_whole_nothing_starts_over_silently(two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps, tmp_path / "copy")
    for step in (1, 2):
        (tmp_path / "copy" / f"step-{step:06d}" / "critic" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole: .*2/critic/index.json is missing; .*1/"):
        both(tmp_path / "copy")
    for folder in (tmp_path / "copy").glob("step-*"):
        shutil.rmtree(folder)
    (tmp_path / "copy" / "latest").write_text("")
    with pytest.raises(CheckpointError, match=r"there is no folder step-N"):
        both(tmp_path / "copy")


def test_a_checkpoint_of_the_first_format_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, keep_last=2)
    (tmp_path / "step-000002" / "learner" / "hf").mkdir(parents=True)
    for place in ("", "learner"):
        (tmp_path / "step-000002" / place / "state.json").write_text('{"format": 1, "step": 2}')
    (tmp_path / "latest").write_text("step-000002")
    with pytest.raises(CheckpointError, match="has format 1, this version reads format 3"):
        resume(tmp_path)


# saving in the background


class Gate:
    """A gate that holds every write of a snapshot until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        original = Snapshot.write

        def write(snapshot: Snapshot, folder: Path) -> Manifest:
            assert self.is_open.wait(HANG_S)
            return original(snapshot, folder)

        monkeypatch.setattr(Snapshot, "write", write)


def poll_until(condition: Callable[[], Any], store: CheckpointStore) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        store.poll()
        time.sleep(0.01)


def test_training_goes_on_while_the_moment_of_the_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    gate, model = Gate(monkeypatch), TinyModel(2)
    store = CheckpointStore(tmp_path, settings(asynchronous=True))
    state = {"also": 2, "list": [1]}
    store.save(2, {"learner": model}, state)
    model.weight.fill_(7.0)
    state["list"].append(2)  # type: ignore[attr-defined]
    store.poll()
    assert resume(tmp_path) == 1, "not there until everything is written"
    gate.is_open.set()
    poll_until(lambda: (tmp_path / "latest").read_text() == "step-000002", store)
    assert resume(tmp_path) == 2
    assert json.loads((tmp_path / "step-000002" / "state.json").read_text())["list"] == [1]
    store.save(3, {"learner": model}, {"also": 3})
    store.close()
    assert store.latest() == tmp_path / "step-000003", "the end of the run waits"
    store.close()


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, settings(asynchronous=True, keep_last=5))
    store.save(1, {"learner": TinyModel(1)}, {"also": 1})
    original = Saving.wait

    def wait(saving: Saving) -> None:
        if not gate.is_open.is_set():
            assert not (tmp_path / "latest").exists()
            gate.is_open.set()
        original(saving)

    monkeypatch.setattr(Saving, "wait", wait)
    store.save(2, {"learner": TinyModel(2)}, {"also": 2})
    assert gate.is_open.is_set()
    assert (tmp_path / "latest").read_text() == "step-000001"
    store.close()
    assert resume(tmp_path) == 2


go_on: dict[str, Callable[[CheckpointStore], Any]] = {
    "poll": lambda store: poll_until(lambda: False, store),
    "save": lambda store: store.save(3, {"learner": TinyModel(3)}, {"also": 3}),
    "close": CheckpointStore.close,
}


@pytest.mark.parametrize("when", go_on)
def test_an_error_of_the_background_surfaces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    save(tmp_path, 1)
    store = CheckpointStore(tmp_path, settings(asynchronous=True))

    def fail(snapshot: Snapshot, folder: Path) -> Manifest:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "write", fail)
        store.save(2, {"learner": TinyModel(2)}, {"also": 2})
        with pytest.raises(CheckpointError, match=r"cannot save .*step-000002: .*on fire; the previous checkpoint is"):
            go_on[when](store)
    assert resume(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]
    store.close()
    store.save(4, {"learner": TinyModel(4)}, {"also": 4})
    store.close()
    assert resume(tmp_path) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, settings(asynchronous=asynchronous), timeout_s=0.2)
    with pytest.raises(CheckpointError, match=r"writing .*step-000001 took longer than 0.2 s"):
        save_whole(store, 1, 1.0)
    gate.is_open.set()
    assert not (tmp_path / "latest").exists()


def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the addresses of what later snapshots write."""
    written: list[int] = []
    original = Snapshot.write

    def write(snapshot: Snapshot, folder: Path) -> Manifest:
        written.extend(piece.values.data_ptr() for piece in snapshot.pieces)
        return original(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", write)
    return written


def test_the_memory_of_a_save_serves_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = addresses(monkeypatch)
    store = CheckpointStore(tmp_path, settings(asynchronous=True))
    for step in (1, 2, 3):
        save_whole(store, step, step, state={"also": step})
        assert resume(tmp_path) == step
    assert len(written) == 3
    assert len(set(written)) == 1


def test_memory_that_a_late_writer_reads_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That save was given up, and another one is requested anyway."""
    late, go_on, read = threading.Event(), threading.Event(), []
    original = Snapshot.write

    def write(snapshot: Snapshot, folder: Path) -> Manifest:
        if not late.is_set():
            late.set()
            (piece,) = snapshot.pieces
            assert go_on.wait(HANG_S)
            read.append(float(piece.values.sum()) / piece.values.numel())
        return original(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", write)
    store = CheckpointStore(tmp_path, settings(asynchronous=True), timeout_s=0.2)
    store.save(1, {"learner": TinyModel(1)}, None)
    assert late.wait(HANG_S)
    with pytest.raises(CheckpointError, match="took longer than"):
        store.close()
    store.timeout_s = HANG_S
    save_whole(store, 2, 2.0, state={"also": 2})
    go_on.set()
    poll_until(lambda: read, store)
    assert read == [1.0]
    assert resume(tmp_path) == 2


def test_a_checkpoint_that_could_not_be_loaded_is_not_written(tmp_path: Path) -> None:
    """With nan in the weights, it would push out checkpoints that can be loaded."""
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"weight/w holds nan or infinity; the previous checkpoint is still"):
        CheckpointStore(tmp_path, settings()).save(2, {"learner": TinyModel(float("nan"))}, None)
    assert resume(tmp_path) == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, "0o644"), (0o077, "0o600")])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int, mode: str) -> None:
    before = os.umask(umask)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {oct(os.stat(file).st_mode & 0o777) for file in files_of(folder)} == {mode}


def copied(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


@pytest.mark.parametrize("part", ["learner", "critic", "state.json", "."])
@pytest.mark.parametrize("older_is_there", [True, False])
def test_parts_of_another_checkpoint_are_refused(tmp_path: Path, part: str, older_is_there: bool) -> None:
    """As after a partial restore of a backup: each file is complete, but not from this step."""
    store = CheckpointStore(tmp_path / "run", settings(keep_last=2))
    older, newest = (
        store.save(step, {"learner": TinyModel(step), "critic": TinyModel(10 * step)}, {"also": step})
        for step in (1, 2)
    )
    target = newest / part
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    copied(older / part, target)
    told: list[str] = []
    store = CheckpointStore(tmp_path / "run", settings(), told.append)
    models = {"learner": TinyModel(0), "critic": TinyModel(0)}
    if older_is_there:
        state = store.resume(models)
        assert state is not None
        assert (state["step"], models["learner"].value, models["critic"].value) == (1, 1, 10)
        assert "skipping step-000002" in told[0]
    else:
        shutil.rmtree(older)
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
            store.resume(models)
        assert models["learner"].value == 0
    assert str(newest / ("state.json" if part == "." else part)) in told[0]


# what a digest does not notice


@pytest.mark.parametrize("name", ["state.json", "learner/index.json"])
def test_a_file_that_has_grown_is_torn_however_large_it_is(tmp_path: Path, name: str) -> None:
    """Sparse, as a crash may leave it: the first size exceeds any machine's memory, the second does not."""
    save(tmp_path, 1, keep_last=2)
    file = save(tmp_path, 2, keep_last=2) / name
    for num_bytes in (1 << 43, 32 << 20):
        os.truncate(file, num_bytes)
        said: list[str] = []
        assert resume(tmp_path, said.append) == 1
        assert re.fullmatch(rf"warning: skipping step-000002: {re.escape(str(file))} is torn: it .*bytes.*", said[0])


def test_the_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    def store(run: str, run_id: str) -> CheckpointStore:
        return CheckpointStore(tmp_path / run, settings(keep_last=2), print, run_id=run_id)

    for run, run_id in (("mine", "a1"), ("other", "b2")):
        for step in (1, 2):
            store(run, run_id).save(step, {"learner": TinyModel(step)}, {})
    assert store("mine", "a1").resume({"learner": TinyModel(0)}) is not None
    shutil.rmtree(tmp_path / "mine" / "step-000002")
    shutil.copytree(tmp_path / "other" / "step-000002", tmp_path / "mine" / "step-000002")
    with pytest.raises(CheckpointError, match=r"mine/step-000002 was saved by another run: .* b2, and .* says a1"):
        store("mine", "a1").resume({"learner": TinyModel(0)})
    model = TinyModel(0)
    assert store("mine", "b2").resume({"learner": model}) is not None, "on purpose: run-id.txt was changed"
    assert model.value == 2


class Samples(TypedDict):
    """The samples of a `BookState`."""

    active: list[GroupJson]
    finished: list[GroupJson]
    rows: dict[str, InstanceOf[np.ndarray]]


class Groups(TypedDict):
    """A state.json with samples."""

    rollout: Annotated[Samples, AfterValidator(samples_fit)]


MARKS = TokenStream("marks", "uint8", (3,))
ROWS = {
    "token_ids": np.array([3, 19]),
    "behaviour_logprobs": np.array([-0.5, 0.0], np.float32),
    "marks": np.zeros((2, 3), np.uint8),
}
RESPONSE = "response 0.0 of prompt 0: stream "


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("token_ids", np.array([3, 20]), "prompt 0: token 20 is not in the model's vocabulary of 20"),
        ("token_ids", np.array([3, 10**18]), "token 1000000000000000000 is not in the model's vocabulary of 20"),
        ("token_ids", np.array([3, 19], np.int32), f"{RESPONSE}token_ids: rows are int32, not int64"),
        ("token_ids", np.array([3]), "prompt 0: stream token_ids: rows needed: 0 + 2, found: 1"),
        ("token_ids", np.array([3, 4, 5]), "stream token_ids: rows needed: 2, found: 3"),
        ("behaviour_logprobs", np.float32([-0.5, 5.0]), f"{RESPONSE}behaviour_logprobs: row 1 has 5.0, not <= 0"),
        ("behaviour_logprobs", np.float32([-0.5, -np.inf]), f"{RESPONSE}behaviour_logprobs: row 1 has -inf, not >= "),
        ("behaviour_logprobs", np.float32([-0.5, np.nan]), f"{RESPONSE}behaviour_logprobs: row 1 has nan, not"),
        ("behaviour_logprobs", np.float32([[-0.5], [-1.0]]), f"{RESPONSE}behaviour_logprobs: rows of shape [2, 1]"),
        ("routes", np.zeros(2, np.uint8), "stream routes: rows needed: 0, found: 2"),
        ("marks", np.zeros((2, 3), np.int8), f"{RESPONSE}marks: rows are int8, not uint8"),
        ("marks", np.zeros((2, 2), np.uint8), f"{RESPONSE}marks: rows of shape [2, 2], not [2, 3]"),
        ("marks", np.zeros((1, 3), np.uint8), "prompt 0: stream marks: rows needed: 0 + 2, found: 1"),
        ("version", 1, "version: Value error, weight version 1 is newer than the weights, which have version 0"),
    ],
)
def test_values_that_no_run_saves_are_named_with_file_and_stream(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    segment = {"version": 0, "step": 0, "values": dict.fromkeys(ROWS, 2)}
    prompt = {"prompt_id": 0, "token_ids": [1], "text": "", "answer": "", "source": "chains"}
    sample = {
        "sample_id": "0.0",
        "trajectories": [{"segments": [segment]}],
        "need": {"needs": "tokens", "trajectory": 0},
        "state": None,
        "turn_rewards": [],
    }
    group = {"prompt": prompt, "prompt_values": {}, "samples": [sample]}
    rollout = {"active": [group], "finished": [], "rows": ROWS}

    def store() -> CheckpointStore:
        return CheckpointStore(tmp_path, settings(), print, state_type=Groups, vocab_size=20, streams=[MARKS])

    path = store().save(1, {"learner": TinyModel(1)}, {"rollout": rollout})
    state = store().resume({"learner": TinyModel(0)})
    assert state is not None
    assert {name: rows.tolist() for name, rows in state["rollout"]["rows"].items()} == {
        name: rows.tolist() for name, rows in ROWS.items()
    }
    body = json.loads((path / "state.json").read_text())
    del body[DIGEST_FIELD]
    if field == "version":
        body["rollout"]["active"][0]["samples"][0]["trajectories"][0]["segments"][0][field] = value
    else:
        body["arrays"] = write_arrays({f"rollout/rows/{n}": rows for n, rows in {**ROWS, field: value}.items()}, path)
    (path / "state.json").write_text(seal(body))
    with pytest.raises(CheckpointError) as raised:
        store().resume({"learner": TinyModel(0)})
    assert f"{path}/state.json is damaged: rollout" in str(raised.value)
    assert said in str(raised.value)


def test_arrays_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, settings(keep_last=2))
    for step in (1, 2):
        rows = {"token_ids": np.arange(step), "routes": np.full((step, 2), step, np.uint8), "none": np.zeros((0, 3))}
        store.save(step, {"learner": TinyModel(step)}, {"rollout": {"rows": rows}})
    file = tmp_path / "step-000002" / "state.safetensors"
    whole = file.read_bytes()
    for torn in (whole[:-1], whole[:-1] + b"x", b"", None):
        file.unlink() if torn is None else file.write_bytes(torn)
        said: list[str] = []
        state = CheckpointStore(tmp_path, settings(), said.append).resume({"learner": TinyModel(0)})
        assert state is not None
        assert {name: rows.tolist() for name, rows in state["rollout"]["rows"].items()} == {
            "token_ids": [0],
            "routes": [[1, 1]],
            "none": [],
        }
        assert str(file) in said[0]


def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    body = json.loads((path / "state.json").read_text())
    del body[DIGEST_FIELD]
    (path / "state.json").write_text(seal(body | {"format": 2}))
    with pytest.raises(CheckpointError, match="has format 2, this version reads format 3: start a new run"):
        resume(tmp_path)


def test_a_negative_mean_of_squares_is_refused(tmp_path: Path) -> None:
    for number, value in enumerate((0.0, -1.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        facts = {"version": 1, "skipped_updates": 0, "model": {}}
        snapshot = Snapshot([Piece.whole(SQUARES, "w", torch.full((3,), value))], facts)
        snapshot.complete(folder, [snapshot.write(folder)])
    with ShardReader(read_index(tmp_path / "0"), SQUARES) as read:
        assert read("w").tolist() == [0.0] * 3
    with (
        ShardReader(read_index(tmp_path / "1"), SQUARES) as read,
        pytest.raises(CheckpointError, match=r"exp_avg_sq of w in .*/1 holds a negative mean of squares"),
    ):
        read("w")
