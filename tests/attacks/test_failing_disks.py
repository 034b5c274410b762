"""A disk that is full or read-only from some operation of a run on: one clear error, and nothing complete is lost.

The run is real except for its model: run folder, metrics, samples, recorded rollouts, checkpoints and report.
"""

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import bapo_megatron.hf.writer
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import Recorder
from bapo_megatron.report import page
from bapo_megatron.report.page import write_report
from bapo_megatron.rollout.recorded import read_groups
from bapo_megatron.runs import folder
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment
from tests.distributed import HANG_S
from tests.outcomes import HangError, Outcomes, deadline
from tests.unit.run_folders import step as metrics_of
from tests.unit.saveable import TinyModel
from tests.unit.test_full_disk import full_disk

pytestmark = pytest.mark.slow

NUM_STEPS = 3
PROMPT = Prompt(1, (3, 4), "1+1=", "2", "chains")
GROUP = Group(PROMPT, (Sample.of("1.0", PROMPT, (Segment.sampled(0, 1, (5, 6), (-0.5, -1.0)),), Ended("stop", 1.0)),))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.rename", "os.mkdir", "os.truncate", "os.chmod", "os.link", "os.symlink")
_REMOVALS = ("os.remove", "os.rmdir")


@dataclass
class Disk:
    """A folder on a disk that fails. An audit hook sees each of Python's file operations; hooks cannot be removed."""

    folder: str = "/nowhere"
    error: int = 0
    first: int = sys.maxsize  # the first operation that fails, counted from 0
    last: int = sys.maxsize
    count: int = 0

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(c in mode for c in "wax+") if mode else bool((flags or 0) & _WRITES)
        else:
            path = arguments[0] if arguments else None
            writes = event in _CHANGES or (event in _REMOVALS and self.error == errno.EROFS)
        if writes and isinstance(path, str | os.PathLike) and str(path).startswith(self.folder):
            self.operate(str(path))

    def operate(self, path: str) -> None:
        self.count += 1
        if self.first <= self.count - 1 <= self.last:
            raise OSError(self.error, os.strerror(self.error), path)


DISK = Disk()


@pytest.fixture(scope="module", autouse=True)
def hooked() -> None:
    sys.addaudithook(lambda event, arguments: DISK.hook(event, arguments))


@pytest.fixture(autouse=True)
def safetensors_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write without Python, as safetensors does."""
    original = bapo_megatron.hf.writer.save_file

    def save_file(tensors: Any, file: Path, **options: Any) -> None:
        if str(file).startswith(DISK.folder):
            DISK.operate(str(file))
        original(tensors, file, **options)

    monkeypatch.setattr(bapo_megatron.hf.writer, "save_file", save_file)
    monkeypatch.setattr(folder, "git_state", lambda folder: (None, ""))  # the slowest part
    yield
    DISK.folder = "/nowhere"


class Decoder:
    """Everything that a recorder asks of rollouts."""

    prompt_digests: ClassVar[dict[str, str]] = {}

    def decode(self, token_ids: Any) -> str:
        return str(token_ids)

    def judge_failure(self) -> None:
        return None


def settings(folder: Path) -> Config:
    options = [f"run.dir={folder}", "run.name=run", f"train.num_steps={NUM_STEPS}", "rollout.record=true"]
    return load_config(["demo"], [*options, "checkpoint.keep_last=2"])


def run(config: Config, saved: list[int]) -> None:
    """Train from the latest checkpoint to the end; add the steps whose checkpoint was complete to `saved`."""
    with RunDir.open(config) as run_dir:
        recorder = Recorder(config, run_dir, Console("lines", NUM_STEPS, stream=io.StringIO()))
        store = CheckpointStore(run_dir.checkpoints_dir, config.checkpoint, warn=recorder.note)
        model = TinyModel(0.0, 20, 5)
        state = store.resume({"learner": model})
        first = state["step"] if state else 0
        assert model.value == first
        recorder.begin(first, Decoder())  # type: ignore[arg-type]
        for step in range(first + 1, NUM_STEPS + 1):
            recorder.keep_samples(step, [GROUP], BatchBuilder(config).build([GROUP], {}))
            model.weight += 1
            recorder.record(step, step, metrics_of(step))
            store.save(step, {"learner": model}, {"rollout": "x" * 3000})
            store.close()
            saved.append(step)
        recorder.end()


def check(config: Config, saved: list[int]) -> str | None:
    """Return what is wrong with a run after its disk failed and works again; None means nothing."""
    folder = Path(config.run.dir) / "run"
    newest = max(saved, default=0)
    if (folder / "checkpoints").exists():
        model, said = TinyModel(0.0, 20, 5), []
        state = CheckpointStore(folder / "checkpoints", config.checkpoint, said.append).resume({"learner": model})
        found = state["step"] if state else 0
        if not newest <= found == model.value:
            return f"checkpoint {newest} was complete, {found} is loaded"
    run(config, [])
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    if steps != list(range(1, NUM_STEPS + 1)):
        return f"metrics of steps {steps} once the disk works again"
    if any(read_groups(folder / "rollouts", step) != [GROUP] for step in range(1, NUM_STEPS + 1)):
        return "recorded rollouts are not whole"
    return None


def attempt(config: Config, fault: contextlib.AbstractContextManager[object]) -> tuple[str, str | None]:
    saved: list[int] = []
    try:
        with deadline(HANG_S), fault:
            run(config, saved)
        outcome, why = "continues", None
    except UserError as error:
        unclear = "\n" in str(error) or str(Path(config.run.dir) / "run") not in str(error)
        outcome, why = "clear error", f"unclear: {str(error)[:300]}" if unclear else None
    except (Exception, HangError) as error:
        outcome, why = "traceback", repr(error)[:300]
    DISK.folder = "/nowhere"
    return outcome, why or check(config, saved)


@contextlib.contextmanager
def failing(folder: Path, error: int, first: int, last: int = sys.maxsize) -> Iterator[None]:
    DISK.folder, DISK.error, DISK.first, DISK.last, DISK.count = str(folder), error, first, last, 0
    try:
        yield
    finally:
        DISK.folder = "/nowhere"


def test_every_operation_of_a_run_may_be_the_first_that_fails(tmp_path: Path, outcomes: Outcomes) -> None:
    with failing(tmp_path, errno.ENOSPC, sys.maxsize):
        run(settings(tmp_path / "whole"), [])
        num_operations = DISK.count
    assert num_operations > 40
    for number in range(num_operations):
        faults = {"full": (errno.ENOSPC, number, sys.maxsize)}
        if number % 4 == 0:
            faults["read-only"] = (errno.EROFS, number, sys.maxsize)
            faults["fails once"] = (errno.EIO, number, number)
        for name, (error, first, last) in faults.items():
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()
            outcome, why = attempt(settings(folder), failing(folder, error, first, last))
            outcomes.add(name, outcome, why and f"operation {number} of {num_operations}: {why}")
            shutil.rmtree(folder)


@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_files_that_cannot_grow(tmp_path: Path, outcomes: Outcomes, resumed: bool) -> None:
    """Fill the disk in the middle of a write, including writes of safetensors and to files that are already open."""
    for limit in (0, 1, 50, 200, 500, 900, 1500, 2500, 3500, 5000, 7000, 9000, 12_000, 20_000, 50_000, 10**7):
        folder = tmp_path / f"limit-{limit}"
        if resumed:
            with contextlib.suppress(UserError), failing(folder, errno.ENOSPC, 45):
                run(settings(folder), [])
        outcome, why = attempt(settings(folder), full_disk(limit))
        outcomes.add("resumed" if resumed else "new", outcome, why and f"limit {limit}: {why}")
        shutil.rmtree(folder)


def test_a_report_that_cannot_be_written(tmp_path: Path, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PANELS", ())  # figures are the slowest part
    config = settings(tmp_path)
    run(config, [])
    folder = tmp_path / "run"
    write_report(folder)
    before = (folder / "report.html").read_text()
    for name, fault in (
        ("full", failing(folder, errno.ENOSPC, 0)),
        ("read-only", failing(folder, errno.EROFS, 0)),
        ("cannot be renamed", failing(folder, errno.EIO, 1)),
        ("full in the middle", full_disk(5000)),
    ):
        with fault, pytest.raises(UserError, match=r"cannot write .*report.html"):
            write_report(folder)
        outcomes.add(name, "clear error")
        assert (folder / "report.html").read_text() == before, "the earlier report stays whole"
