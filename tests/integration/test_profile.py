"""A traced step leaves a file of rank 0 and one per engine; an engine that refuses does not end the run."""

import gzip
import json
from pathlib import Path

import pytest

from tests.integration.forked import train
from tests.integration.killable import Engine


def kernels(file: Path) -> set[str]:
    """Return the names of the operators in a trace."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("aten::")}


def test_a_chosen_step_is_traced(forked_engine: Engine, tmp_path: Path) -> None:
    options = ("train.num_steps=2", "monitor.profile_steps=[2]")
    rows = train(forked_engine, tmp_path, "traced", *options)
    assert len(rows) == 2
    for row in rows:
        parts_s = [row[f"time/{part}_s"] for part in ("forward", "backward", "optimizer")]
        assert all(seconds >= 0 for seconds in parts_s)
        assert sum(parts_s) == pytest.approx(row["time/train_s"])
        busy_s = row["time/score_s"] + row["time/train_s"]
        assert row["perf/tflops_per_gpu"] == pytest.approx(row["perf/tflop"] / busy_s / 2, rel=1e-3), "two ranks"
        assert 0 < row["perf/mfu"] < 1
    profile = tmp_path / "traced" / "profile"
    name = "step-000002-trainer-0.json.gz"
    assert sorted(path.name for path in profile.iterdir()) == ["step-000002-engine-0", name]
    assert {"aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"} <= kernels(profile / name)
    (file,) = (profile / "step-000002-engine-0").iterdir()
    assert "aten::mm" in kernels(file) or "aten::addmm" in kernels(file) or "aten::linear" in kernels(file)
