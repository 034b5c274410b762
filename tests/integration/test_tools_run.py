"""A run in which a policy calls a tool in its chat template, and a judge scores its last turn: trained, and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime.files import read_jsonl
from tests.hang import PATIENT
from tests.integration.test_agent_run import chat_model
from tests.integration.test_kill_resume import assert_same
from tests.integration.test_train import bapo
from tests.unit.test_continuation import tokenizer_of

SUMS = {"6*7": "42", "12+5": "17"}
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
SETTINGS = (
    "data.source=jsonl",
    "data.chat_template=true",
    "environment.kind=tools",
    'environment.options={tools=["calculator"],in_prompt=true}',
    "environment.max_turns=3",
    "reward.kind=text",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_tokens=120",
    "rollout.tokens_per_round=16",
    "rollout.groups_in_flight=4",
    "checkpoint.interval_steps=1",
    "checkpoint.keep_last=9",
    "optimizer.lr=1e-3",
    "monitor.samples_per_step=16",
    *PATIENT,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two questions, and a model that has seen little more than how a pupil asks a calculator."""
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = chat_model(tokenizer, seed=0, **sizes)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lessons = [lesson(tokenizer, *one) for one in SUMS.items()]
    for _ in range(240):
        for ids in lessons:
            model(ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
    model.save_pretrained(folder / "model")
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{one}?", "answer": result}) + "\n" for one, result in SUMS.items())
    )
    return folder


def lesson(tokenizer: Any, asked: str, result: str) -> torch.Tensor:
    messages = [
        {"role": "user", "content": f"{asked}?"},
        {"role": "assistant", "content": CALL.format(asked)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
    return torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])


def train(folder: Path, name: str, num_steps: int) -> Path:
    own = (f"run.dir={folder}", f"run.name={name}", f"model.path={folder / 'model'}", f"train.num_steps={num_steps}")
    done = bapo("train", *own, f"data.path={folder / 'sums.jsonl'}", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


@pytest.mark.slow
def test_a_policy_that_calls_a_tool_is_trained_and_resumed_bit_for_bit(folder: Path) -> None:
    run = train(folder, "whole", 3)
    for row in read_metrics(run / "metrics.jsonl"):
        assert row["rollout/num_samples"] == 16
        assert row["environment/failed_samples"] == row["reward/errors"] == row["reward/timeouts"] == 0
        assert row["environment/answered_share"] > 0.5, "it has learnt to ask"
        assert 0.2 < row["reward/mean"] < 1, "and mostly to say what it was told"
    samples = [s["segments"] for s in read_jsonl(run / "samples.jsonl")]
    given = [segment["text"] for segments in samples for segment in segments if segment.get("by") == "environment"]
    for result in SUMS.values():
        said = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert said in given
    train(folder, "halved", 1)
    assert_same(train(folder, "halved", 3), run, 3)
