"""Runs whose environment answers in worker processes: killed between and within turns, in rounds, overlapped."""

import json
import re
from pathlib import Path

import pytest

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.cli import main
from bapo_megatron.runtime.files import read_jsonl
from tests.hang import PATIENT
from tests.integration.partial_kills import NUM_STEPS, Campaign, finished, new_engine, tool_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments"), [("turns", ["sample", "answer"]), ("routes", ["sample", "answer"]), ("hybrid", ["update"])]
)
def test_a_run_killed_in_the_middle_of_turns_is_repeated_bit_for_bit(
    kind: str, moments: list[str], tmp_path: Path
) -> None:
    """Some of the ten moments of partial_kills.py: before a request, a question, or an optimizer update."""
    campaign = Campaign(tmp_path, kind)
    rows = [campaign.fight([*campaign.kind.moments].index(moment)) for moment in moments]
    assert [row["place"].partition("-")[0] for row in rows] == moments
    assert any(row["resumed"]["within_turns"] for row in rows)
    if kind == "routes":
        metrics = read_jsonl(campaign.reference / "metrics.jsonl")
        assert metrics[-1]["routes/other_share"] > 0, "newer weights choose other experts than those replayed"


@pytest.mark.slow
def test_an_overlapped_run_uses_its_environment_and_says_so(tmp_path: Path) -> None:
    settings = ("rollout.overlap=true", "rollout.max_staleness=6", "eval.interval_steps=3")
    held_out = 'eval.sets=[{name="new",source="bapo_megatron.prompts.sums:sums",options={seed=1},num_prompts=8}]'
    engine = new_engine(tmp_path / "engine", shipped_model_path("tool"))
    try:
        run = finished(tool_run(tmp_path, "overlapped", *settings, held_out), engine)
    finally:
        engine.kill()
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
