"""Two cases of the campaign that kills trainer ranks in whole runs (restart_campaign.py).

test_restarted_runs.py kills in a save and stops a rank.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.integration.restart_campaign import ENGINES, LAST, LAYOUTS, Case, fight

NEEDS_SGLANG = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")


def test_the_seeds_kill_in_every_combination_with_and_without_standby() -> None:
    for first, standby in ((0, False), (16, True)):
        cases = [Case.draw(first + i) for i in range(16)]
        assert {(case.signal, case.standby) for case in cases} == {("KILL", standby)}
        drawn = {(case.layout, case.engine, case.place.partition("-")[0]) for case in cases}
        assert drawn == {(layout, engine, kind) for layout in LAYOUTS for engine in ENGINES for kind in LAST}
    assert {(case.signal, case.standby) for case in map(Case.draw, range(32, 40))} == {("STOP", False), ("STOP", True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(0, "TP2xDP2", "embedded", "update-4", 3, "KILL", standby=False),
        pytest.param(Case(2, "PP2", "sglang", "push-70", 0, "KILL", standby=False), marks=NEEDS_SGLANG),
    ],
    ids=["update", "sglang-push"],
)
def test_a_run_whose_rank_was_killed_loses_and_mislabels_nothing(tmp_path: Path, case: Case) -> None:
    assert fight(tmp_path, case)["restarts"] == 1
