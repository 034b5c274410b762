"""What makes two runs of a study the same, and what makes them different."""

from pathlib import Path

import pytest
from pydantic import Field

from bapo_megatron.algorithms.objectives.clipped import GrpoLoss
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from studies import identity
from studies.identity import run_name

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in MODEL_FILES:
        (tmp_path / name).write_text("{}")
    return tmp_path


def config_of(**sections: dict[str, object]) -> Config:
    return Config.model_validate(sections)


def test_place_and_name_are_not_part_of_it() -> None:
    assert run_name(config_of(run={"name": "a", "dir": "here"})) == run_name(config_of(run={"name": "b", "dir": "x"}))
    assert run_name(config_of(run={"seed": 1})) != run_name(config_of(run={"seed": 2}))
    assert run_name(config_of(loss={"name": "grpo", "clip_high": 1.2})) == run_name(config_of(loss={"name": "grpo"})), (
        "1.2 is the default"
    )


def test_another_default_is_another_run() -> None:
    class NewerLoss(GrpoLoss):
        clip_high: float = 1.5

    class Newer(Config):
        loss: NewerLoss = Field(default_factory=NewerLoss)  # type: ignore[assignment]

    grpo = Config(loss=GrpoLoss())
    assert run_name(Newer()) != run_name(grpo)
    assert run_name(Newer(loss=NewerLoss(clip_high=1.2))) == run_name(grpo)


def test_other_code_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_name(Config())
    monkeypatch.setattr(identity, "code_here", lambda: "another commit")
    assert run_name(Config()) != before


@pytest.mark.parametrize("changed", ["teacher.py", "helper.py", "deep/inner.py", "deep/__init__.py"])
def test_another_function_or_what_it_imports_is_another_run(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    for name in ("deep/__init__.py", "deep/other.py"):
        (tmp_path / name).touch()
    (tmp_path / "teacher.py").write_text("import math\nimport helper\n")
    (tmp_path / "helper.py").write_text("def f():\n    from deep.inner import g\n")
    (tmp_path / "deep" / "inner.py").write_text("import helper\n")
    config = config_of(advantage={"kind": "teacher:advantage"})
    before = run_name(config)
    (tmp_path / "deep" / "other.py").write_text("x = 1\n")
    assert run_name(config) == before, "nobody imports it"
    with (tmp_path / changed).open("a") as file:
        file.write("x = 1\n")
    assert run_name(config) != before


@pytest.mark.parametrize("file", MODEL_FILES)
@pytest.mark.parametrize("section", ["model", "critic"])
def test_another_model_under_the_same_path_is_another_run(model: Path, section: str, file: str) -> None:
    config = config_of(**{section: {"path": str(model)}})
    before = run_name(config)
    assert run_name(config) == before
    (model / file).write_text("{} ")
    assert run_name(config) != before


@pytest.mark.parametrize(
    "settings",
    [
        ["data.source=jsonl", "data.path=FILE"],
        ['data.sources=[{name="a"},{name="b",path="FILE"}]'],
        ['eval.sets=[{name="a",path="FILE"}]'],
    ],
)
def test_other_prompts_under_the_same_path_are_another_run(tmp_path: Path, settings: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    config = load_config([], [setting.replace("FILE", str(file)) for setting in settings])
    names = {run_name(config)}  # there is no file yet
    for text in ("one", "other prompts"):
        file.write_text(text)
        names.add(run_name(config))
    assert len(names) == 3


def test_a_model_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(identity, "digest_of", lambda file: read.append(file.name) or "digest")
    for seed in range(3):
        run_name(config_of(model={"path": str(model)}, run={"seed": seed}))
    assert sorted(read) == sorted(MODEL_FILES)


def test_a_model_that_cannot_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(identity, "digest_of", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*config.json: Permission denied"):
        run_name(config_of(model={"path": str(model)}))
