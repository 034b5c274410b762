"""Trainer ranks that die or hang within `bapo train`: the run restarts them while the engines live on."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.history import read_history
from bapo_megatron.runs.restarts import restart_of
from bapo_megatron.runs.standing import count_events
from bapo_megatron.runtime.files import read_jsonl
from tests.integration.gates import Gates
from tests.integration.nursery import stop
from tests.integration.restart_campaign import NUM_STEPS, Started
from tests.integration.test_kill_resume import assert_same

pytestmark = pytest.mark.slow

TP2 = "parallel.tensor=2"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def begin(name: str, *settings: str, gates: Gates | None = None) -> Started:
            return stack.enter_context(Started(tmp_path, name, TP2, *settings, gates=gates))

        yield begin


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was left alone."""
    with Started(tmp_path_factory.mktemp("reference"), "alone", TP2) as run:
        assert run.wait() == 0, run.text
        return run.path


def test_ranks_start_again_beside_their_engine_and_lose_nothing(
    start: Callable[..., Started], tmp_path: Path, reference: Path
) -> None:
    """Rank 0 is killed within a push."""
    run = start("killed", "checkpoint.asynchronous=true", gates=Gates(tmp_path / "gates", "push-150", 4))
    run.at_gate("push-150")
    engines = run.engines()
    assert len(engines) == 1
    ranks = run.ranks()
    ranks[0].kill()
    assert run.gates is not None
    run.gates.open("push-150")
    run.at_gate(4)
    assert run.engines() == engines, "the same process, started at the same time"
    assert not any(p.is_running() for p in ranks.values())
    run.gates.open(4)
    assert run.wait() == 0, run.text
    assert_same(run.path, reference, NUM_STEPS)

    rows = read_jsonl(run.path / "metrics.jsonl")
    restarts = [row["run/restarts"] for row in rows]
    assert restarts == sorted(restarts)
    assert {0, 1} >= set(restarts)
    assert restarts[-1] == 1
    assert [row["run/recovery_s"] > 0 for row in rows if "run/recovery_s" in row] == [True]
    assert "trainer rank 0 ended with exit code -9" in run.text
    assert "restart 1 of 3 in 1 s" in run.text
    assert "after the failure" in run.text
    logs = [{path.name for path in (run.path / "logs" / f"attempt-{n}").glob("*.log")} for n in (1, 2)]
    assert logs == [{"trainer-0.log", "trainer-1.log", "engine-0.log"}, {"trainer-0.log", "trainer-1.log"}]
    restart = restart_of(RunDir.attach(run.path))
    assert restart is not None
    assert "trainer rank 0 ended" in restart.problem
    events = {event.name: event.count for event in count_events(read_history(run.path))}
    assert events["restarts of the trainer ranks"] == 1


def test_ranks_that_start_again_come_from_standby(
    start: Callable[..., Started], tmp_path: Path, reference: Path
) -> None:
    """Rank 1 is killed within a save."""
    run = start("stood-by", "run.standby=true", gates=Gates(tmp_path / "gates", "save-40", 4))
    run.at_gate("save-40")
    ranks = run.ranks()
    standby = run.on_standby(list(ranks.values()))
    ranks[1].kill()
    assert run.gates is not None
    run.gates.open("save-40")
    run.at_gate(4)
    assert set(run.ranks().values()) == set(standby)
    refilled = run.on_standby(standby)
    run.gates.open(4)
    assert run.wait() == 0, run.text
    assert_same(run.path, reference, NUM_STEPS)
    assert not any(p.is_running() for p in (*standby, *refilled))


def test_a_rank_that_hangs_is_ended_with_the_others_and_all_start_again(
    start: Callable[..., Started], tmp_path: Path, reference: Path
) -> None:
    """Rank 1 is stopped before a step; rank 0 is the first to pass the gate, and the deadline of its collectives
    passes."""
    run = start("hung", gates=Gates(tmp_path / "gates", 3, 4, hasty=3))
    run.at_gate(3)
    engines = run.engines()
    ranks = run.ranks()
    stop(ranks[1].pid)
    assert run.gates is not None
    run.gates.open(3)
    run.at_gate(4)
    assert run.engines() == engines
    assert not any(p.is_running() for p in ranks.values())
    run.gates.open(4)
    assert run.wait() == 0, run.text
    assert_same(run.path, reference, NUM_STEPS)
    restart = restart_of(RunDir(run.path, 2))
    assert restart is not None
    assert "trainer rank 0 ended with exit code 1" in restart.problem
