"""Whole runs with a critic: it learns, the policy waits for it, and a killed run continues exactly."""

from pathlib import Path

import pytest

from bapo_megatron.runtime.files import read_jsonl
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, small_run
from tests.integration.test_kill_resume import metrics_of

NUM_STEPS = 4
SETTINGS = (
    'advantage.kind="gae"',
    "advantage.lam=0.95",
    "critic.lr=3e-3",
    "critic.warmup_steps=1",
    "critic.epochs_per_step=2",
    f"train.num_steps={NUM_STEPS}",
)


def files_of(run: Path, step: int) -> dict[str, bytes]:
    """Return weights and moments."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.safetensors")}


@pytest.mark.slow
def test_a_killed_run_with_a_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    try:
        with Attempt(small_run(tmp_path, "alone", *SETTINGS), engine) as alone:
            alone.finish()
        config = small_run(tmp_path, "killed", *SETTINGS)
        with Attempt(config, engine, Gates(tmp_path / "gates", 3)) as first:
            assert first.kill_at_gate(3)
        with Attempt(config, engine) as second:
            second.finish()
    finally:
        engine.kill()
    rows = read_jsonl(alone.run_dir / "metrics.jsonl")
    assert metrics_of(second.run_dir) == metrics_of(alone.run_dir)
    for step in range(1, NUM_STEPS + 1):
        files = files_of(alone.run_dir, step)
        assert any("critic" in name for name in files)
        assert files_of(second.run_dir, step) == files, f"step {step}"

    assert [row["version"] for row in rows] == [0, 2, 4, 6], "in the first step only the critic learns"
    assert "loss/policy" not in rows[0]
    assert rows[0]["critic/value_mean"] == 0, "a new critic knows nothing"
    for row in rows[1:]:
        assert row["critic/value_mean"] != 0
        assert row["loss/positive_token_share"] + row["loss/negative_token_share"] == pytest.approx(1)
