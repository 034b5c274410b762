"""Published models that `bapo plan` knows by their names."""

import re
from pathlib import Path

import pytest

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path, hub
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.preflight import known_models
from bapo_megatron.preflight.known_models import KNOWN_MODELS, with_model

NAMED_OTHERWISE = {"Mistral-Nemo-Base-2407": 12.2e9, "OLMo-2-0425-1B": 1.48e9, "gemma-7b": 8.54e9}  # the model cards


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_parameters_are_as_the_name_says(name: str) -> None:
    shape = model_shape(KNOWN_MODELS[name])
    size = re.search(r"-(\d+(?:\.\d+)?)(M|B)", name, re.IGNORECASE)
    wanted = NAMED_OTHERWISE.get(name) or float(size[1]) * {"M": 1e6, "B": 1e9}[size[2].upper()]
    assert 0.95 * wanted < model_parameters(shape) < 1.3 * wanted
    assert shape.max_positions >= 4096


def test_each_published_model_has_its_source() -> None:
    lines = Path(known_models.__file__).with_name("known_models.toml").read_text(encoding="utf-8").splitlines()
    models = [number for number, line in enumerate(lines) if line.startswith('"')]
    assert len(models) > 25
    assert all(lines[number - 1].startswith("# ") for number in models)


def test_a_plan_by_name_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise AssertionError("a known model needs no hub")

    monkeypatch.setattr(hub, "snapshot", offline)
    monkeypatch.chdir(tmp_path)
    for model in ("OLMo-2-0425-1B", "allenai/OLMo-2-0425-1B", "models/OLMo-2-0425-1B"):
        assert cli.main(["plan", model, "clusters/1x8-h100"]) == 0
        assert "1,484,916,736 parameters" in capsys.readouterr().out
    assert cli.main(["plan", model]) == 0, "the memory of a process on CPUs"
    assert "change     set cluster.gpu" in capsys.readouterr().out


def test_a_model_becomes_settings_that_others_win_over() -> None:
    folder = str(demo_model_path())
    assert with_model([folder, "model.dtype=float32"])[0] == f'model.path="{folder}"'
    assert with_model(["demo", "parallel.tensor=2"]) == ["demo", "parallel.tensor=2"]
    assert with_model(["model.dtype=float32", "Qwen3-8B", "demo"]) == [
        "demo",
        'model.path="Qwen/Qwen3-8B"',
        "model.dtype=bfloat16",
        "model.dtype=float32",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("Qwen3-7B", "Qwen3-7B is neither a configuration nor a model that is known by its name; did you mean Qwen3-"),
        ("gpt2", "by its name; the models are DeepSeek-R1-Distill-Qwen-1.5B, "),
        ("gpt2", ", granite-3.1-8b-instruct. For any other model, give a folder with its config.json"),
        ("a" * 4000, "aaa is neither a configuration nor a model that is known by its name; the models are DeepSeek"),
        ("~nobody-here/x", "~nobody-here/x is neither a configuration nor a model that is known by its name; "),
        ("/", "the folder / has no config.json, from which a plan takes the model's sizes"),
        ("Qwen3-8B optimizer.lr 3e-4", "optimizer.lr needs a =: write optimizer.lr=3e-4"),
        ("Qwen3-8B gemma-2b", "a plan is for one model, and these are 2: Qwen3-8B, gemma-2b"),
    ],
)
def test_a_wrong_model_is_one_message(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_model(arguments.split())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_misspelt_configuration_keeps_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").touch()
    for wrong, right in (("demoo", "demo"), ("mine", "mine.toml")):
        assert cli.main(["plan", wrong]) == 2
        assert capsys.readouterr().err == f"bapo: configuration {wrong} does not exist; did you mean {right}?\n"
