"""The examples of docs/extending.md work as the page says, and docs/coming-from.md names settings that exist."""

import importlib
import importlib.util
import math
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from bapo_megatron import cli, metrics
from bapo_megatron.algorithms.advantages import advantages_of
from bapo_megatron.algorithms.losses import policy_loss
from bapo_megatron.config.load import load_config
from bapo_megatron.config.paths import schema
from bapo_megatron.config.schema_loss import CustomLoss
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.shape import hf_tensors, load_hf_config, model_shape
from bapo_megatron.learner import metrics as learner_metrics
from bapo_megatron.rewards.shaping import group_filter
from bapo_megatron.types import ClipBounds, Group, Prompt, Trajectory
from tests.distributed import HANG_S
from tests.hf_models import SIZES, VOCAB_SIZE, save_randomised
from tests.unit.loss_inputs import loss_inputs, sums_of

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
EXTENDING, COMING_FROM = ((DOCS / name).read_text(encoding="utf-8") for name in ("extending.md", "coming-from.md"))
OVERRIDES = re.search(r"bapo demo ((?:.*\\\n)*.*)", EXTENDING).group(1).replace("\\\n", " ").split()
METRIC = "loss/cispo_cut_share"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))  # for judge processes
    monkeypatch.syspath_prepend(str(EXAMPLES))


def check(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    code = cli.main(["check", "demo", f"reward.timeout_s={HANG_S}", *overrides])
    message = capsys.readouterr().err
    assert code == (2 if message else 0)
    return message.replace(f"{DOCS.parent}/", "").rstrip("\n")


def test_the_page_shows_every_example_in_full() -> None:
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            assert f"\n{path.read_text(encoding='utf-8')}```" in EXTENDING, path.name


def test_the_commands_pass_one_by_one_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^    bapo check configs/demo\.toml (.+)$", EXTENDING, re.MULTILINE)
    assert len(commands) == 5
    assert set(" ".join(commands).split()) == set(OVERRIDES)
    for command in (*commands, " ".join(OVERRIDES)):
        assert check(capsys, *command.split()) == "", command


@pytest.mark.parametrize(
    "mistake",
    [
        "loss.name=cispo:sispo",
        "loss.name=cispo:cispo loss.options.kap=3",
        "advantage.kind=hard_groups:hard_groups",
        "reward.kind=max_rl:max_rl",
        "rollout.engine=nice_engine:engine_specs",
        "model.family=seed_oss:FAMILY",
    ],
)
def test_mistakes_give_the_messages_on_the_page(capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    assert f"    {check(capsys, *mistake.split())}\n" in EXTENDING


def cispo_record(cap: float) -> tuple[torch.Tensor, object]:
    log_probs_R = torch.tensor([-0.5, -1.0, -2.0, math.nan], requires_grad=True)
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=torch.tensor([-2.5, -1.5, -1.0, 0.0]),  # ratios e^2, e^.5, e^-1
        advantages_R=torch.tensor([1.0, -2.0, 0.5, math.nan]),
        mask_R=torch.tensor([True, True, True, False]),
        bounds=ClipBounds(math.nan, math.nan, math.nan, saturated=False, num_moves=0),
    )
    return log_probs_R, policy_loss(inputs, CustomLoss(name="cispo:cispo", options={"cap": cap}))


def test_cispo_keeps_the_gradient_of_cut_tokens() -> None:
    log_probs_R, tokens = cispo_record(cap=3.0)
    weights = [3.0 * 1.0, math.exp(0.5) * -2.0, math.exp(-1.0) * 0.5, 0.0]
    want = [-weight * log_prob for weight, log_prob in zip(weights, (-0.5, -1.0, -2.0, 0.0), strict=True)]
    torch.testing.assert_close(tokens.loss_R.detach(), torch.tensor(want))
    assert tokens.cut_R.tolist() == [True, False, False, False]
    tokens.loss_R.sum().backward()
    torch.testing.assert_close(log_probs_R.grad, -torch.tensor(weights))


def load_metrics(folder: Path, addition: str) -> ModuleType:
    """Import a copy of metrics.py beside a metrics.toml with a further table."""
    source = Path(metrics.__file__)
    shutil.copy(source, folder)
    table = source.with_suffix(".toml").read_text(encoding="utf-8")
    (folder / "metrics.toml").write_text(f"{table}\n{addition}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("metrics_with_one_more", folder / "metrics.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_the_metric_is_documented_summed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extended = load_metrics(tmp_path, (EXAMPLES / "cispo_metrics.toml").read_text(encoding="utf-8"))
    (new,) = extended.METRICS.keys() - metrics.METRICS.keys()
    assert new == METRIC
    assert f"| `{METRIC}` | share |" in extended.page()
    metric = extended.METRICS[METRIC]
    assert metric.panel in {other.panel for other in metrics.METRICS.values()}
    monkeypatch.setattr(learner_metrics, "_MEANS", [metric])
    assert sums_of(cispo_record(cap=3.0)[1]) == {METRIC: 1.0}
    with pytest.raises(TypeError, match="unexpected keyword argument 'averaged'"):
        load_metrics(tmp_path, f'["{METRIC}"]\nunit = "share"\nmeaning = "."\naveraged = true\n')


def test_max_rl_is_the_deviation_over_the_mean() -> None:
    max_rl = advantages_of("max_rl:max_rl")
    torch.testing.assert_close(max_rl(torch.tensor([1.0, 0.0, 0.0, 0.0])), torch.tensor([3.0, -1.0, -1.0, -1.0]))
    assert max_rl(torch.zeros(4)).tolist() == [0.0] * 4
    assert max_rl(torch.ones(4)).tolist() == [0.0] * 4


def test_the_last_number_is_judged() -> None:
    last_number = importlib.import_module("last_number").last_number
    assert [last_number("-2", text) for text in ("3+5=1,1*2=-2,", "-2 or 7", "no")] == [1.0, 0.1, 0.0]


def test_hard_groups_are_kept() -> None:
    prompt = Prompt(0, (1,), "", "", "chains")

    def group(*rewards: float) -> Group:
        return Group(prompt, tuple(Trajectory(f"0.{i}", prompt, reward=reward) for i, reward in enumerate(rewards)))

    keeps = group_filter(load_config(["demo"], ["rollout.keep_group=hard_groups:hard_groups"]))
    assert [keeps(group(*rewards)) for rewards in ((0, 1), (0, 1, 1, 1))] == [True, True]
    assert [keeps(group(*rewards)) for rewards in ((0, 0), (1, 1), (0, 1, 1, 1, 1))] == [False] * 3


def test_the_engine_is_the_embedded_one_at_a_low_priority(tmp_path: Path) -> None:
    nice_engine = importlib.import_module("nice_engine")
    config = load_config(["demo"], ["rollout.engine=nice_engine:KIND"])
    assert config.rollout.engine_kind is nice_engine.KIND
    (spec,) = nice_engine.engine_specs(config, tmp_path, [tmp_path / "log"], [30000], EngineShare(1, first_gpu=0))
    assert (spec.url, spec.log) == ("http://127.0.0.1:30000", tmp_path / "log")
    assert spec.command[:6] == ["nice", "-n", "10", sys.executable, "-m", "bapo_megatron.engines.embedded"]


@torch.no_grad()
def test_the_family_has_the_tensors_and_logits_of_transformers(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 2}
    reference = save_randomised(transformers.SeedOssConfig(**sizes, head_dim=10), tmp_path).eval()
    hf_config = load_hf_config(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        model_shape(hf_config)
    assert f"    bapo: {refused.value}\n" in EXTENDING

    own = load_config(["demo"], ["model.family=seed_oss:FAMILY"]).model.own_family
    assert own is not None
    shape = model_shape(hf_config, own=own)
    assert (shape.qkv_bias, shape.out_bias, shape.mlp_bias) == (True, False, False)
    assert hf_tensors(shape) == {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    defaults = transformers.SeedOssConfig().to_dict()
    for key, value in own.defaults.items():
        assert defaults[key] == value, key

    ids_T = torch.randint(VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(0))
    model = Model.from_pretrained(tmp_path, max_len=16, own=own)
    logits = model.prefill(ids_T[None], torch.tensor([9]), model.new_cache(num_rows=1, max_len=16), 0)
    torch.testing.assert_close(logits, reference(ids_T[None]).logits[:, -1], rtol=0, atol=1e-5)


def test_every_setting_named_exists() -> None:
    known = {".".join(path) for path in schema()}
    rows = [line.strip().strip("|").split("|") for line in COMING_FROM.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip()]  # without the heads
    assert len(rows) >= 40
    for row in rows:
        assert len(row) == 3, row
        named = {found for found in re.findall(r"`([a-z0-9_.]+)", row[2]) if "." in found}
        assert named, row
        assert named <= known, f"{named - known} in {row}"
    sections = {path[0] for path in schema()}
    for found in re.findall(r"`([a-z]+\.[a-z_]+)", EXTENDING):
        section, key = found.split(".")
        assert section not in sections or key in ("md", "py", "toml") or found in known, found
