"""What ends a run and what does not: signals, once and twice, and a reader of its messages that leaves."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bapo_megatron import trainer
from bapo_megatron.config.load import load_config
from bapo_megatron.local import Stop
from bapo_megatron.monitor.console import Console, Screen
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.heartbeat import Heartbeat
from tests.distributed import HANG_S

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
SIGNALS = {130: signal.SIGINT, 143: signal.SIGTERM, 129: signal.SIGHUP}


class Launched:
    """A launcher with one rank of a kind (see launched.py)."""

    def __init__(self, folder: Path, kind: str, ignored: str = "", settings: Sequence[str] = ()) -> None:
        self.folder = folder
        self.text = ""
        trap = f"trap '' {ignored}; " if ignored else ""
        command = f'{trap}exec "$0" -m tests.unit.launched "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", command, sys.executable, str(folder), kind, *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in self.text:
            line = self.process.stdout.readline()
            assert line, f"ended before {text!r}: {self.text}{self.errors()}"
            self.text += line

    def lose_reader(self) -> None:
        """Stop reading its output."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stdout = None

    def end(self) -> int:
        """Read the rest, and return the exit code."""
        rest, self.stderr = self.process.communicate(timeout=HANG_S)
        self.text += rest or ""
        return self.process.returncode

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    @property
    def run_dir(self) -> RunDir:
        return RunDir.attach(self.folder / "run")


@contextmanager
def launched(folder: Path, kind: str, ignored: str = "", settings: Sequence[str] = ()) -> Iterator[Launched]:
    """Launch a run; kill it if it hangs, so that its reader gets the end of the output."""
    run = Launched(folder, kind, ignored, settings)
    watchdog = threading.Timer(HANG_S, run.process.kill)
    watchdog.start()
    try:
        yield run
    finally:
        watchdog.cancel()
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("code", [143, pytest.param(130, marks=SLOW), pytest.param(129, marks=SLOW)])
def test_a_signal_saves_at_the_end_of_the_step(tmp_path: Path, code: int) -> None:
    with launched(tmp_path, "obedient") as run:
        run.read_until("training\n")
        run.process.send_signal(SIGNALS[code])
        assert run.end() == code
        name = "" if code == 130 else f"{SIGNALS[code].name}: "
        assert f"  {name}saving at the end of this step, then stopping; " in run.text
        assert "stopped    at the end of the step; saved: step 3 of 4\n" in run.text
        assert f"resume     bapo train {tmp_path}/run/config.toml\n" in run.text
        assert run.run_dir.state == "interrupted"
        assert run.stderr == ""


@pytest.mark.parametrize(
    ("kind", "first", "code"),
    [
        ("stuck", signal.SIGTERM, 143),
        pytest.param("stuck", signal.SIGINT, 130, marks=SLOW),
        pytest.param("starting", None, 130, marks=SLOW),
    ],
)
def test_a_second_signal_ends_at_once_and_so_does_one_before_training(
    tmp_path: Path, kind: str, first: signal.Signals | None, code: int
) -> None:
    with launched(tmp_path, kind) as run:
        run.read_until("training yet\n" if first is None else "training\n")
        if first is not None:
            run.process.send_signal(first)
            run.read_until("saving at the end of this step")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == code
        assert "stopped    immediately; nothing is saved yet; the next start begins at step 1\n" in run.text
        assert run.run_dir.state == "interrupted"
        assert run.stderr == ""


def ends_at_once(number: signal.Signals) -> bool:
    """Send a signal to this process, and return whether it ends the run without waiting."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize(
    ("before_it_is_told", "afterwards"),
    [
        ([signal.SIGTERM, signal.SIGTERM], []),  # `timeout` signals the process and its group
        ([signal.SIGHUP], [signal.SIGHUP]),  # a closing terminal sends it twice: from the shell and from the system
        ([signal.SIGHUP, signal.SIGHUP], [signal.SIGHUP]),
        ([signal.SIGINT], [signal.SIGHUP]),
        ([signal.SIGTERM, signal.SIGHUP], []),
    ],
)
def test_what_comes_together_is_one_wish_to_stop(
    tmp_path: Path, before_it_is_told: list[signal.Signals], afterwards: list[signal.Signals]
) -> None:
    with RunDir.open(load_config(["demo"], [f"run.dir={tmp_path}"])) as run_dir, Stop() as stop:
        stop.run_dir = run_dir
        run_dir.mark("training")
        assert not any(map(ends_at_once, before_it_is_told))
        stop.tell(Screen(io.StringIO()))
        assert not any(map(ends_at_once, afterwards))
        assert run_dir.stop_file.exists()
        assert stop.code == 128 + before_it_is_told[0]
        assert ends_at_once(signal.SIGTERM)


def test_a_quit_ends_at_once_before_anything_is_told(tmp_path: Path) -> None:
    with RunDir.open(load_config(["demo"], [f"run.dir={tmp_path}"])) as run_dir, Stop() as stop:
        stop.run_dir = run_dir
        run_dir.mark("training")
        assert not ends_at_once(signal.SIGTERM)
        assert ends_at_once(signal.SIGQUIT)


def test_a_signal_before_there_is_a_run_is_one_line(tmp_path: Path) -> None:
    with launched(tmp_path, "loading") as run:
        run.read_until("waiting\n")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
        assert run.stderr == "bapo: interrupted\n"
        assert list(tmp_path.iterdir()) == []


@SLOW
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    """This is as under nohup. Python calls handlers in the order of their numbers: SIGHUP would be the first."""
    with launched(tmp_path, "obedient", ignored="HUP") as run:
        run.read_until("training\n")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
        assert "stopped    at the end of the step; saved: step 3 of 4\n" in run.text


def test_a_rank_ends_if_its_launcher_was_killed_before_it_looked() -> None:
    with subprocess.Popen(["true"]) as launcher:
        pass
    code = "import signal; from bapo_megatron import trainer; trainer._exit_with_parent(); signal.pause()"
    environment = os.environ | {trainer.LAUNCHER_VARIABLE: str(launcher.pid)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, start_new_session=True, timeout=HANG_S, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, "done") as run:
        run.read_until("training\n")
        run.lose_reader()
        assert run.end() == 0
        assert run.run_dir.state == "finished"
        log = run.run_dir.log_path("trainer", 0).read_text()
        assert log.count("nothing more is shown: the output cannot be written any more (Broken pipe)") == 1
        assert "Traceback" not in run.stderr


def test_ctrl_c_saves_though_the_reader_of_the_messages_ends_first(tmp_path: Path) -> None:
    """This is as behind `| tee`, which also gets the terminal's Ctrl-C."""
    with launched(tmp_path, "obedient") as run:
        run.read_until("training\n")
        run.lose_reader()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert run.run_dir.state == "interrupted"
        assert run.run_dir.num_steps_saved() == 3
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_a_display_outlives_its_terminal(progress: str, caplog: pytest.LogCaptureFixture) -> None:
    controller, terminal = pty.openpty()
    heartbeat = Heartbeat()
    heartbeat.step = 1
    with open(terminal, "w") as stream:
        with Console(progress, 3, stream=stream, heartbeat=heartbeat) as console:  # type: ignore[arg-type]
            console.step({"step": 1.0})
            os.close(controller)
            console.step({"step": 2.0})
            console.warn("late")
            console.step({"step": 3.0})
            console.summary()
        assert [record.message for record in caplog.records] == [
            "nothing more is shown: the output cannot be written any more (Input/output error)"
        ]
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # for what is still in the stream's buffer
