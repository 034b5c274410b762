"""A short soak: an engine and a rank are killed, the run is resumed, and each step is recorded once."""

from pathlib import Path

import pytest

from benchmarks.soak import Soak, Strike
from benchmarks.soak_verdict import ENGINE_KILLED, RANK_KILLED, Outcome, check_run, fault_table, lives, read_samples


@pytest.mark.slow
def test_a_short_soak_survives_its_faults(tmp_path: Path) -> None:
    strikes = [Strike(ENGINE_KILLED, 3), Strike(RANK_KILLED, 8)]
    Soak(tmp_path, 20, strikes, ["checkpoint.interval_steps=4"], seed=0).run()
    outcome = Outcome.read(tmp_path)
    assert [check for check in check_run(tmp_path, outcome) if not check.holds] == []
    assert [(fault.kind, fault.exit_code) for fault in outcome.faults] == [(ENGINE_KILLED, None), (RANK_KILLED, 1)]
    assert outcome.num_attempts == 2
    assert lives(read_samples(tmp_path)).keys() >= {"run", "launcher", "rank-0", "rank-1", "engine", "judge"}
    assert len(fault_table(outcome)) == 4
