"""Two steps of a whole run on one GPU: the trainer on CUDA, the engine on the CPU, weights between them over gloo.

NCCL to an engine needs SGLang on a second GPU, because the embedded engine computes on the CPU.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.runs.steps import read_metrics
from tests.distributed import HANG_S

SMALL = (
    "train.num_steps=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=6",
    "parallel.tensor=1",
    "monitor.progress=lines",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps(dtype: str, tmp_path: Path) -> None:
    settings = [*SMALL, f"run.dir={tmp_path}", "run.name=gpu", f"model.dtype={dtype}"]
    done = subprocess.run(
        [sys.executable, "-m", "bapo_megatron", "train", "demo", *settings],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "gpu" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(row[name]) for name in ("loss/policy", "optimizer/grad_norm", "loss/entropy"))
