"""What a resume finds changed: prompts, modules of the user's functions, and a rate that rises."""

import gzip
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import Recorder, rise_of_rate
from bapo_megatron.prompts import reasoning_gym
from bapo_megatron.prompts.mixture import prompts_of
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.inputs import changed_inputs, module_digests, record_inputs

ROWS = [{"prompt": f"1+{i}=", "answer": str(1 + i), "level": i} for i in range(9)]
LIBRARY = """
import json
from pathlib import Path
ROWS = Path(__file__).parent / "rows.json"
def load_dataset(*_, **__): return json.loads(ROWS.read_text())
def rows(): return load_dataset()
"""
SOURCES = {
    "a.jsonl": {"path": "a.jsonl"},
    "acme/sums": {"source": "hub", "path": "acme/sums"},
    "datasets:rows": {"source": "datasets:rows"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with a library `datasets` that gives the rows of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", sys)
    del sys.modules["datasets"]
    return tmp_path


def digests(*sources: dict[str, Any], **data: Any) -> dict[str, str]:
    """Return the digests of prompts as a run reads them."""
    mixed = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    config = Config.model_validate({"data": {"max_prompt_tokens": 200, **data, "sources": mixed}})
    return prompts_of(config, load_tokenizer(demo_model_path())).digests()


def write(folder: Path, rows: list[Any]) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("seed", range(12))
def test_prompts_that_changed_are_told_wherever_they_come_from(folder: Path, seed: int) -> None:
    record, rng = folder / "inputs.json", random.Random(seed)
    write(folder, ROWS)
    before = digests(*SOURCES.values())
    names = [f"data.sources.s{i} ({origin})" for i, origin in enumerate(SOURCES)]
    assert [*before] == names
    assert changed_inputs(record, before) == [], "an older run has no record"
    record_inputs(record, before)
    rows = [dict(row) for row in ROWS]
    change = rng.choice(["prompt", "answer", "order", "messages"])
    one, other = rng.sample(range(len(rows)), 2)
    if change == "order":
        rows[one], rows[other] = rows[other], rows[one]
    elif change == "messages":
        chat = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "?"}]
        rows[one]["prompt"] = [*chat, {"role": "user", "content": rows[one]["prompt"]}]
    else:
        rows[one][change] = rows[other][change]
    write(folder, rows)
    assert changed_inputs(record, digests(*SOURCES.values(), chat_template=False)) == names
    rows = [{**row, "level": rng.random()} for row in ROWS]  # nothing reads this column
    write(folder, rows)
    (folder / "a.jsonl").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    assert changed_inputs(record, digests(*SOURCES.values())) == []
    assert changed_inputs(record, digests(*[*SOURCES.values()][1:])) == [], "nor a source that is gone"
    record.write_text("{")
    assert changed_inputs(record, before) == []


def test_procedural_prompts_are_compared_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the library may make others."""
    chains = {"size": 50, "source": "chains"}
    assert digests(**chains) == digests(**chains)
    assert digests(**chains) != digests(**chains, options={"max_terms": 9})
    asked: list[int] = []

    class DataSet(list[Any]):
        def __getitem__(self, index: Any) -> dict[str, Any]:
            asked.append(index)
            return {"question": f"{version}+{index}=", "answer": index, "metadata": {}}

    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda *_: DataSet([None] * 10_000))
    found = []
    for version in (1, 1, 2):  # noqa: B007 (DataSet reads it)
        found += [*digests(source="reasoning_gym", dataset="sums").values()]
    assert found[0] == found[1] != found[2]
    assert len(asked) < 60, "some data sets take long to make a question"


def test_a_resume_warns_of_what_has_changed(folder: Path) -> None:
    settings = [f"run.dir={folder}", "run.name=run", "reward.kind=mine:f"]
    config, screen = load_config(["demo"], settings), io.StringIO()
    with RunDir.open(config) as run_dir:
        for first_step, digest in ((0, "1"), (1, "1"), (1, "2")):
            (folder / "mine.py").write_text(f"def f(**_): return {digest}\n")
            recorder = Recorder(config, run_dir, Console("lines", 20, stream=screen))
            recorder.begin(first_step, SimpleNamespace(decode=str, prompt_digests={"data (acme/sums)": digest}))  # type: ignore[arg-type]
            recorder.end()
            assert screen.getvalue().count("has changed since") == 2 * (digest == "2")
    for name in ("data (acme/sums)", "mine.py"):
        assert f"warning: {name} has changed since this run last started" in screen.getvalue()


def test_modules_of_functions_are_told_when_they_change(folder: Path) -> None:
    (folder / "judges").mkdir()
    names = ["adv.py", "game.py", "judges/mine.py"]
    for name in names:
        (folder / name).write_text("def f(**_): return 1.0\n")
    config = Config.model_validate(
        {
            "reward": {"judges": {"one": "judges.mine:f", "two": "math"}},
            "advantage": {"kind": "adv:f"},
            "environment": {"kind": "replay:game:f"},
        }
    )
    record = folder / "inputs.json"
    before = module_digests(config)
    assert [str(Path(path).relative_to(folder)) for path in sorted(before)] == names
    record_inputs(record, before)
    for name in names:
        file = folder / name
        file.write_text(file.read_text().replace("1", "3"))  # as many bytes
        assert changed_inputs(record, module_digests(config)) == [str(file)]
        file.write_text(file.read_text().replace("3", "1"))
    (folder / "adv.py").unlink()
    assert changed_inputs(record, module_digests(config)) == [], "its absence is an error of its own"


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
