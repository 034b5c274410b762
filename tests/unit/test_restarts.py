"""Restarts of the trainer ranks: when the run restarts them, when it gives up, and what it says."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.restarts import next_restart, num_restarts, restart_of
from bapo_megatron.runtime.standby import Orders, StandbyRanks
from tests.hang import HANG_S
from tests.unit.launched import save
from tests.unit.test_stopping import Launched, launched

SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Attempt:
    """A failed attempt: the steps that it completed, and how many of them it saved."""

    num_completed: int
    num_saved: int
    has_trained: bool = True


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    if draw(st.booleans()):
        return Attempt(0, 0, has_trained=draw(st.booleans()))
    num_completed = draw(st.integers(1, 6))
    return Attempt(num_completed, draw(st.integers(0, num_completed)))


def fail(run_dir: RunDir, attempt: Attempt) -> None:
    """Leave the files of an attempt; one that has not trained leaves the metrics of the one before."""
    first_step = run_dir.num_steps_saved()
    if attempt.has_trained:
        run_dir.mark_training(first_step)
        rows = [json.dumps({"step": step + 1}) + "\n" for step in range(first_step + attempt.num_completed)]
        run_dir.metrics_path.write_text("".join(rows))
    if attempt.num_saved:
        save(run_dir, first_step + attempt.num_saved)


def expected(failed: list[Attempt], max_restarts: int) -> int | str:
    """Return the number of the next restart, or words of the reason why there is none."""
    if len(failed) > 1 and failed[-1].num_completed == failed[-2].num_completed == 0:
        return "completed no step"
    good = [index for index, attempt in enumerate(failed) if attempt.num_saved >= 3]
    number = len(failed) - (good[-1] if good and good[-1] > 0 else 0)
    return number if number <= max_restarts else "no restart is left"


@given(history=st.lists(attempts(), min_size=1, max_size=8), max_restarts=st.integers(0, 4))
def test_restarts_end_after_two_attempts_in_vain_or_too_many_without_progress(
    history: list[Attempt], max_restarts: int
) -> None:
    with TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder), 1)
        run_dir.checkpoints_dir.mkdir()
        run_dir.log_dir.mkdir(parents=True)
        for number, attempt in enumerate(history, start=1):
            fail(run_dir, attempt)
            found = next_restart(run_dir, "it died", float(number), max_restarts)
            wanted = expected(history[:number], max_restarts)
            if isinstance(found, str):
                assert isinstance(wanted, str)
                assert wanted in found
                return
            assert (found.number, found.problem) == (wanted, "it died")
            in_vain = number > 1 and not history[number - 1].num_completed
            assert found.failed_at_s == (number - 1 if in_vain else number)
            assert found.delay_s == min(2.0 ** (found.number - 1), 30.0)
            run_dir = RunDir(Path(folder), number + 1)
            run_dir.log_dir.mkdir()
            (run_dir.log_dir / "restart.json").write_text(json.dumps(asdict(found)))
            assert restart_of(run_dir) == found
            assert num_restarts(Path(folder)) == number


@given(interval=st.integers(1, 100), num_steps=st.integers(1, 200))
def test_a_crash_loses_less_than_half_of_a_young_run_and_less_than_an_interval(interval: int, num_steps: int) -> None:
    due = CheckpointConfig(interval_steps=interval).is_due
    saved = [step for step in range(1, num_steps + 1) if due(step, num_steps)]
    assert saved[-1] == num_steps
    for step in range(1, num_steps + 1):
        num_lost = step - max(n for n in saved if n <= step)
        assert num_lost < interval
        assert num_lost < step / 2
    assert [n for n in saved if n >= interval] == [
        n for n in range(interval, num_steps + 1) if n % interval == 0 or n == num_steps
    ]
    assert not any(CheckpointConfig(interval_steps=None).is_due(step, num_steps) for step in range(1, num_steps + 1))


@given(num_done=st.integers(0, 30), num_saved=st.integers(0, 30))
def test_a_run_says_what_is_saved_and_lost(num_done: int, num_saved: int) -> None:
    num_saved = min(num_done, num_saved)
    with TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder), 1)
        run_dir.checkpoints_dir.mkdir()
        if num_saved:
            save(run_dir, num_saved)
        run_dir.metrics_path.write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(num_done)))
        saved = (
            f"saved: step {num_saved} of 40" if num_saved else "nothing is saved yet; the next start begins at step 1"
        )
        num_lost = num_done - num_saved
        what = "later step" if num_saved else "step"
        lost = f"; {num_lost} {what}{'s' if num_lost > 1 else ''} lost" if num_lost else ""
        assert run_dir.what_is_saved(40) == saved + lost


def ran(folder: Path, kind: str, max_restarts: int, *settings: str) -> Launched:
    """Return a launcher whose ranks are of a kind (see launched.py), once it has ended."""
    with launched(folder, kind, settings=(f"run.max_restarts={max_restarts}", *settings)) as run:
        run.end()
    return run


def num_attempts(folder: Path) -> int:
    return len(list(folder.glob("run/logs/attempt-*")))


@SLOW
def test_processes_on_standby_that_have_ended_are_no_ranks(tmp_path: Path) -> None:
    """The run that they look for does not exist, so they end."""
    with StandbyRanks(tmp_path / "missing", 2, {}) as standby:
        others = {*psutil.Process().children()}
        standby.fill()
        waiting = {*psutil.Process().children()} - others  # one that has just started has no command line yet
        assert len(waiting) == 2
        assert psutil.wait_procs(waiting, HANG_S)[1] == []
        assert standby.take(Orders({"RANK": "0"}, [])) is None


@SLOW
def test_a_rank_that_dies_at_every_start_is_given_up_after_two(tmp_path: Path) -> None:
    run = ran(tmp_path, "dying", 5)
    assert run.process.returncode == 1
    assert num_attempts(tmp_path) == 2
    assert run.run_dir.state == "failed"
    assert "Traceback" not in run.stderr
    first, *told = run.stderr.splitlines()
    log = tmp_path / "run" / "logs" / "attempt-{}" / "trainer-0.log"
    ended = "trainer rank 0 ended with exit code -9; its log: {}"
    assert first == f"bapo: {ended.format(str(log).format(2))}"
    assert told == [
        "bapo: 2 attempts in a row completed no step",
        "bapo: SIGKILL often comes from Linux's memory killer: `dmesg | grep -i 'killed process'` says so",
        "bapo: nothing is saved yet; the next start begins at step 1",
        told[3],
        "bapo: the ranks were restarted 1 time:",
        f"bapo: attempt 1: {ended.format(str(log).format(1))}",
    ]
    assert re.fullmatch(r"bapo: to continue: .*bapo.* train .*/run/config.toml", told[3])
    assert "restart 1 of 5 in 1 s, logs: " in run.text


@SLOW
def test_attempts_that_get_on_are_restarted_until_all_steps_are_done(tmp_path: Path) -> None:
    run = ran(tmp_path, "faltering", 3)
    assert run.process.returncode == 0, run.stderr
    assert num_attempts(tmp_path) == 4
    assert re.findall(r"restart (\d) of 3 in (\d) s", run.text) == [("1", "1"), ("2", "2"), ("3", "4")]
    assert [RunDir(tmp_path / "run", n).state for n in (1, 2, 3, 4)] == ["failed", "failed", "failed", "finished"]


@SLOW
def test_restarts_run_out(tmp_path: Path) -> None:
    run = ran(tmp_path, "faltering", 1)
    assert run.process.returncode == 1
    assert num_attempts(tmp_path) == 2
    assert "bapo: no restart is left (run.max_restarts=1)" in run.stderr
    again = ran(tmp_path, "faltering", 1)
    assert again.process.returncode == 0, "the same command has the full number again"


@SLOW
def test_a_rank_that_dies_after_the_last_step_is_saved_has_finished_the_run(tmp_path: Path) -> None:
    run = ran(tmp_path, "lost", 1)
    assert run.process.returncode == 0
    assert num_attempts(tmp_path) == 1
    assert run.run_dir.state == "finished"
    assert "all steps are done and saved" in run.text


@SLOW
@pytest.mark.parametrize(("kind", "settings"), [("refusing", ()), ("aborting", ("parallel.data=2",))])
def test_an_error_that_the_user_has_to_mend_restarts_nothing(
    tmp_path: Path, kind: str, settings: tuple[str, ...]
) -> None:
    run = ran(tmp_path, kind, 3, *settings)
    assert run.process.returncode == 2
    assert num_attempts(tmp_path) == 1
    assert run.run_dir.state == "failed"
    assert run.stderr == "bapo: no such judge\n"
    assert "restart" not in run.text


KILLED = "trainer rank 0 ended with exit code -9; its log: {}/run/logs/attempt-1/trainer-0.log"


@SLOW
def test_a_checkpoint_that_cannot_be_read_after_a_restart_ends_the_run_and_what_was_tried_is_told(
    tmp_path: Path,
) -> None:
    run = ran(tmp_path, "torn", 3)
    assert run.process.returncode == 2
    assert num_attempts(tmp_path) == 2
    assert run.run_dir.state == "failed"
    assert run.stderr.splitlines() == [
        "bapo: checkpoint step-000001 is torn",
        "bapo: the ranks were restarted 1 time:",
        f"bapo: attempt 1: {KILLED.format(tmp_path)}",
    ]


@SLOW
def test_without_an_engine_left_nothing_is_restarted(tmp_path: Path) -> None:
    run = ran(tmp_path, "forsaken", 3)
    assert run.process.returncode == 2
    assert num_attempts(tmp_path) == 1
    assert run.run_dir.state == "failed"
    assert run.stderr.splitlines() == [
        f"bapo: {KILLED.format(tmp_path)}",
        "bapo: no rollout engine is left for a restart: their logs say why; the same command starts new ones",
    ]


@SLOW
def test_a_full_disk_is_named_with_the_failure_after_which_no_restart_is_possible(tmp_path: Path) -> None:
    run = ran(tmp_path, "crowded", 3)
    assert run.process.returncode == 2
    assert num_attempts(tmp_path) == 1, "an attempt that could not begin leaves no folder"
    assert run.run_dir.attempt == 1
    killed, full = run.stderr.splitlines()
    assert killed == f"bapo: {KILLED.format(tmp_path)}"
    assert full.startswith(f"bapo: no restart is possible: cannot write {tmp_path}/run/logs/attempt-2/")
    assert "File too large; make room there" in full


@SLOW
def test_a_run_that_was_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    with launched(tmp_path, "doomed", settings=("run.max_restarts=3",)) as run:
        run.read_until("training\n")
        run.process.terminate()
        assert run.end() == 1
    assert num_attempts(tmp_path) == 1
    assert "bapo: the run was asked to stop" in run.stderr


@SLOW
def test_a_signal_between_two_attempts_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, "halting", settings=("run.max_restarts=3",)) as run:
        run.read_until("restart 1 of 3 in 1 s")
        run.process.terminate()
        assert run.end() == 143
    assert num_attempts(tmp_path) == 2
    assert run.run_dir.state == "interrupted"
    assert "resume" in run.text
