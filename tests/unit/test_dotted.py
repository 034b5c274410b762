"""Functions of the user's own at dotted paths: what is wrong with one is one message of `bapo check`."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.dotted import ADVANTAGE, KEEP_GROUP, LOSS, REWARD, Seam
from bapo_megatron.config.engines import ENGINE, ENGINE_SPECS
from bapo_megatron.config.families import FAMILY
from bapo_megatron.config.schema_loss import CustomLoss
from bapo_megatron.errors import UserError
from tests.distributed import HANG_S

SEAMS = (LOSS, ADVANTAGE, KEEP_GROUP, REWARD, ENGINE, FAMILY)
TYPES = {ENGINE: "EngineKind", FAMILY: "Family"}
MODULE = """
from pydantic import BaseModel
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.hf.families import Family

NUMBER = 3
OTHER = Family("other", qk_norm=True)
FINE_ENGINE = EngineKind("mine", specs="own_parts:specs")
BAD_SPECS = EngineKind("mine", specs="own_parts:no_parameters")
NO_SPECS = EngineKind("mine", specs="own_parts:missing")

class Options(BaseModel):
    beta: float = 0.5

def loss(inputs, options: Options): return inputs, options
def untyped_loss(inputs, options): return inputs, options
def late_loss(inputs, options: "Options"): return inputs, options
def unreadable_loss(inputs, options: "Nothing"): return None
def advantage(rewards_G): return rewards_G
def keep(group, config): return True
def judge(response): return 1.0
def specs(config, model_path, logs, ports, share): return []
def no_parameters(): return None
def four(a, b, c, d): return None
def others(answer, other): return None
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_parts.py").write_text(MODULE)
    (tmp_path / "broken_parts.py").write_text("import own_parts\nown_parts.NUMBER / 0\n")
    (tmp_path / "leaving_parts.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_parts", "broken_parts", "leaving_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    code = cli.main(["check", "demo", f"reward.timeout_s={HANG_S}", *overrides])
    lines = capsys.readouterr().err.splitlines()
    assert code == (2 if lines else 0)
    return lines


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.setting)
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere_to_be_found:f", "importing nowhere_to_be_found failed: ModuleNotFoundError: No module named"),
        ("broken_parts:f", "importing broken_parts failed: ZeroDivisionError: division by zero"),
        ("leaving_parts:f", "importing leaving_parts failed: SystemExit: 3"),
        ("own_parts:missing", "own_parts.py has no missing"),
        ("own_parts:NUMBER", "int"),
        ("own_parts:no_parameters", "def "),
        ("own_parts:four", "def "),
    ],
)
def test_what_is_wrong_is_one_message(capsys: pytest.CaptureFixture[str], seam: Seam, path: str, reason: str) -> None:
    (line,) = check(capsys, f"{seam.setting}={path}")
    assert line.startswith(f'bapo: {seam.setting}="{path}": ')
    assert line.endswith(f"Expected: {seam.expected}")
    assert (f"of type function, not {TYPES[seam]}" if seam in TYPES and reason == "def " else reason) in line


@pytest.mark.parametrize("path", ["math:sqrt", "own_parts:others"])
@pytest.mark.parametrize("seam", [LOSS, ADVANTAGE, KEEP_GROUP, ENGINE_SPECS], ids=lambda seam: seam.expected)
def test_the_names_of_the_parameters_tell_a_function_of_another_kind(seam: Seam, path: str) -> None:
    with pytest.raises(UserError, match=f"which does not fit: the parameters are {seam.parameters[0]}"):
        seam.load(path)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.setting)
def test_other_names_are_refused(capsys: pytest.CaptureFixture[str], seam: Seam) -> None:
    for name in ("mine", "my_module:", ":f", "my-module:f", "a:b:c"):
        (line,) = check(capsys, f"{seam.setting}={name}")
        assert f'{seam.setting} must be "{seam.names[0]}"' in line
        assert f'got "{name}"' in line


def test_all_five_pass_and_fail_together(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"loss.name": "loss", "advantage.kind": "advantage", "reward.kind": "judge", "rollout.keep_group": "keep"}
    assert (
        check(capsys, "rollout.engine=own_parts:FINE_ENGINE", *(f"{k}=own_parts:{v}" for k, v in names.items())) == []
    )
    assert len(check(capsys, *(f"{setting}=own_parts:missing" for setting in names))) == 4


def test_a_family_is_for_models_of_its_type(capsys: pytest.CaptureFixture[str], parts: Path) -> None:
    """A wrong one is one message, and says nothing of what depends on it, such as an unknown model_type."""
    (line,) = check(capsys, "model.family=own_parts:OTHER")
    assert line == (
        "bapo: model.family=\"own_parts:OTHER\" is for model_type 'other', and the config.json of model.path='demo' "
        "has 'qwen3'; leave model.family out, or set model.path to a model of that type"
    )
    shutil.copytree(demo_model_path(), parts / "other")
    config = json.loads((parts / "other" / "config.json").read_text()) | {"model_type": "other"}
    (parts / "other" / "config.json").write_text(json.dumps(config))
    assert cli.main(["check", "demo", "model.path=other", "model.family=own_parts:OTHER"]) == 0
    assert "bapo:" not in capsys.readouterr().err
    (line,) = check(capsys, "model.path=other", "model.family=own_parts:missing", "parallel.tensor=3")
    assert line.startswith('bapo: model.family="own_parts:missing": ')
    (line,) = check(capsys, "model.path=other")
    assert "model_type 'other' is not supported" in line


@pytest.mark.parametrize(("name", "reason"), [("BAD_SPECS", "does not fit"), ("NO_SPECS", "has no missing")])
def test_the_functions_of_an_engine_are_checked_too(capsys: pytest.CaptureFixture[str], name: str, reason: str) -> None:
    (line,) = check(capsys, f"rollout.engine=own_parts:{name}")
    assert reason in line
    assert line.endswith(f"Expected: {ENGINE_SPECS.expected}")


@pytest.mark.parametrize("name", ["loss", "late_loss"])
def test_options_are_checked_by_the_type_that_the_loss_names(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (line,) = check(capsys, f"loss.name=own_parts:{name}", "loss.options.beta=big")
    assert line.startswith("bapo: loss.options.beta: ")
    assert line.endswith(f"""got 'big' (options of loss.name="own_parts:{name}")""")
    _, options = CustomLoss(name=f"own_parts:{name}", options={"beta": 2}).function("inputs")
    assert options.beta == 2.0
    assert type(options).__name__ == "Options"


def test_untyped_options_are_a_dict() -> None:
    assert CustomLoss(name="own_parts:untyped_loss", options={"x": 1}).function(5) == (5, {"x": 1})
    with pytest.raises(UserError, match="annotation Nothing of its options cannot be read"):
        _ = CustomLoss(name="own_parts:unreadable_loss").function
