"""What a resume finds changed: files of prompts, modules of the user's functions, and a rate that rises."""

import json
from pathlib import Path

import pytest

from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema import Config
from bapo_megatron.monitor.record import rise_of_rate
from bapo_megatron.runs.inputs import changed_inputs, input_digests, record_inputs

ROW = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "eval.jsonl", "set.parquet"):
        (tmp_path / name).write_text(ROW)
    (tmp_path / "judges").mkdir()
    for name in ("judges/mine.py", "adv.py", "game.py"):
        (tmp_path / name).write_text("def f(**_): return 1.0\n")
    return Config.model_validate(
        {
            "data": {"sources": [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]},
            "eval": {"path": "eval.jsonl", "sets": [{"name": "s", "path": "set.parquet", "source": "jsonl"}]},
            "reward": {"judges": {"one": "judges.mine:f", "two": "math"}},
            "advantage": {"kind": "adv:f"},
            "environment": {"kind": "replay:game:f"},
        }
    )


def test_every_file_behind_a_setting_is_told_when_it_changes(config: Config, tmp_path: Path) -> None:
    record = tmp_path / "inputs.json"
    names = ["a.jsonl", "adv.py", "b.jsonl", "eval.jsonl", "game.py", "judges/mine.py", "set.parquet"]
    assert [str(Path(path).relative_to(tmp_path)) for path in sorted(input_digests(config))] == names
    assert changed_inputs(record, config) == [], "an older run has no record"
    record_inputs(record, config)
    assert changed_inputs(record, config) == []
    for name in names:
        file = tmp_path / name
        before = file.read_text()
        file.write_text(before.replace("1", "3"))  # as many bytes
        assert changed_inputs(record, config) == [str(file)]
        file.write_text(before)
    (tmp_path / "a.jsonl").unlink()
    assert changed_inputs(record, config) == [], "its absence is an error of its own"
    record.write_text("{")
    assert changed_inputs(record, config) == []


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("longer", "total"), [(3, None), (6, None), (6, 6)])
def test_only_a_longer_plan_makes_the_rate_rise(schedule: str, longer: int, total: int | None) -> None:
    def settings(num_steps: int) -> Config:
        optimizer = {"schedule": schedule, "warmup_updates": 2, "lr": 1e-3, "total_updates": total}
        return Config.model_validate({"optimizer": optimizer, "train": {"num_steps": num_steps}})

    first, second = settings(3), settings(longer)
    num_updates = planned_updates(first) if total is None else 3 * planned_updates(first) // 6
    history = [
        {"version": n + 1, "optimizer/lr": learning_rate(n, first.optimizer, planned_updates(first))}
        for n in range(num_updates)
    ]
    rise = rise_of_rate(history, second)
    assert (rise is not None) == (schedule != "constant" and longer > 3 and total is None)
    if rise is not None:
        assert rise[1] > rise[0] == history[-1]["optimizer/lr"]
    assert rise_of_rate(history[:1], second) is None, "warm-up rises too"
    assert rise_of_rate([], second) is None
    assert json.dumps(history)
