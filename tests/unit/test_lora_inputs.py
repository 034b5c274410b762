"""Mistakes in `[lora]` and in PEFT folders: `bapo check` and `bapo convert` name each in one message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.adapters import PEFT_PREFIX, TARGETS, Adapters
from bapo_megatron.hf.peft import WEIGHTS, adapter_tensors, write_peft
from bapo_megatron.hf.peft_config import CONFIG, read_adapters
from bapo_megatron.hf.shape import load_hf_config, model_shape

ADAPTERS = Adapters(4, 8.0, ("q_proj", "v_proj"))
SAME = ("lora.rank=4", "lora.alpha=8", 'lora.targets=["q_proj","v_proj"]')
FIRST = f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A PEFT folder for the demo's model."""
    sizes = adapter_tensors(model_shape(load_hf_config(demo_model_path())).with_adapters(ADAPTERS))
    (folder := tmp_path / "adapters").mkdir()
    write_peft(folder, ((name, torch.full(size, 0.1)) for name, size in sizes.items()), ADAPTERS, "demo")
    return folder


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the only line of a command that ends with exit code 2, or "" if it ends with 0."""
    code = cli.main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) in ((0, 0), (2, 1)), lines
    return lines[0] if lines else ""


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.rank=65"], "lora.rank=65 is above the smallest size of the layers that get adapters, 64"),
        (["lora.rank=129", 'lora.targets=["o_proj","q_proj"]'], "get adapters, 128; set lora.rank=128 or less"),
        (["lora.rank=0"], "lora.rank must be above 0, got 0"),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha must be above 0, got 0"),
        (["lora.rank=4", "lora.targets=[]"], "lora.targets must name at least one linear layer"),
        (["lora.rank=4", 'lora.targets=["qkv"]'], 'lora.targets.0 must be "q_proj", "k_proj"'),
        (["lora.rank=4", "model.path=moe", "parallel.tensor=1"], "adapters are not supported in a model with experts"),
        (["lora.rank=4", "model.path=hybrid"], "adapters are not supported in a model with linear attention"),
    ],
)
def test_adapters_that_the_model_cannot_have(
    settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in complaint(capsys, "check", "demo", *settings)


@pytest.mark.parametrize("settings", [("lora.rank=64",), ("lora.rank=128", 'lora.targets=["q_proj","down_proj"]')])
def test_the_largest_rank_is_the_smallest_size(settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "check", "demo", *settings) == ""


def test_fp8_parameters_have_no_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU, FP8 is refused too."""
    assert cli.main(["check", "demo", "lora.rank=4", "precision.fp8=hybrid", "precision.fp8_params=true"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "adds adapters" in line]
    assert len(lines) == 1
    assert lines[0].endswith("set precision.fp8_params=false")


def test_settings_without_a_rank_have_no_effect(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert cli.main(["check", "demo", "lora.alpha=8", f"lora.init_from={folder}"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bapo: warning: ")
    for part in ("lora.alpha", "lora.init_from", "lora.rank=16"):
        assert part in line


def test_a_folder_that_fits_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}") == ""
    change_config(folder, lora_dropout=0.1, peft_version="9.9", base_model_name_or_path="else/where")
    assert complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}") == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and only LORA is supported"),
        ({"use_dora": True}, "use_dora=true is not supported, only false"),
        ({"use_rslora": True}, "use_rslora=true is not supported, only false"),
        ({"bias": "all"}, 'bias="all" is not supported, only "none"'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save=["lm_head"] is not supported'),
        ({"rank_pattern": {"q_proj": 2}}, 'rank_pattern={"q_proj": 2} is not supported'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa" is not supported'),
        ({"target_modules": ".*_proj"}, 'target_modules=".*_proj" is not supported; it must be a list'),
        ({"target_modules": ["q_proj", "lm_head"]}, 'target_modules=["q_proj", "lm_head"] is not supported'),
        ({"target_modules": [["q_proj"]]}, 'target_modules=[["q_proj"]] is not supported'),
        ({"target_modules": []}, "target_modules=[] is not supported"),
        ({"target_modules": ["q_proj"]}, 'set lora.targets=["q_proj"]'),
        ({"r": 8}, "set lora.rank=8"),
        ({"target_modules": ["v_proj", "k_proj"]}, 'set lora.targets=["k_proj", "v_proj"]'),
        ({"lora_alpha": 16}, "set lora.alpha=16.0"),
        ({"r": 0}, "r=0 and lora_alpha=8.0 must be above 0"),
        ({"r": True}, "r=true and"),
        ({"r": None}, "r=null and"),
        ({"lora_alpha": float("inf")}, "lora_alpha=Infinity must be"),
        ({"lora_alpha": "8"}, 'lora_alpha="8" must be'),
    ],
)
def test_settings_of_a_peft_folder_that_are_refused(
    changes: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, **changes)
    line = complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}")
    assert message in line
    assert str(folder) in line


@pytest.mark.parametrize("text", [b"{", b"[]", b'"LORA"', b"\xff", b""])
def test_a_peft_folder_whose_settings_are_no_table(
    text: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / CONFIG).write_bytes(text)
    assert str(folder / CONFIG) in complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}")


@pytest.mark.parametrize("missing", ["", CONFIG, WEIGHTS])
def test_a_peft_folder_without_a_file(missing: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = folder / missing
    gone.rename(folder.parent / "elsewhere")
    assert str(gone) in complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(FIRST), f"1 missing: {FIRST}"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "1 unexpected: more"),
        (
            lambda tensors: tensors.update({FIRST: torch.zeros(4, 127)}),
            "[4, 127], the model needs [4, 128]",
        ),
        (lambda tensors: tensors.update({FIRST: torch.zeros(4, 128, dtype=torch.int8)}), f"{FIRST} is I8"),
        (lambda tensors: tensors[FIRST].fill_(torch.nan), "holds nan or infinity"),
        (lambda tensors: tensors[FIRST][2, 3].fill_(-torch.inf), "holds nan or infinity"),
    ],
)
def test_tensors_of_a_peft_folder_that_are_refused(
    change: Callable[[dict[str, Tensor]], object],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_tensors(folder, change)
    line = complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}")
    assert message in line
    assert str(folder / WEIGHTS) in line
    assert line.endswith("set lora.init_from to another PEFT folder, or leave it out")


def test_a_torn_file_of_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := folder / WEIGHTS).write_bytes(file.read_bytes()[:-8])
    assert f"cannot read {file}" in complaint(capsys, "check", "demo", *SAME, f"lora.init_from={folder}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=5) | st.sampled_from(TARGETS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from(["peft_type", "r", "lora_alpha", "target_modules", "bias", "use_dora", "rank_pattern"])


@given(changes=st.dictionaries(KEYS, JSON, min_size=1))
def test_any_settings_of_a_peft_folder_are_read_or_refused(
    changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | changes
    (folder / CONFIG).write_text(json.dumps(config))
    problem = ""
    try:
        found = read_adapters(folder)
    except CheckpointError as error:
        problem = str(error)
    if problem:
        assert problem.startswith(str(folder / CONFIG))
    else:
        assert (found.rank, found.alpha) == (config["r"], config["lora_alpha"])
        assert set(found.targets) == set(config["target_modules"])


def test_a_model_without_adapters_makes_no_peft_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "convert", str(demo_model_path()), str(tmp_path / "new"), "--to", "peft")
    assert f"{demo_model_path()} has no adapters (LoRA)" in line
    assert not (tmp_path / "new").exists()
