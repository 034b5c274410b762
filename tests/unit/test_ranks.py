"""How many cores a process counts on."""

import os
import subprocess
import sys

import pytest

from bapo_megatron.runtime import num_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_cores_that_a_process_may_not_use_do_not_count():
    assert num_cores() == len(os.sched_getaffinity(0))
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{bound}; from bapo_megatron.runtime import num_cores; print(num_cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
