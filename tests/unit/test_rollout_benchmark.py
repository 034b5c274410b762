"""The bound that benchmarks/rollout.py prints, against cases worked out by hand; and that it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rollout_bound
from benchmarks.rollout_bound import Bound, StepCost, Workload
from tests.distributed import HANG_S

ROOT = Path(__file__).parents[2]
ONE_TURN = """
import sys
from dataclasses import replace
from benchmarks import rollout
rollout.QUICK_PLAN = replace(rollout.QUICK_PLAN, num_turns=1, num_steps=1, num_warmup=1)
sys.argv = ["rollout", "--quick"]
sys.exit(rollout.main(rollout.__doc__, rollout.rows))
"""

SLOW_ENVIRONMENT = """
import sys
from benchmarks import slow_environment
slow_environment.QUICK, slow_environment.NUM_WARMUP = (1, 1), 1
sys.argv = ["slow_environment", "--quick"]
sys.exit(slow_environment.main(slow_environment.__doc__, slow_environment.rows))
"""


def test_step_cost_is_linear_between_grid_points_and_constant_outside() -> None:
    cost = StepCost(rows=(1, 3), contexts=(10, 20), seconds=((1.0, 2.0), (3.0, 6.0)))
    assert cost(1, 10) == 1.0
    assert cost(2, 10) == 2.0
    assert cost(2, 15) == 3.0
    assert cost(9, 99) == 6.0
    assert cost(1, 0) == 1.0


def test_a_synchronous_step_pays_for_its_longest_response() -> None:
    # Three decode steps with 3, 2 and 1 running responses, of 11, 12 and 13 tokens.
    assert rollout_bound.synchronous_s([1, 3, 2], 10, lambda n, c: 100.0 * n + c) == 600.0 + 36.0


def test_full_slots_replace_a_response_at_once() -> None:
    # Two slots: [3 | 1], [1 | 2 ...]: the third response begins when the one-token response before it ends.
    calls: list[tuple[int, int]] = []

    def cost(num_rows: int, context: int) -> float:
        calls.append((num_rows, context))
        return 1.0

    per_token = rollout_bound.full_slots_s([3, 1, 2], 2, 10, cost)
    assert calls == [(2, 11), (2, 12), (2, 13)]  # until no response is left to replace one that ends
    assert per_token == 3.0 / 6


def test_equal_lengths_leave_nothing_to_gain() -> None:
    workload = Workload(sigma=0.0)
    result = rollout_bound.bound(workload, lambda n, c: 0.25 + n, num_steps=3, train_share=0.5)
    assert result.full_slots == pytest.approx(1.0)
    assert result.speedup("partial") == pytest.approx(1.0)
    assert result.speedup("overlapped") == pytest.approx(1.5)


def test_modes_of_the_bound() -> None:
    result = Bound(synchronous_s=8.0, full_slots=0.25, train=0.5)
    assert result.speedup("synchronous") == 1.0
    assert result.speedup("partial") == result.speedup("over-sampled") == 1.5 / 0.75
    assert result.speedup("overlapped") == 3.0
    assert result.idle_share("synchronous") == pytest.approx(1 / 1.5)
    assert result.idle_share("overlapped") == 0.0


def test_lengths_have_the_stated_median_and_a_long_tail() -> None:
    workload = Workload()
    lengths = sorted(workload.lengths(2000))
    assert lengths[len(lengths) // 2] == pytest.approx(workload.median_tokens, rel=0.05)
    assert sum(lengths) / len(lengths) > 1.5 * workload.median_tokens
    assert lengths[-1] == workload.max_response_tokens
    assert lengths[0] >= 1


def rows_of(code: str) -> list[str]:
    """Run a benchmark; return the first cells of the rows that it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 0, run.stderr
    assert "Task was destroyed" not in run.stderr
    return [line.split(" | ")[0].strip("| ") for line in run.stdout.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    rows = rows_of(ONE_TURN)
    modes = ["synchronous", "partial", "over-sampled", "overlapped"]
    assert rows[:6] == ["case", "mode", *modes]
    assert [row.split(",")[0] for row in rows[-3:]] == [f"step of {mode} rollouts" for mode in modes[1:]]


@pytest.mark.slow
def test_slow_environments_are_measured() -> None:
    steps = [f"step of {mode} rollouts, tool takes 0.5 s a turn" for mode in ("synchronous", "overlapped")]
    assert rows_of(SLOW_ENVIRONMENT) == ["case", *steps]
