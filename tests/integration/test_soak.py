"""A short soak: an engine and a rank are killed, the run is resumed, and each step is recorded once."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import soak
from benchmarks.soak import Soak, Strike
from benchmarks.soak_verdict import ENGINE_KILLED, RANK_KILLED, Outcome, check_run, fault_table, lives, read_samples
from tests.distributed import HANG_S
from tests.hang import PATIENT
from tests.integration.gates import Gates


class SoakAtGates(Soak):
    """A soak that strikes while the run waits before the next step, and then lets it continue."""

    def __init__(self, gates: Gates, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gates = gates

    def strike(self, root: psutil.Process, step: int) -> None:
        num_before = len(self.faults)
        super().strike(root, step)
        if len(self.faults) > num_before:
            self._gates.open(self.faults[-1].step + 1)


@pytest.mark.slow
def test_a_short_soak_survives_its_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strikes = [Strike(ENGINE_KILLED, 3), Strike(RANK_KILLED, 8)]
    monkeypatch.setattr(soak, "ORPHAN_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(soak, "STUCK_TIMEOUT_S", HANG_S)
    gates = Gates(tmp_path / "gates", *(strike.step + 1 for strike in strikes))  # where the run waits for the strikes
    for name, value in gates.environment.items():
        monkeypatch.setenv(name, value)
    SoakAtGates(gates, tmp_path, 20, strikes, ["checkpoint.interval_steps=4", *PATIENT], seed=0).run()
    outcome = Outcome.read(tmp_path)
    assert [check for check in check_run(tmp_path, outcome) if not check.holds] == []
    assert [(fault.kind, fault.exit_code) for fault in outcome.faults] == [(ENGINE_KILLED, None), (RANK_KILLED, 1)]
    assert outcome.num_attempts == 2
    assert lives(read_samples(tmp_path)).keys() >= {"run", "launcher", "rank-0", "rank-1", "engine", "judge"}
    assert len(fault_table(outcome)) == 4
