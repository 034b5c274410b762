"""Counted work, and a seeded run's history, have not become worse since the committed baseline."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["counts", "history"])
def test_the_baseline_holds(what: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gates", what]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 0, run.stderr[-2000:]
