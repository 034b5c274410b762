"""The soak's verdict on made-up samples of constant and of growing processes; and where its faults fall."""

import math
from collections.abc import Callable

import pytest

from benchmarks.soak import ENDING_RUN, WITHIN_RUN, plan_faults
from benchmarks.soak_verdict import Sample, age, check_disk, check_processes, check_speed, lives

NUM_STEPS = 1200
Value = Callable[[int], float]


def samples(rss_mib: Value, descriptors: Value = lambda step: 40, cpu_s: Value = lambda step: 1.0) -> list[Sample]:
    """Return samples of a rank that restarts halfway through the run, and then repeats the last 10 steps."""
    found = []
    for attempt, first, last in ((1, 0, NUM_STEPS // 2), (2, NUM_STEPS // 2 - 10, NUM_STEPS)):
        total_s = 0.0
        for step in range(first, last, 5):
            load = 2 + math.sin(step)
            total_s += 5 * cpu_s(step) * (1 + load / 100)
            fields = {
                "elapsed_s": float(step + 100 * attempt),
                "attempt": attempt,
                "step": step,
                "pid": attempt,
                "rss_bytes": int(rss_mib(step - first) * 2**20),
                "descriptors": int(descriptors(step - first)),
                "threads": 7,
                "cpu_s": total_s,
                "num_processes": 1,
                "run_dir_bytes": 5000 * step + (8 * 2**20 if step % 10 else 0),
                "load": load,
            }
            found += [Sample(role="rank-0", **fields), Sample(role="run", **fields)]
    return found


def failed(rss_mib: Value, descriptors: Value = lambda step: 40) -> list[str]:
    return [c.name for c in check_processes(lives(samples(rss_mib, descriptors))) if not c.holds]


def test_a_process_that_warms_up_and_stays_level_passes() -> None:
    assert failed(lambda age: 500 + min(age, 200)) == []


def test_growth_after_the_warm_up_is_found_across_restarts() -> None:
    assert failed(lambda age: 500 + 0.05 * age) == ["resident memory, rank-0"]
    assert failed(lambda age: 500, lambda age: 40 + age // 100) == ["descriptors, rank-0"]


def test_a_restarted_process_counts_from_its_own_start() -> None:
    first, second = lives(samples(lambda age: 500))["rank-0"]
    assert age(first).min() == age(second).min() == 0
    assert age(second).max() > age(first).max()


def test_disk_ignores_a_checkpoint_that_is_being_written() -> None:
    check = check_disk(samples(lambda age: 500))
    assert check.holds
    assert "5000 in the second" in check.measured


@pytest.mark.parametrize(("slowdown", "holds"), [(0.0, True), (0.4, False)])
def test_a_slower_step_is_told_from_a_loaded_machine(slowdown: float, holds: bool) -> None:
    made = samples(lambda age: 500, cpu_s=lambda step: 1 + slowdown * step / 1000)
    assert check_speed(lives(made)).holds == holds


def test_faults_are_seeded_and_leave_long_lives() -> None:
    planned = plan_faults(2000, 4, seed=3)
    assert planned == plan_faults(2000, 4, seed=3) != plan_faults(2000, 4, seed=4)
    assert [sum(s.kind == kind for s in planned) for kind in (*WITHIN_RUN, *ENDING_RUN)] == [4, 4, 4, 4, 2, 2, 2]
    assert max(s.step for s in planned) < 1600
    assert max(s.step for s in planned if s.kind in ENDING_RUN) < 1000
