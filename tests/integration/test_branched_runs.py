"""Branches that train: what they have in common with the run that they come from."""

from pathlib import Path

import pytest

from bapo_megatron.branch import plan_branch
from bapo_megatron.config.load import load_config
from bapo_megatron.rollout.group_files import group_from_json
from bapo_megatron.runtime.files import read_jsonl
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, checkpoint_of, metrics_of, small_run, surviving
from tests.integration.test_kill_resume import buffered_in
from tests.unit.branched import digest

STEP, NUM_STEPS = 2, 4


def branch_of(parent: Path, name: str, *settings: str) -> Path:
    branch = plan_branch(parent, Path(name), settings, STEP)
    branch.write()
    return branch.path


def train(run: Path, engine: Engine, gates: Gates | None = None, kill_at: str | None = None) -> None:
    """Train to the end; with `kill_at`, kill -9 all ranks there first, and resume."""
    config = load_config([run / "config.toml"])
    if kill_at is not None:
        with Attempt(config, engine, gates) as attempt:
            assert attempt.kill_at_gate(kill_at)
    with Attempt(config, engine) as attempt:
        attempt.finish()


def samples_of(run: Path, step: int) -> list[dict[str, object]]:
    return [sample for sample in read_jsonl(run / "samples.jsonl") if sample["step"] == step]


@pytest.mark.slow
def test_an_unchanged_branch_is_the_parents_continuation_and_a_lower_rate_begins_with_its_samples(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path / "engine")
    try:
        parent = small_run(tmp_path, "parent", f"train.num_steps={NUM_STEPS}")
        with Attempt(parent, engine) as attempt:
            attempt.finish()
        run = attempt.run_dir
        before = digest(run)
        same, slower = branch_of(run, "same"), branch_of(run, "slower", "optimizer.lr=1e-5")
        train(same, engine, Gates(tmp_path / "gates", "push-70"), "push-70")
        train(slower, engine)
    finally:
        engine.kill()
    assert digest(run) == before
    assert metrics_of(same) == metrics_of(run)
    assert read_jsonl(same / "samples.jsonl") == read_jsonl(run / "samples.jsonl")
    for step in range(STEP + 1, NUM_STEPS + 1):
        assert checkpoint_of(same, step) == checkpoint_of(run, step)
        assert checkpoint_of(slower, step) != checkpoint_of(run, step)
    assert samples_of(slower, STEP + 1) == samples_of(run, STEP + 1) != []
    rates = [row["optimizer/lr"] for row in read_jsonl(slower / "metrics.jsonl")]
    assert max(rates[STEP:]) < min(rates[:STEP])


@pytest.mark.slow
def test_an_overlapped_branch_loses_no_response_and_trains_none_twice(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    settings = ("rollout.overlap=true", "rollout.max_staleness=5", "parallel.tensor=1", f"train.num_steps={NUM_STEPS}")
    try:
        with Attempt(small_run(tmp_path, "parent", *settings), engine) as attempt:
            attempt.finish()
        run = branch_of(attempt.run_dir, "branch", "optimizer.lr=1e-5")
        train(run, engine, Gates(tmp_path / "gates", "save-35"), "save-35")
    finally:
        engine.kill()
    trained: set[str] = set()
    for folder, steps in ((attempt.run_dir, range(1, STEP + 1)), (run, range(STEP + 1, NUM_STEPS + 1))):
        batches = surviving(folder, "step")
        for step in steps:
            now = {s.sample_id for group in batches[step]["groups"] for s in group_from_json(group).samples}
            assert not now & trained, "trained twice"
            trained |= now
            buffered_in(folder, step, trained)
