"""A run as its user sees it: on a terminal of 80 columns, interrupted once and twice, resumed, finished."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bapo_megatron.errors import plural
from bapo_megatron.runs.folder import RunDir
from tests.distributed import HANG_S
from tests.integration.forked import SMALL
from tests.integration.gates import Gates

BAPO = [sys.executable, "-m", "bapo_megatron"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class OnTerminal:
    """A command on a pseudo-terminal, which controls it: Ctrl-C goes through the terminal."""

    def __init__(self, command: list[str], environment: dict[str, str], columns: int = 80) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, os.environ | environment)
        termios.tcsetwinsize(self._terminal, (24, columns))

    def read_until(self, is_there: Callable[[str], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not is_there(self.text):
            assert time.monotonic() < deadline, f"waited until {what}:\n{self.text}"
            if select.select([self._terminal], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    return

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def end(self) -> int:
        self.read_until(lambda text: False, "the end")
        _, status = os.waitpid(self.pid, 0)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)

    @property
    def lines(self) -> list[str]:
        return re.split(r"[\r\n]+", ESCAPE.sub("", self.text))


def run(*command: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S, check=False)


def without_torch(folder: Path) -> dict[str, str]:
    """Return an environment in which nothing can import torch."""
    (folder / "without").mkdir()
    (folder / "without" / "torch.py").write_text("raise ImportError('torch is not needed here')\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "without"), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_ctrl_c_saves_and_twice_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [
        *SMALL,
        "monitor.progress=auto",
        "run.name=mine",
        "train.num_steps=400",
        "checkpoint.interval_steps=none",
    ]
    gates = Gates(tmp_path / "gates", 3)
    first = OnTerminal([*BAPO, "train", "demo", *settings], {"TERM": "xterm-256color"} | gates.environment)
    first.read_until(lambda text: " 2/400" in text, "a step was shown")
    first.type("\x03")
    first.read_until(lambda text: "Ctrl-C again ends immediately" in text, "Ctrl-C was noticed")
    gates.open(3)
    assert first.end() == 130
    assert max(map(len, first.lines)) <= 80, [line for line in first.lines if len(line) > 80]
    assert COLOUR.search(first.text)
    assert "torchelastic" not in first.text
    assert "Traceback" not in first.text
    assert "Ctrl-C again ends immediately" in first.text
    (num_saved,) = map(int, re.findall(r"stopped +at the end of the step; saved: step (\d+) of 400", first.text))
    assert (tmp_path / "runs/mine/checkpoints/latest").read_text() == f"step-{num_saved:06d}"
    assert RunDir.attach(tmp_path / "runs/mine").state == "interrupted"
    assert 'class="badge interrupted"' in (tmp_path / "runs/mine/report.html").read_text(encoding="utf-8")
    (command,) = re.findall(r"resume +(bapo train .*)", ESCAPE.sub("", first.text).replace("\r", ""))
    assert command == "bapo train runs/mine/config.toml"
    config = (tmp_path / "runs/mine/config.toml").read_text()

    resumed = [*BAPO, *shlex.split(command)[1:]]
    done = run(*resumed, f"train.num_steps={num_saved}", environment=without_torch(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"finished   runs/mine: {num_saved} of {num_saved} steps done" in done.stdout
    fewer = run(*resumed, f"train.num_steps={num_saved - 1}")
    assert fewer.returncode == 2
    assert f"it has done {plural(num_saved, 'step')}, and train.num_steps is {num_saved - 1}" in fewer.stderr
    assert (tmp_path / "runs/mine/config.toml").read_text() == config
    assert len(list((tmp_path / "runs/mine/logs").iterdir())) == 1

    gates = Gates(tmp_path / "gates-again", num_saved + 3)
    environment = os.environ | gates.environment
    with (tmp_path / "output").open("w") as output:
        again = subprocess.Popen(resumed, stdout=output, stderr=output, env=environment, start_new_session=True)

    def wait_for(said: str) -> None:
        deadline = time.monotonic() + HANG_S
        while said not in (tmp_path / "output").read_text():
            assert again.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_for(f" {num_saved + 2}/400")
    again.send_signal(signal.SIGINT)
    wait_for("Ctrl-C again ends immediately")
    again.send_signal(signal.SIGINT)
    assert again.wait(HANG_S) == 130
    text = (tmp_path / "output").read_text()
    assert f"resuming runs/mine after step {num_saved} of 400" in text
    assert re.search(rf"stopped +immediately; saved: step {num_saved} of 400", text)
    assert text.count("resume     bapo train runs/mine/config.toml") == 1
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if "/400" in line and "  " in line]
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in rows if line.lstrip()[:1].isdigit())
    assert max(map(len, rows)) <= 80


@pytest.mark.slow
def test_no_color_is_heeded_and_an_interrupted_start_has_nothing_to_save(tmp_path: Path) -> None:
    settings = [*SMALL, "monitor.progress=auto", "run.name=mine", f"run.dir={tmp_path}", "train.num_steps=400"]
    gates = Gates(tmp_path / "gates", "import")
    variables = {"TERM": "xterm-256color", "NO_COLOR": "1"} | gates.environment
    started = OnTerminal([*BAPO, "train", "demo", *settings], variables)
    started.read_until(lambda text: "importing torch" in text, "engines and ranks were started")
    started.type("\x03")
    assert started.end() == 130
    assert not COLOUR.search(started.text)
    text = ESCAPE.sub("", started.text)
    assert "stopped    immediately; nothing is saved yet; the next start begins at step 1" in text
    assert "Traceback" not in started.text
    for label in ("run ", "model ", "trainer ", "engines ", "logs ", "report ", "dashboard "):
        assert any(line.startswith(label) for line in started.lines), label


@pytest.mark.slow
@pytest.mark.parametrize("function", ["always", "sometimes"])
def test_a_judge_that_fails_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    judges = """\
    from pathlib import Path
    CALLED = Path(__file__).with_name("called")

    def always(response):
        if not CALLED.exists():  # the check's own call
            CALLED.touch()
            return 1.0
        raise RuntimeError("boom")

    def sometimes(response, seen=[]):
        seen.append(response)
        if len(seen) % 4 == 2:
            return None
        return 1.0 * (response.count("2") % 2)
    """
    (tmp_path / "my_judges.py").write_text("\n".join(line[4:] for line in judges.splitlines()) + "\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    settings = [
        *SMALL,
        "run.name=mine",
        f"run.dir={tmp_path}",
        "train.num_steps=2",
        "parallel.tensor=1",
        f"reward.kind=my_judges:{function}",
    ]
    done = run(*BAPO, "train", "demo", *settings)
    run_dir = RunDir.attach(tmp_path / "mine")
    if function == "always":
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("bapo: the judge (reward.kind = 'my_judges:always') failed on all of the first") == 1
        assert f'File "{tmp_path}/my_judges.py", line 8, in always' in done.stderr
        assert "RuntimeError: boom" in done.stderr
        assert "torchelastic" not in done.stderr
        assert run_dir.state == "failed"
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        warnings = re.findall(r"warning: the judge failed on \d+% of the responses of step (\d)", done.stdout)
        assert warnings == ["1", "2"]
        assert "a judge returns a number, not NoneType: None') (my_judges.py, line 10)" in done.stdout
        assert "a judge returns a number" in (run_dir.log_dir / "judge.txt").read_text()
        assert run_dir.state == "finished"


def read_until(started: subprocess.Popen[str], row: str) -> str:
    """Return the output of a run up to the line with this text."""
    assert started.stdout is not None
    text = ""
    while row not in text:
        line = started.stdout.readline()
        assert line, text
        text += line
    return text


@pytest.mark.slow
def test_a_run_outlives_its_reader_and_saves_when_it_is_told_to_end(tmp_path: Path) -> None:
    command = [*BAPO, "train", "demo", *SMALL, f"run.dir={tmp_path}", "run.name=mine"]
    command += ["checkpoint.interval_steps=none", "parallel.tensor=1"]
    gates = Gates(tmp_path / "gates", 3)
    environment = os.environ | gates.environment
    first = subprocess.Popen([*command, "train.num_steps=400"], stdout=subprocess.PIPE, text=True, env=environment)
    read_until(first, " 2/400")
    first.send_signal(signal.SIGTERM)
    read_until(first, "SIGTERM: saving at the end of this step, then stopping; a second one ends immediately")
    gates.open(3)
    output, _ = first.communicate(timeout=HANG_S)
    assert first.returncode == 143
    (num_saved,) = map(int, re.findall(r"stopped +at the end of the step; saved: step (\d+) of 400", output))
    assert RunDir.attach(tmp_path / "mine").state == "interrupted"

    gates = Gates(tmp_path / "gates-again", num_saved + 2)
    command += [f"train.num_steps={num_saved + 3}"]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | gates.environment)
    read_until(second, f"{num_saved + 1}/{num_saved + 3}")
    assert second.stdout is not None
    second.stdout.close()
    gates.open(num_saved + 2)
    assert second.wait(HANG_S) == 0
    run_dir = RunDir.attach(tmp_path / "mine")
    assert run_dir.state == "finished"
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()) == num_saved + 3
    assert run_dir.log_path("trainer", 0).read_text().count("nothing more is shown") == 1
