"""Three of the sick and healthy runs; sick_runs.py has all of them."""

from pathlib import Path

import pytest

from tests.integration.sick_runs import HEALTHY, SICK, Case, run_all

CHOSEN = ("one reward", "policy stands still")


@pytest.mark.slow
def test_sick_runs_raise_their_alarm_and_healthy_ones_none(tmp_path: Path) -> None:
    first_of = {case.alarm: case for case in reversed(SICK)}
    cases: tuple[Case, ...] = (*(first_of[name] for name in CHOSEN), HEALTHY[0])
    outcomes = run_all(cases, tmp_path)
    assert [outcome.fault for outcome in outcomes] == [""] * 3
    first_steps = [[alarm["first_step"] for alarm in outcome.status["alarms"]] for outcome in outcomes]
    assert first_steps == [[1], [5], []]
    assert [outcome.status["state"] for outcome in outcomes] == ["finished"] * 3
