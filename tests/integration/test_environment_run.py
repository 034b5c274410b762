"""Runs whose environment answers in worker processes: killed between and within turns, in rounds, overlapped."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.types import NeedsTokens, Sample
from tests.hang import PATIENT
from tests.integration.gates import Gates
from tests.integration.killable import SMALL, Attempt, Engine
from tests.integration.test_kill_resume import assert_same

NUM_STEPS = 3
TALK = (
    "environment.kind=tests.unit.step_functions:talk",
    'environment.stop_tokens=["0","1","2","3"]',
    "advantage.kind=grpo_turns",
    "advantage.gamma=0.9",
    "rollout.tokens_per_round=1",
    "rollout.groups_in_flight=9",
)
"""Three short turns with rewards in each sample, and one token a round, so that a step leaves samples anywhere."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return an engine with the tool demo's model."""
    model = ("--model-path", str(shipped_model_path("tool")), "--max-context", "128")
    engine = Engine(tmp_path_factory.mktemp("engine"), *model)
    yield engine
    engine.kill()


def tool_run(folder: Path, name: str, *settings: str) -> Config:
    own = (f"run.dir={folder}", f"run.name={name}", f"train.num_steps={NUM_STEPS}")
    return load_config(["tool_demo"], [*own, *SMALL, *settings])


def finished(config: Config, engine: Engine) -> Path:
    with Attempt(config, engine) as attempt:
        attempt.finish()
        return attempt.run_dir


def kept_in(run: Path, step: int) -> list[Sample]:
    state = CheckpointStore.load(run / "checkpoints" / f"step-{step:06d}", {})["rollout"]
    return [s for groups in groups_of(state, ()) for g in groups for s in g.samples]


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_turns_is_repeated_bit_for_bit(engine: Engine, tmp_path: Path) -> None:
    reference = finished(tool_run(tmp_path, "alone", *TALK), engine)
    within = [s for s in kept_in(reference, 1) if isinstance(s.need, NeedsTokens) and s.num_given_tokens]
    assert any(s.turn.num_turn_tokens for s in within), "otherwise nothing is resumed within a later turn"
    config, gates = tool_run(tmp_path, "killed", *TALK), Gates(tmp_path / "gates", "update-3")
    with Attempt(config, engine, gates) as attempt:
        assert attempt.kill_at_gate("update-3")
        assert attempt.num_done() == 1, "step 2 is lost with its turns"
    assert_same(finished(config, engine), reference, NUM_STEPS)


@pytest.mark.slow
def test_an_overlapped_run_uses_its_environment_and_says_so(engine: Engine, tmp_path: Path) -> None:
    settings = ("rollout.overlap=true", "rollout.max_staleness=6", "eval.interval_steps=3")
    held_out = 'eval.sets=[{name="new",source="bapo_megatron.prompts.sums:sums",options={seed=1},num_prompts=8}]'
    run = finished(tool_run(tmp_path, "overlapped", *settings, held_out), engine)
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["rollout/num_samples"] for row in rows] == [16] * NUM_STEPS
    for row in rows:
        assert 1 <= row["environment/turns_mean"] <= 4
        assert row["environment/failed_samples"] == row["environment/errors"] == row["environment/timeouts"] == 0
        assert row["environment/wait_s"] > 0
    assert any(row["environment/answered_share"] for row in rows)
    assert rows[-1]["eval/new/num_samples"] == 8
    given = [s for sample in read_jsonl(run / "samples.jsonl") for s in sample["segments"] if "by" in s]
    assert given
    assert all(s["by"] == "environment" and s["text"][-1] in ";!" for s in given)


def test_an_evaluation_asks_the_environment(tmp_path: Path) -> None:
    settings = ["rollout.engine_threads=1", *PATIENT]
    command = ["eval", "tool", str(Path("configs/tool_demo.toml")), *settings, "-n", "2", "--limit", "12"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["judge"] == "calculator"
    responses = read_jsonl(tmp_path / "out" / "responses.jsonl")
    assert len(responses) == 24
    answered = [r for r in responses if len(r["turns"]) > 1]
    assert answered, "the model asks in a fifth of its responses"
    for r in answered:
        assert [turn["by"] for turn in r["turns"]] == ["policy", "environment"] * (len(r["turns"]) // 2) + ["policy"]
        call, reply = re.fullmatch(r"(\d+)([*+])(\d+)\?", r["turns"][0]["text"]), r["turns"][1]["text"]
        assert call is not None, "the model's calls can all be read"
        left, right = int(call[1]), int(call[3])
        assert reply == f"{left * right if call[2] == '*' else left + right};"
        assert r["response"] == "".join(t["text"] for t in r["turns"][::2]).removesuffix("<eos>")
