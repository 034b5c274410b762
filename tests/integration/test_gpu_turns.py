"""Runs whose trainer and engines take turns: the bits of separate devices, also after kills in every phase."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo_megatron.config.schema import Config
from bapo_megatron.runs.steps import read_metrics
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, checkpoint_of, small_run
from tests.integration.restart_campaign import Started, check_books
from tests.integration.test_kill_resume import assert_same

pytestmark = pytest.mark.slow

NUM_STEPS = 5
SETTINGS = ("rollout.num_servers=2", "parallel.tensor=2", f"train.num_steps={NUM_STEPS}", "rollout.max_restarts=3")
TURNS = "rollout.placement=turns"
KILLS = ("sample-in-2", "update-3", "load-3", "save-40")
"""Where ranks are killed: sampling in step 2, training in step 3, pushing in step 4, and while step 5 is saved. The
counts begin anew with each attempt. A step has two updates, one push, and about thirty actions that save it; an attempt
also begins with a push."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def begin(*settings: str, gates: Gates | None = None) -> Started:
            return stack.enter_context(Started(tmp_path, "turns", *SETTINGS, TURNS, *settings, gates=gates))

        yield begin


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on separate devices that was left alone."""
    with Started(tmp_path_factory.mktemp("separate"), "alone", *SETTINGS) as run:
        assert run.wait() == 0, run.text
        return run.path


def attempted(folder: Path, name: str, *settings: str) -> Config:
    return small_run(folder, name, f"train.num_steps={NUM_STEPS}", "rollout.record=true", *settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on separate devices, with one engine, that was left alone."""
    folder = tmp_path_factory.mktemp("alone")
    engine = Engine(folder / "engine")
    try:
        with Attempt(attempted(folder, "alone"), engine) as attempt:
            attempt.finish()
            return attempt.run_dir
    finally:
        engine.kill()


def test_turns_change_no_bit(start: Callable[..., Started], separate: Path) -> None:
    run = start("checkpoint.asynchronous=true")
    assert run.wait() == 0, run.text
    assert_same(run.path, separate, NUM_STEPS)
    assert check_books(run.path, NUM_STEPS) == NUM_STEPS * 16
    times = ("turns/to_host_s", "turns/servers_s", "turns/to_device_s")
    assert all(row[name] > 0 for row in read_metrics(run.path / "metrics.jsonl") for name in times)


@pytest.mark.parametrize("is_new_engine", [False, True])
def test_a_kill_in_each_phase_changes_no_bit(alone: Path, tmp_path: Path, is_new_engine: bool) -> None:
    """The next attempt finds the engine as the kill left it, or a new one, as each `bapo train` starts."""
    config = attempted(tmp_path, "killed", TURNS)
    engine = Engine(tmp_path / "engine")
    try:
        for place in (*KILLS, None):
            gates = Gates(tmp_path / f"gates-{place}", *([place] if place else []))
            with Attempt(config, engine, gates) as attempt:
                attempt.kill_at_gate(place) if place else attempt.finish()
                assert place is None or gates.is_reached(place)
            if is_new_engine:
                engine.kill()
                engine = Engine(tmp_path / "engine")
    finally:
        engine.kill()
    assert_same(attempt.run_dir, alone, NUM_STEPS)
    check_books(attempt.run_dir, NUM_STEPS)


def test_ranks_start_again_beside_their_engines_and_then_with_new_ones(
    start: Callable[..., Started], separate: Path, tmp_path: Path
) -> None:
    """Rank 0 or 1 is killed training step 2, and rank 0 pushing step 3; then the same command continues."""
    fatal = ("update-3", "load-5")
    gates = Gates(tmp_path / "gates", fatal=fatal)
    run = start("run.max_restarts=1", gates=gates)
    assert run.wait() == 1, run.text
    assert "restart 1 of 1" in run.text
    assert all(gates.is_reached(place) for place in fatal)
    run = start(gates=gates)
    assert run.wait() == 0, run.text
    assert "resuming" in run.text
    assert not [*run.path.rglob("engine-*.restart-*.log")], "no engine has ended before its run"
    assert_same(run.path, separate, NUM_STEPS)
    check_books(run.path, NUM_STEPS)


def test_engines_killed_in_each_phase_come_back(start: Callable[..., Started], tmp_path: Path) -> None:
    """One is killed while it restores its weights in step 1, one in the push of step 3, one without memory in step 5.

    After each of these steps, the run waits in its sampling phase until the engine is healthy again.
    """
    fatal = ("engine-restore-3", "engine-publish-4")
    gates = Gates(tmp_path / "gates", 2, 4, "update-9", 6, "back-1", "back-2", "back-3", fatal=fatal)
    run = start("train.num_steps=6", gates=gates)
    for number, step in enumerate((2, 4, 6), 1):
        if step == 6:
            run.at_gate("update-9")
            run.engines()[0].kill()
            gates.open("update-9")
        run.at_gate(step)
        run.at_gate(f"back-{number}")
        gates.open(step)
    assert run.wait() == 0, run.text
    assert all(gates.is_reached(place) for place in fatal)
    (log,) = run.path.rglob("trainer-0.log")
    assert log.read_text().count("takes part again") == 3
    assert len(list(run.path.rglob("engine-*.restart-*.log"))) == 3
    assert read_metrics(run.path / "metrics.jsonl")[-1]["rollout/num_fenced"] == 3
    check_books(run.path, 6)


def test_a_run_waits_for_its_last_engine_and_pushes_again(
    start: Callable[..., Started], alone: Path, tmp_path: Path
) -> None:
    """The only engine is killed without memory in step 2; it comes back in step 3, which has begun to sample."""
    gates = Gates(tmp_path / "gates", "update-3")
    run = start("rollout.num_servers=1", "train.num_steps=3", gates=gates)
    run.at_gate("update-3")
    run.engines()[0].kill()
    gates.open("update-3")
    assert run.wait() == 0, run.text
    check_books(run.path, 3)
    for step in (1, 2, 3):
        assert checkpoint_of(run.path, step) == checkpoint_of(alone, step)
