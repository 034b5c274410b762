"""The folder of the disk channel's weights: its place, its owner, and that none is left or taken away."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.sync import folder as module
from bapo_megatron.sync.folder import free_bytes, kept_weights_folder, weights_folder
from tests.hang import HANG_S

OTHER_ID = "0123456789abcdef"
NUM_BYTES = 5000


def configured(*settings: str) -> Config:
    return load_config([], ["rollout.engine=sglang", *settings])


def begun(path: Path) -> RunDir:
    """Return a run that has begun, without its lock."""
    with RunDir.open(configured(f"run.dir={path.parent}", f"run.name={path.name}")):
        pass
    return RunDir.attach(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return begun(tmp_path / "runs" / "one")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = tmp_path / "parent"
    folder.mkdir()
    return folder


def inside(parent: Path) -> Config:
    return configured("sync.channel=disk", f"sync.folder={parent}")


def named(parent: Path, run_id: str | None) -> Path:
    return parent / f"bapo-{os.getuid()}-{run_id}"


def left_behind(parent: Path, run_id: str | None = OTHER_ID) -> Path:
    """Make what a killed launcher leaves: NUM_BYTES of weights, and a lock that nobody holds."""
    folder = named(parent, run_id)
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "weights" / "v-3").mkdir(parents=True)
    (folder / "weights" / "v-3" / "model.safetensors").write_bytes(bytes(NUM_BYTES))
    return folder


_HOLDER = """
import sys
from pathlib import Path
from bapo_megatron.config.load import load_config
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.sync import folder
from bapo_megatron.sync.folder import kept_weights_folder, weights_folder

folder._PATIENCE_S = float(sys.argv[4])
run_dir, parent = RunDir.attach(Path(sys.argv[1])), sys.argv[2]
config = load_config([], ["rollout.engine=sglang", "sync.channel=disk", f"sync.folder={parent}"])
for _ in sys.stdin:
    with kept_weights_folder(config, run_dir):
        weights = weights_folder(config, run_dir)
        weights.mkdir()
        (weights / "one").write_bytes(bytes(int(sys.argv[3])))
        print("held", flush=True)
        sys.stdin.readline()
        assert (weights / "one").exists()
    print("left", flush=True)
"""


class Launcher:
    """Another process that holds the folder of a run from one line of its input to the next."""

    def __init__(self, run_dir: RunDir, parent: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(run_dir.path), str(parent), str(NUM_BYTES), str(HANG_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"


@pytest.fixture
def launched(parent: Path) -> Iterator[Callable[[RunDir], Launcher]]:
    started: list[Launcher] = []

    def launch(run_dir: RunDir) -> Launcher:
        started.append(Launcher(run_dir, parent))
        return started[-1]

    yield launch
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ((), None),
        (("sync.folder=SCRATCH",), None),  # idle without the disk channel
        (("sync.channel=disk",), None),
        (("sync.channel=disk", "sync.folder=SCRATCH"), "SCRATCH"),
        (("rollout.placement=split",), "MEMORY"),
        (("rollout.placement=split", "sync.channel=disk"), "MEMORY"),
        (("rollout.placement=split", "sync.folder=SCRATCH"), "SCRATCH"),
    ],
)
def test_where_it_is(
    settings: tuple[str, ...], where: str | None, tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path("/dev/shm") == module.MEMORY
    monkeypatch.setattr(module, "MEMORY", tmp_path / "MEMORY")
    config = configured(*(text.replace("SCRATCH", str(tmp_path / "SCRATCH")) for text in settings))
    if where is None:
        weights = run_dir.path / "weights"
        weights.mkdir()
        with kept_weights_folder(config, run_dir):
            assert weights_folder(config, run_dir) == weights
        assert weights.is_dir(), "the folder of a run keeps its last version"
        assert not [*tmp_path.glob("[A-Z]*")]
    else:
        with kept_weights_folder(config, run_dir):
            assert weights_folder(config, run_dir) == named(tmp_path / where, run_dir.run_id) / "weights"
            assert [path.name for path in tmp_path.glob("[A-Z]*")] == [where]
        assert not [*(tmp_path / where).iterdir()]


def test_a_home_folder_is_found(tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = configured("sync.channel=disk", "sync.folder=~/scratch")
    assert weights_folder(config, run_dir) == named(tmp_path / "scratch", run_dir.run_id) / "weights"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_only_its_user_can_read_it_and_nothing_stays(
    error: type[BaseException] | None, parent: Path, run_dir: RunDir
) -> None:
    before = os.umask(0)
    try:
        with contextlib.suppress(*[error] if error else []), kept_weights_folder(inside(parent), run_dir):
            (folder,) = parent.iterdir()
            assert folder == named(parent, run_dir.run_id)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            weights = weights_folder(inside(parent), run_dir)
            weights.mkdir()
            (weights / "one").touch()
            if error:
                raise error
    finally:
        os.umask(before)
    assert not [*parent.iterdir()]


@pytest.mark.parametrize("is_of_the_same_run", [True, False])
def test_the_next_run_removes_what_a_killed_launcher_left(
    is_of_the_same_run: bool, parent: Path, tmp_path: Path, run_dir: RunDir, launched: Callable[[RunDir], Launcher]
) -> None:
    killed = launched(run_dir)
    killed.tell()
    killed.hear("held")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    left = weights_folder(inside(parent), run_dir)
    assert (left / "one").stat().st_size == NUM_BYTES
    following = run_dir if is_of_the_same_run else begun(tmp_path / "runs" / "next")
    with kept_weights_folder(inside(parent), following):
        assert not left.exists()
        assert [*parent.iterdir()] == [named(parent, following.run_id)]
    assert not [*parent.iterdir()]


def test_a_folder_that_is_in_use_is_left_alone(
    parent: Path,
    tmp_path: Path,
    run_dir: RunDir,
    launched: Callable[[RunDir], Launcher],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("", (), {"free": 7})())
    other = launched(run_dir)
    other.tell()
    other.hear("held")
    assert free_bytes(parent) == 7
    with kept_weights_folder(inside(parent), begun(tmp_path / "runs" / "next")):
        assert len([*parent.iterdir()]) == 2
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    folder = named(parent, run_dir.run_id)
    with (
        pytest.raises(UserError, match=f"^{folder} is in use: another process trains this run on this machine$"),
        kept_weights_folder(inside(parent), run_dir),
    ):
        pytest.fail("two processes had it")
    other.tell()
    other.hear("left")  # it still had its weights
    assert not [*parent.iterdir()]


def test_abandoned_folders_count_as_free(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: asked.append(path) or type("", (), {"free": 7})())
    assert free_bytes(parent / "not" / "there") == 7
    left_behind(parent)
    left_behind(parent, "fedcba")
    (parent / "of-others").write_bytes(bytes(100))
    assert 7 + 2 * NUM_BYTES <= free_bytes(parent) < 7 + 3 * NUM_BYTES + 100_000
    without_weights = free_bytes(parent) - 2 * NUM_BYTES
    left_behind(parent, "abc")
    assert free_bytes(parent) > without_weights + 3 * NUM_BYTES - 1
    assert set(asked) == {parent}


def make_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def make_readable(path: Path, target: Path) -> None:
    path.mkdir()
    path.chmod(0o755)
    (path / "lock").touch()


def make_writable(path: Path, target: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def make_file(path: Path, target: Path) -> None:
    path.touch()


@pytest.mark.parametrize("make", [make_link, make_readable, make_writable, make_file])
@pytest.mark.parametrize("is_own", [True, False])
def test_what_others_may_have_put_there_is_neither_used_nor_removed(
    make: Callable[[Path, Path], None], is_own: bool, parent: Path, tmp_path: Path, run_dir: RunDir
) -> None:
    target = tmp_path / "target"
    (target / "weights").mkdir(parents=True)
    target.chmod(0o700)
    (target / "lock").touch()
    trap = named(parent, run_dir.run_id if is_own else OTHER_ID)
    make(trap, target)
    before = sorted((path, path.lstat()[:2]) for path in (trap, *trap.rglob("*"), target, *target.rglob("*")))
    if is_own:
        told = f"^{trap} is not a folder that only you can use; remove it, or set sync.folder$"
        with pytest.raises(UserError, match=told), kept_weights_folder(inside(parent), run_dir):
            pytest.fail("it was used")
    else:
        with kept_weights_folder(inside(parent), run_dir):
            assert named(parent, run_dir.run_id).is_dir()
    assert sorted((path, path.lstat()[:2]) for path in (trap, *trap.rglob("*"), target, *target.rglob("*"))) == before
    assert [*parent.iterdir()] == [trap]


def test_a_folder_of_another_user_is_refused(parent: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    folder = named(parent, run_dir.run_id)
    folder.mkdir(mode=0o700)
    with pytest.raises(UserError, match="is not a folder that only you can use"):
        kept_weights_folder(inside(parent), run_dir).__enter__()
    assert folder.is_dir()


def test_a_parent_that_cannot_be_written_is_one_error(tmp_path: Path, run_dir: RunDir) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Not a directory; set sync\.folder to a folder that you can write$"):
        kept_weights_folder(inside(tmp_path / "file" / "sub"), run_dir).__enter__()


def test_a_start_waits_for_a_process_that_only_looks(
    parent: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another one counts or removes an abandoned folder, it has its lock."""
    looking = contextlib.ExitStack()
    assert looking.enter_context(module._locked(left_behind(parent, run_dir.run_id)))
    polls: list[float] = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (polls.append(seconds), looking.close()))
    with kept_weights_folder(inside(parent), run_dir):
        assert len(polls) == 1
        assert is_held(named(parent, run_dir.run_id))
    assert not [*parent.iterdir()]


def is_held(folder: Path) -> bool:
    with module._locked(folder) as is_abandoned:
        return folder.is_dir() and not is_abandoned


class Between:
    """Runs a function once, before a numbered line of the folder's module that a thread reaches within `codes`."""

    def __init__(self, number: int, codes: set[CodeType], act: Callable[[], object]) -> None:
        self.left, self.codes, self.act = number, codes, act

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.act()
        return self


def code(function: Any) -> CodeType:
    found: CodeType = getattr(function, "__wrapped__", function).__code__
    return found


MAKING = {code(one) for one in (module._make, module._check_owned, module._is_present)}
REMOVING = {code(one) for one in (module._remove_abandoned, module._locked, module._check_owned, module._is_present)}


@contextlib.contextmanager
def before_line(number: int, codes: set[CodeType], act: Callable[[], object]) -> Iterator[Between]:
    tracer, before = Between(number, codes, act), sys.gettrace()
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(before)


def numbers() -> Iterator[int]:
    """Count up; the caller stops at the first line that is never reached."""
    yield from range(1, 1000)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_another_start_removes_meanwhile_is_made_again(is_there: bool, parent: Path, run_dir: RunDir) -> None:
    """The other one cleans up between any two lines of ours."""
    folder = named(parent, run_dir.run_id)
    for number in numbers():
        if is_there:
            left_behind(parent, run_dir.run_id)
        with before_line(number, MAKING, lambda: module._remove_abandoned(parent)) as tracer:
            lock = module._make(folder)
        assert lock is not None
        assert is_held(folder), f"before line {number}"
        module._remove_abandoned(parent)
        assert is_held(folder)
        module._remove(folder)
        os.close(lock)
        if tracer.left > 0:
            assert number > 5
            return


def test_a_folder_that_is_made_while_another_start_looks_at_the_old_one_stays(parent: Path, run_dir: RunDir) -> None:
    """The old one is removed and a new one is held between any two lines of the other start."""
    folder = named(parent, run_dir.run_id)
    for number in numbers():
        left_behind(parent, run_dir.run_id)
        mine = contextlib.ExitStack()

        def start(mine: contextlib.ExitStack = mine) -> None:
            module._PATIENCE_S, patience_s = 0.0, module._PATIENCE_S
            try:
                mine.enter_context(kept_weights_folder(inside(parent), run_dir))
            except UserError:  # the other one has the lock of the old folder just now
                return
            finally:
                module._PATIENCE_S = patience_s

        with before_line(number, REMOVING, start) as tracer:
            module._remove_abandoned(parent)
        with mine:
            assert is_held(folder) or not folder.exists(), f"before line {number}"
            assert folder.exists() == bool(mine._exit_callbacks)  # type: ignore[attr-defined]
        assert not [*parent.iterdir()]
        if tracer.left > 0:
            assert number > 5
            return


def test_starts_at_the_same_time_take_nothing_from_each_other(
    parent: Path, tmp_path: Path, launched: Callable[[RunDir], Launcher]
) -> None:
    runs = [begun(tmp_path / "runs" / str(number)) for number in range(5)]
    launchers = [launched(run_dir) for run_dir in runs]
    for _ in range(10):
        abandoned = [left_behind(parent, run_id) for run_id in (runs[0].run_id, runs[1].run_id, "a", "b", "c")]
        for one in launchers:
            one.tell()
        for one in launchers:
            one.hear("held")
        assert {*parent.iterdir()} == {named(parent, run_dir.run_id) for run_dir in runs}
        assert not (abandoned[0] / "weights" / "v-3").exists()
        for one in launchers:
            one.tell()
        for one in launchers:
            one.hear("left")
        assert not [*parent.iterdir()]
