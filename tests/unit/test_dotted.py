"""User functions at dotted paths: whatever is wrong with one is a single message of `bapo check`."""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.advantages import ADVANTAGE
from bapo_megatron.config.dotted import KEEP_GROUP, REWARD, Seam
from bapo_megatron.config.engines import ENGINE, ENGINE_CLIENT, ENGINE_SPECS, engine_kind
from bapo_megatron.config.families import FAMILY
from bapo_megatron.config.load import load_config
from bapo_megatron.config.losses import LOSS, CustomLoss
from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.config.sources import SOURCE
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.errors import UserError
from tests.distributed import HANG_S

TINY = ("train.num_steps=1", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.groups_in_flight=2")
TINY += ("rollout.max_response_tokens=16", "train.minibatches_per_step=1", "parallel.tensor=1")
SEAMS = (LOSS, ADVANTAGE, KEEP_GROUP, REWARD, ENGINE, FAMILY)
TYPES = {ENGINE: "EngineKind", FAMILY: "Family"}
MODULE = """
from pydantic import BaseModel
from dataclasses import dataclass
from bapo_megatron.algorithms.losses import TokenLoss
from bapo_megatron.algorithms.update_rules import NoBounds
from bapo_megatron.config.losses import Loss, StepStream
from bapo_megatron.tokens import TokenStream
from bapo_megatron.config.schema_loss import RatioOptions
from bapo_megatron.metrics import Metric
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.hf.families import Family

NUMBER = 3
OTHER = Family("other", qk_norm=True)
FINE_ENGINE = EngineKind("mine", specs="own_parts:specs")
ATTACHED = EngineKind("mine", needs="urls")
RECORDED = EngineKind("mine", samples=False, needs="recordings")
LIKE_SGLANG = EngineKind("mine", specs="own_parts:specs", section="sglang")
BAD_SPECS = EngineKind("mine", specs="own_parts:no_parameters")
NO_SPECS = EngineKind("mine", specs="own_parts:missing")
BAD_CLIENT = EngineKind("mine", specs="own_parts:specs", client="own_parts:no_parameters")
NO_CLIENT = EngineKind("mine", specs="own_parts:specs", client="own_parts:missing")
WRONG_CLIENT = EngineKind("mine", specs="own_parts:specs", client="own_parts:client")
FAILING_CLIENT = EngineKind("mine", specs="own_parts:specs", client="own_parts:failing_client")
def failing_client(url, config, vocab_size, key): raise KeyError("no such option")

class Options(BaseModel, extra="forbid"):
    beta: float = 0.5

@dataclass(frozen=True)
class Record(TokenLoss):
    mine_R: object = None

def of_tokens(inputs, options):
    is_real = hasattr(inputs, "log_probs_R")
    return Record(inputs, -inputs.log_probs_R) if is_real else (inputs, options)
def loss(inputs, options: Options): return of_tokens(inputs, options)
class Ratios(RatioOptions):
    beta: float = 0.5

class Rule(NoBounds):
    def table(self, values, so_far): return values.log_probs_R.sum().double()

def ratio_loss(inputs, options: Ratios): return of_tokens(inputs, options)
def metric(**changes):
    told = {"key": "loss/mine", "unit": "share", "meaning": "Mine.", "tokens": "mean", "of": "mine_R"}
    return Metric(**told | changes)
LOSS = Loss(loss, metrics=(metric(), metric(key="loss/of_rule", tokens=None, of="")), rule=Rule)
class Masks(Rule):
    masks = True

LATE_MASKS = Loss(loss, rule=Masks, reads="earlier updates")
NO_FUNCTION = Loss(3)
OTHER_FUNCTION = Loss(lambda answer, other: None)
TAKEN = Loss(loss, metrics=(metric(key="loss/entropy"),))
NO_RULE = Loss(loss, metrics=(metric(tokens=None, of=""),))
OF_NOTHING = Loss(loss, metrics=(metric(of=""),))
NO_NAME = Loss(loss, metrics=(metric(key="loss/\\x1b]0;owned"),))
LONG_NAME = Loss(loss, metrics=(metric(key="loss/" + 100 * "a"),))
LAST = Loss(loss, metrics=(metric(tokens=None),))
NO_SECTION = Loss(loss, metrics=(metric(panel="Clip fraction"),))
STEP = TokenStream("mine", "float32", kept=False)
KEPT = Loss(loss, streams=(StepStream(TokenStream("mine", "float32"), loss),))
TWICE = Loss(loss, streams=(StepStream(STEP, loss), StepStream(STEP, loss)))

def untyped_loss(inputs, options): return of_tokens(inputs, options)
def late_loss(inputs, options: "Options"): return of_tokens(inputs, options)
def unreadable_loss(inputs, options: "Nothing"): return None
def advantage(group): return [0.0 for sample in group.samples]
def keep(group, config): return True
def judge(response): return 1.0
def specs(run, logs, ports, here): return []
def client(url, config, vocab_size, key): return Options()
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
@pytest.mark.parametrize(
    "seam", [LOSS, ADVANTAGE, KEEP_GROUP, ENGINE_SPECS, ENGINE_CLIENT], ids=lambda seam: seam.expected
)
def test_the_names_of_the_parameters_tell_a_function_of_another_kind(seam: Seam, path: str) -> None:
    with pytest.raises(UserError, match=f"which does not fit: the parameters are {seam.parameters[0]}"):
        seam.load(path)


@pytest.mark.parametrize("seam", [*SEAMS, SOURCE], ids=lambda seam: seam.setting)
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
    """A wrong family gives one message, and none about what depends on it, such as an unknown model_type."""
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


@pytest.mark.parametrize(("seam", "part"), [(ENGINE_SPECS, "SPECS"), (ENGINE_CLIENT, "CLIENT")])
@pytest.mark.parametrize(("name", "reason"), [("BAD", "does not fit"), ("NO", "has no missing")])
def test_the_functions_of_an_engine_are_checked_too(
    capsys: pytest.CaptureFixture[str], seam: Seam, part: str, name: str, reason: str
) -> None:
    (line,) = check(capsys, f"rollout.engine=own_parts:{name}_{part}")
    assert reason in line
    assert line.endswith(f"Expected: {seam.expected}")


def test_the_settings_that_an_engine_needs_are_those_that_act(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = check(capsys, "rollout.engine=own_parts:ATTACHED")
    assert 'rollout.engine="own_parts:ATTACHED" needs rollout.urls' in line
    (line,) = check(capsys, "rollout.engine=own_parts:RECORDED")
    assert 'rollout.engine="own_parts:RECORDED" needs rollout.recorded_from' in line
    assert check(capsys, "rollout.engine=own_parts:ATTACHED", 'rollout.urls=["http://127.0.0.1:30000"]') == []
    settings = ["sglang.extra.mem_fraction_static=0.5"]
    assert not any("no effect" in line for line in check(capsys, "rollout.engine=own_parts:LIKE_SGLANG", *settings))


def test_looking_at_settings_imports_nothing(parts: Path) -> None:
    """Every property of a section can be read while the modules that it names cannot be imported."""
    names = {"rollout.engine": "E", "model.family": "F", "advantage.kind": "f", "rollout.keep_group": "f"}
    config = load_config([], [f"{setting}=broken_parts:{name}" for setting, name in names.items()])
    for section in (config, *(getattr(config, name) for name in type(config).model_fields)):
        kind = type(section)
        names_of = (name for name in dir(kind) if not name.startswith("_"))
        properties = [name for name in names_of if isinstance(inspect.getattr_static(kind, name), property)]
        assert all(hasattr(section, name) for name in properties)
    assert not {"own_parts", "broken_parts"} & sys.modules.keys()
    with pytest.raises(UserError, match="ZeroDivisionError"):
        engine_kind(config.rollout.engine)


def test_a_client_that_is_not_an_engine_is_named_before_anything_is_sent() -> None:
    config = RolloutConfig(engine="own_parts:WRONG_CLIENT")
    with pytest.raises(UserError) as raised:
        ConnectedEngines.connect(config, engine_kind(config.engine), ["http://127.0.0.1:1"], 10, None)
    message = str(raised.value)
    assert message.startswith(
        'rollout.engine="own_parts:client": it returned an object of type Options, which has no url, '
    )
    assert "generate_many" in message
    assert "transport.take" in message
    assert "\n" not in message
    assert message.endswith(f"Expected: {ENGINE_CLIENT.expected}")


def test_a_client_that_fails_is_named_too() -> None:
    config = RolloutConfig(engine="own_parts:FAILING_CLIENT")
    with pytest.raises(UserError) as raised:
        ConnectedEngines.connect(config, engine_kind(config.engine), ["http://127.0.0.1:1"], 10, None)
    message = "rollout.engine=\"own_parts:failing_client\": it failed: KeyError: 'no such option'. Expected: "
    assert str(raised.value) == message + ENGINE_CLIENT.expected


@pytest.mark.parametrize("name", ["loss", "late_loss"])
def test_options_are_checked_by_the_type_that_the_loss_names(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (line,) = check(capsys, f"loss.name=own_parts:{name}", "loss.options.beta=big")
    assert line == f'bapo: loss.options.beta must be a number, got "big" (options of loss.name="own_parts:{name}")'
    _, options = CustomLoss(name=f"own_parts:{name}", options={"beta": 2}).tokens("inputs")
    assert options.beta == 2.0
    assert type(options).__name__ == "Options"


def test_untyped_options_are_a_dict() -> None:
    assert CustomLoss(name="own_parts:untyped_loss", options={"x": 1}).tokens(5) == (5, {"x": 1})
    with pytest.raises(UserError, match="annotations of its function cannot be read: NameError"):
        _ = CustomLoss(name="own_parts:unreadable_loss").function_options


@pytest.mark.parametrize("name", ["loss", "untyped_loss", "LOSS", "ratio_loss"])
@pytest.mark.parametrize("setting", ["max_drift=0.1", "importance_cap=1.5", "proximal=learner"])
def test_a_loss_of_the_users_own_has_no_settings_that_its_function_cannot_read(
    capsys: pytest.CaptureFixture[str], name: str, setting: str
) -> None:
    (line,) = check(capsys, f"loss.name=own_parts:{name}", f"loss.{setting}")
    key = setting.partition("=")[0]
    assert line.startswith(f'bapo: loss.{key} is not a setting of your own loss, but of loss.name="bapo", ')


def test_options_that_are_ratio_options_are_read_by_the_learner_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "loss.name=own_parts:ratio_loss", "loss.options.max_drift=0.1") == []
    options = {"proximal": "learner", "importance_cap": 1.5}
    loss = CustomLoss(name="own_parts:ratio_loss", options=options)
    assert loss.scores_proximal
    assert loss.ratio_options.importance_cap == 1.5
    assert not CustomLoss(name="own_parts:ratio_loss").scores_proximal
    assert not CustomLoss(name="own_parts:untyped_loss", options=options).scores_proximal
    (line,) = check(capsys, "loss.name=own_parts:ratio_loss", "loss.options.importance_cap=0.5")
    assert line.startswith("bapo: loss.options.importance_cap must be at least 1, got 0.5 (options of ")


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("loss", "bata=1", "; did you mean loss.options.beta?"),
        ("ratio_loss", "max_drfit=1", "; did you mean loss.options.max_drift?"),
        ("loss", "unlike=1", ""),
    ],
)
def test_a_mistyped_option_is_answered_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], name: str, option: str, said: str
) -> None:
    (line,) = check(capsys, f"loss.name=own_parts:{name}", f"loss.options.{option}")
    key = option.partition("=")[0]
    assert line == f'bapo: no such setting: loss.options.{key}{said} (options of loss.name="own_parts:{name}")'


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NO_FUNCTION", "it is of type int, which is not callable"),
        ("OTHER_FUNCTION", "the parameters are inputs, options"),
        ("TAKEN", "its metric loss/entropy is one of the package's"),
        ("OF_NOTHING", "its metric loss/mine needs tokens="),
        ("NO_RULE", "its metric loss/mine needs tokens="),
        ("NO_NAME", 'needs a key like "loss/cut_share", of at most 100 letters'),
        ("LONG_NAME", 'needs a key like "loss/cut_share", of at most 100 letters'),
        ("LAST", "its metric loss/mine needs tokens="),
        ("NO_SECTION", 'which must be "SECTION / FIGURE", of the report or new ones'),
        ("LATE_MASKS", 'its rule masks tokens, which needs reads="update", not "earlier updates"'),
        ("KEPT", "stream mine: a step computes rows of sampled tokens, of all layers"),
        ("TWICE", "stream mine: the name is taken"),
        ("LOSS loss.search_bounds=true", "leave loss.search_bounds out"),
    ],
)
def test_what_is_wrong_with_a_declared_loss_is_one_message(
    capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert check(capsys, "loss.name=own_parts:LOSS") == []
    (line,) = check(capsys, *f"loss.name=own_parts:{name}".split())
    assert line.startswith(f'bapo: loss.name="own_parts:{name.split()[0]}": ')
    assert reason in line


def test_a_module_that_another_hides_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("random", "json/decoder", "numpy/__init__", "needs_random"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            "from random import judge\n" if name == "needs_random" else "def judge(answer, response): return 1.0\n"
        )
    for path, hidden in (
        ("random:judge", "random.py is hidden by the module random of "),
        ("json.decoder:judge", "json/decoder.py is hidden by the module json.decoder of "),
        ("numpy:judge", "numpy/__init__.py is hidden by the module numpy of "),
        ("needs_random:judge", "cannot import name 'judge' from 'random'"),
        ("needs_random:judge", "random.py is hidden by the module random of "),
    ):
        assert cli.main(["check", "demo", f"reward.kind={path}"]) == 2
        assert hidden in capsys.readouterr().err


def test_a_module_is_named_without_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unit_judge.py").write_text("def judge(answer, response): return 1.0\n")
    assert cli.main(["check", "demo", "reward.kind=unit_judge.py:judge"]) == 2
    assert 'a module has no .py in its name; write "unit_judge:judge"' in capsys.readouterr().err


def test_every_process_is_started_without_the_working_folder_on_its_path() -> None:
    package = Path(cli.__file__).parent
    files = [file for file in package.rglob("*") if file.suffix in (".py", ".jinja") and file.parent.name != "runtime"]
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            assert not re.search(r'executable, "-[mc]"|python \| quoted }} -m', line), f"{file}: {line}"


def hidden(folder: Path, names: Collection[str]) -> None:
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('hidden: {name}')\n")


def started(folder: Path, *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, *words, *TINY, f"run.dir={folder / 'runs'}", "run.name=one"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_files_named_as_modules_of_python_and_of_packages_hide_none(tmp_path: Path) -> None:
    names = {name for name in sys.stdlib_module_names if importlib.util.find_spec(name) is not None}
    hidden(tmp_path, names | {"torch", "numpy", "megatron", "transformers", "bapo_megatron"})
    (tmp_path / "my_judge.py").write_text("import random\ndef judge(answer, response): return random.random()\n")
    started(tmp_path, "-P", "-m", "bapo_megatron", "train", "demo", "reward.kind=my_judge:judge")


@pytest.mark.slow
def test_the_command_as_a_module_finds_the_same_modules(tmp_path: Path) -> None:
    hidden(tmp_path, ("random", "tokenize", "logging", "numpy", "torch", "socket"))
    started(tmp_path, "-m", "bapo_megatron", "check", "demo")
