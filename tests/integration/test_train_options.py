"""A run with every option that has state of its own, stopped and resumed."""

import json
from pathlib import Path

import pytest

from tests.integration.forked import train
from tests.integration.killable import Engine
from tests.integration.test_train import SAME

OPTIONS = (
    "parallel.tensor=1",
    "loss.kl_coef=0.05",
    "loss.kl_target=0.0001",
    "reward.running_std=true",
    "reward.clip=1.5",
    "optimizer.schedule=cosine",
    "optimizer.warmup_updates=2",
    "optimizer.min_lr_ratio=0.1",
    "optimizer.total_updates=6",
    "checkpoint.interval_steps=2",
)
COMPARED = (
    *SAME,
    "loss/kl_reference",
    "loss/kl_coef",
    "reward/running_std",
    "reward/clipped_share",
    "optimizer/lr",
    "optimizer/grad_alarms",
)


SOURCES = 'data.sources=[{name="a",source="chains"},{name="b",source="chains",weight=2}]'
BY_SOURCE = 'teacher.path_by_source={a="study",b="hybrid"}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "advantage",
    [
        "advantage.kind=dr_grpo advantage.whiten_batch=true",
        "advantage.kind=reinforce_plus_plus advantage.gamma=0.99",
        "advantage.kind=dr_grpo teacher.path=study teacher.coef=0.3",
        f"{SOURCES} {BY_SOURCE} advantage.kind=dr_grpo teacher.top_k=8 teacher.divergence=reverse",
    ],
)
def test_a_resumed_run_goes_on_exactly(forked_engine: Engine, tmp_path: Path, advantage: str) -> None:
    options = (*OPTIONS, *advantage.split())
    whole = train(forked_engine, tmp_path, "whole", "train.num_steps=3", *options)
    train(forked_engine, tmp_path, "resumed", "train.num_steps=2", *options)
    resumed = train(forked_engine, tmp_path, "resumed", "train.num_steps=3", *options)
    assert len(whole) == len(resumed) == 3
    for row, expected in zip(resumed, whole, strict=True):
        assert ("teacher/kl" in expected) == ("teacher.path" in advantage)
        for name in (*COMPARED, *(name for name in expected if name.startswith("teacher/"))):
            assert row[name] == expected[name], f"step {row['step']}: {name}"
    assert len({row["loss/kl_coef"] for row in whole}) == 3, "the coefficient adapts"
    assert len({row["reward/running_std"] for row in whole}) > 1
    assert whole[-1]["optimizer/lr"] < whole[0]["optimizer/lr"]
    assert all(row["loss/kl_reference"] > 0 for row in whole)


@pytest.mark.slow
def test_a_run_records_what_its_prompts_are(forked_engine: Engine, tmp_path: Path) -> None:
    trained, held_out = tmp_path / "trained.jsonl", tmp_path / "held-out.jsonl"
    settings = (
        "parallel.tensor=1",
        f'data.sources=[{{name="mine",source="jsonl",path="{trained}"}}]',
        "eval.interval_steps=2",
        f'eval.sets=[{{name="held-out",source="jsonl",path="{held_out}"}}]',
    )
    records = []
    for num_steps in (1, 2):
        for file in (trained, held_out):
            file.write_text(f'{{"prompt": "1+1=", "answer": "{num_steps}"}}\n' * 4)
        train(forked_engine, tmp_path, "run", f"train.num_steps={num_steps}", *settings)
        records.append(json.loads((tmp_path / "run" / "inputs.json").read_text()))
    first, second = records
    assert [*first] == [*second] == [f"data.sources.mine ({trained})", f"eval.sets.held-out ({held_out})"]
    assert not {*first.values()} & {*second.values()}
