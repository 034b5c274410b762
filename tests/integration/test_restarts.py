"""Trainer ranks that die or hang within `bapo train`: the run starts them again beside the engines that live on."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bapo_megatron.monitor.restarts import restart_of
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.report.history import read_history
from bapo_megatron.report.status import find_alarms
from bapo_megatron.runtime.files import read_jsonl
from tests.distributed import HANG_S
from tests.integration.gates import Gates
from tests.integration.killable import SMALL
from tests.integration.test_kill_resume import assert_same

pytestmark = pytest.mark.slow

NUM_STEPS = 4
SETTINGS = (*SMALL, f"train.num_steps={NUM_STEPS}", "parallel.tensor=2", "run.max_restarts=3")


class Started:
    """`bapo train` over the demo, whose ranks wait at a gate before a step."""

    def __init__(self, folder: Path, name: str, *settings: str, gates: Gates | None = None) -> None:
        self.path = folder / name
        self.gates = gates
        self._output = folder / f"{name}.output"
        command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={folder}", f"run.name={name}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *SETTINGS, *settings],
                stdout=output,
                stderr=output,
                env=os.environ | (gates.environment if gates else {}),
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def at_gate(self, place: int | str) -> None:
        assert self.gates is not None
        self.gates.wait(place, lambda: self.process.poll() is None, lambda: self.text)

    def processes(self, module: str) -> dict[int, psutil.Process]:
        """Processes that run a module below the launcher: by rank, or for engines by their order."""
        children = psutil.Process(self.process.pid).children()
        found = [p for p in children if any(module in argument for argument in p.cmdline())]
        return {int(p.environ().get("RANK", i)): p for i, p in enumerate(found)}

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def begin(name: str, *settings: str, gates: Gates | None = None) -> Started:
        runs.append(Started(tmp_path, name, *settings, gates=gates))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left alone."""
    run = Started(tmp_path_factory.mktemp("reference"), "alone")
    try:
        assert run.wait() == 0, run.text
        return run.path
    finally:
        run.end()


@pytest.mark.parametrize(
    ("rank", "place", "settings"),
    [(1, 3, ()), (0, "push-150", ("checkpoint.asynchronous=true",)), (1, "save-40", ())],
    ids=["between-steps", "push", "save"],
)
def test_ranks_start_again_beside_their_engine_and_lose_nothing(
    start: Callable[..., Started], tmp_path: Path, reference: Path, rank: int, place: int | str, settings: tuple[str]
) -> None:
    run = start("killed", *settings, gates=Gates(tmp_path / "gates", place, 4))
    run.at_gate(place)
    engines = run.processes("engines.embedded")
    assert len(engines) == 1
    ranks = run.processes("bapo_megatron.worker")
    ranks[rank].kill()
    assert run.gates is not None
    run.gates.open(place)
    run.at_gate(4)
    assert run.processes("engines.embedded") == engines, "the same process, started at the same time"
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
    assert f"trainer rank {rank} ended with exit code -9" in run.text
    assert "restart 1 of 3 in 1 s" in run.text
    assert "after the failure" in run.text
    logs = [{path.name for path in (run.path / "logs" / f"attempt-{n}").glob("*.log")} for n in (1, 2)]
    assert logs == [{"trainer-0.log", "trainer-1.log", "engine-0.log"}, {"trainer-0.log", "trainer-1.log"}]
    restart = restart_of(RunDir.attach(run.path))
    assert restart is not None
    assert f"trainer rank {rank} ended" in restart.problem
    alarms = {alarm.name: alarm.count for alarm in find_alarms(read_history(run.path))}
    assert alarms["restarts of the trainer ranks"] == 1


def test_a_rank_that_hangs_is_ended_with_the_others_and_all_start_again(
    start: Callable[..., Started], tmp_path: Path, reference: Path
) -> None:
    """Rank 1 is stopped; rank 0 gives up after parallel.timeout_s, which is longer than a start differs by rank."""
    run = start("hung", "parallel.timeout_s=60", gates=Gates(tmp_path / "gates", 3, 4))
    run.at_gate(3)
    engines = run.processes("engines.embedded")
    ranks = run.processes("bapo_megatron.worker")
    ranks[1].send_signal(signal.SIGSTOP)
    assert run.gates is not None
    run.gates.open(3)
    run.at_gate(4)
    assert run.processes("engines.embedded") == engines
    assert not any(p.is_running() for p in ranks.values())
    run.gates.open(4)
    assert run.wait() == 0, run.text
    assert_same(run.path, reference, NUM_STEPS)
    restart = restart_of(RunDir(run.path, 2))
    assert restart is not None
    assert "trainer rank 0 ended with exit code 1" in restart.problem
