"""The examples of docs/extending.md work as the page says, and docs/coming-from.md names settings that exist."""

import importlib
import json
import math
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from bapo_megatron import cli
from bapo_megatron.algorithms.advantages import GroupView, SampleView
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.advantages import advantage_function
from bapo_megatron.config.engines import engine_kind
from bapo_megatron.config.families import own_family
from bapo_megatron.config.load import load_config
from bapo_megatron.config.losses import CustomLoss
from bapo_megatron.config.page import metrics_page
from bapo_megatron.config.paths import schema
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.hf.shape import hf_tensors, load_hf_config, model_shape
from bapo_megatron.metrics import METRICS
from bapo_megatron.report.gallery import PANELS, with_named
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.rewards.shaping import group_filter
from bapo_megatron.runs.history import read_history
from bapo_megatron.types import ClipBounds, Ended, Group, Prompt, Sample
from tests.distributed import HANG_S
from tests.hf_models import SIZES, VOCAB_SIZE, save_randomised
from tests.loss_names import losses_with
from tests.unit.loss_inputs import loss_inputs, sums_of

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGES = ("extending.md", "coming-from.md", "turns.md", "agents.md")
EXTENDING, COMING_FROM, TURNS, AGENTS = ((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
OVERRIDES = re.search(r"bapo demo ((?:.*\\\n)*.*)", EXTENDING).group(1).replace("\\\n", " ").split()
KEEP_NEAR = ("loss.name=keep_near:KEEP_NEAR", "loss.options.max_distance=0.2")
REPEATS = ('rollout.annotators=["repeats:make"]', "loss.name=repeats:loss")
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


def test_the_page_shows_or_links_every_example() -> None:
    linked = re.findall(r"\(examples/(\w+\.\w+)\)", EXTENDING + TURNS + AGENTS)
    in_prose = {"one_file.py"}  # tests/unit/test_one_file.py
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file() and path.name not in {*linked, *in_prose}:
            assert f"\n{path.read_text(encoding='utf-8')}```" in EXTENDING, path.name


def test_the_chat_calculator_answers_products_and_rewards_the_last_number() -> None:
    import chat_calculator

    def step(text: str) -> dict[str, object]:
        return chat_calculator.step({"text": text, "answer": "1702"}, None)

    config = load_config([str(EXAMPLES / "chat_calculator.toml")], [])
    assert config.data.source == "chat_calculator:products"
    assert config.environment.kind == "chat_calculator:step"
    for row in chat_calculator.products(num=5):
        left, right = re.findall(r"\d+", row["messages"][-1]["content"])
        assert row["answer"] == str(int(left) * int(right))
    assert step("It is 37 * 46 =") == {"messages": [{"role": "tool", "content": "1702"}]}
    assert step("37 x 46=") == {"messages": [{"role": "tool", "content": "Write a product, such as 12*34="}]}
    assert [step(text)["reward"] for text in ("1702", "37 times 46 is 1,702.", "1702 of 12", "")] == [1, 1, 0, 0]


def test_the_commands_pass_one_by_one_and_together(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^    bapo check configs/demo\.toml (.+)$", EXTENDING, re.MULTILINE)
    commands = [command for command in commands if "exaone4" not in command]  # see the test of that family
    assert set(" ".join(commands).split()) == {*OVERRIDES, *KEEP_NEAR, *REPEATS}
    for command in (*commands, " ".join(OVERRIDES)):
        assert check(capsys, *command.split()) == "", command


MISTAKES = {
    "loss.name=cispo:CISPO loss.options.kap=3": "no such setting: loss.options.kap; did you mean loss.options.cap? "
    '(options of loss.name="cispo:CISPO")',
    "loss.name=cispo:CISPO loss.max_drift=0.1": "loss.max_drift is not a setting of your own loss, but of "
    f"{losses_with('max_drift')} (override loss.max_drift=0.1)",
    "advantage.kind=hard_groups:hard_groups": 'advantage.kind="hard_groups:hard_groups": its signature is (group: '
    "bapo_megatron.types.Group, config: bapo_megatron.config.schema.Config) -> bool, which does not fit: the "
    "parameters are group. Expected: def advantage(group: GroupView) -> list[float], one for each sample; or a list "
    "for each, one for each turn",
    "reward.kind=max_rl:max_rl": 'reward.kind="max_rl:max_rl": it asks for group. Expected: def judge(answer, response)'
    " -> float, plain or async, with parameters out of prompt, answer, response, source (they are passed by name)",
    "rollout.engine=nice_engine:engine_specs": 'rollout.engine="nice_engine:engine_specs": it is of type function, not '
    'EngineKind. Expected: an EngineKind, such as KIND = EngineKind("vLLM server", specs="my_vllm.start:engine_specs", '
    "on_gpus=True)",
    "model.family=seed_oss:FAMILY": "model.family=\"seed_oss:FAMILY\" is for model_type 'seed_oss', and the config.json"
    " of model.path='demo' has 'qwen3'; leave model.family out, or set model.path to a model of that type",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_message(capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    assert check(capsys, *mistake.split()) == f"bapo: {MISTAKES[mistake]}"


def test_the_message_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"    {check(capsys, 'loss.name=cispo:SISPO')}\n" in EXTENDING


def cispo_record(cap: float) -> tuple[torch.Tensor, object]:
    log_probs_R = torch.tensor([-0.5, -1.0, -2.0, math.nan], requires_grad=True)
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=torch.tensor([-2.5, -1.5, -1.0, 0.0]),  # ratios e^2, e^.5, e^-1
        advantages_R=torch.tensor([1.0, -2.0, 0.5, math.nan]),
        mask_R=torch.tensor([True, True, True, False]),
        bounds=ClipBounds(math.nan, math.nan, math.nan, saturated=False, num_moves=0),
    )
    return log_probs_R, CustomLoss(name="cispo:CISPO", options={"cap": cap}).tokens(inputs)


def test_cispo_keeps_the_gradient_of_cut_tokens() -> None:
    log_probs_R, tokens = cispo_record(cap=3.0)
    weights = [3.0 * 1.0, math.exp(0.5) * -2.0, math.exp(-1.0) * 0.5, 0.0]
    want = [-weight * log_prob for weight, log_prob in zip(weights, (-0.5, -1.0, -2.0, 0.0), strict=True)]
    torch.testing.assert_close(tokens.loss_R.detach(), torch.tensor(want))
    assert tokens.cut_R.tolist() == [True, False, False, False]
    tokens.loss_R.sum().backward()
    torch.testing.assert_close(log_probs_R.grad, -torch.tensor(weights))


def test_the_metric_is_summed_recorded_and_drawn(tmp_path: Path) -> None:
    (metric,) = own = CustomLoss(name="cispo:CISPO").metrics
    assert metric.key == METRIC
    assert METRIC not in METRICS
    assert METRIC not in metrics_page(), "the page has the package's"
    assert metric.panel in {other.panel for other in METRICS.values()}
    tokens = cispo_record(cap=3.0)[1]
    assert sums_of(tokens, own=own)[METRIC] == 1.0
    assert METRIC not in sums_of(tokens)

    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, METRIC: 0.25}) + "\n")
    assert with_named(PANELS, [read_history(tmp_path)]) == PANELS
    (tmp_path / "own_metrics.json").write_text(json.dumps([asdict(metric)]))
    (panel,) = set(with_named(PANELS, [read_history(tmp_path)])) - set(PANELS)
    assert f"{panel.section} / {panel.title}" == metric.panel
    assert panel.curves[-1].metric == METRIC
    (tmp_path / "own_metrics.json").write_text("[{")
    with pytest.raises(UserError, match=r"own_metrics.json is damaged .*; remove it"):
        read_history(tmp_path)


def test_max_rl_is_the_deviation_over_the_mean() -> None:
    def max_rl(*rewards: float) -> list[float]:
        group = GroupView(Prompt(0, (1,), "", "", "chains"), tuple(SampleView(r, (1,), "stop") for r in rewards))
        return [value for (value,) in advantage_function("max_rl:max_rl")(group)]

    assert max_rl(1.0, 0.0, 0.0, 0.0) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert max_rl(0.0, 0.0, 0.0, 0.0) == [0.0] * 4
    assert max_rl(1.0, 1.0, 1.0, 1.0) == [0.0] * 4


def test_the_last_number_is_judged() -> None:
    last_number = importlib.import_module("last_number").last_number
    assert [last_number("-2", text) for text in ("3+5=1,1*2=-2,", "-2 or 7", "no")] == [1.0, 0.1, 0.0]


def test_hard_groups_are_kept() -> None:
    prompt = Prompt(0, (1,), "", "", "chains")

    def group(*rewards: float) -> Group:
        return Group(
            prompt, tuple(Sample.of(f"0.{i}", prompt, need=Ended("stop", reward)) for i, reward in enumerate(rewards))
        )

    keeps = group_filter(load_config(["demo"], ["rollout.keep_group=hard_groups:hard_groups"]))
    assert [keeps(group(*rewards)) for rewards in ((0, 1), (0, 1, 1, 1))] == [True, True]
    assert [keeps(group(*rewards)) for rewards in ((0, 0), (1, 1), (0, 1, 1, 1, 1))] == [False] * 3


def test_the_engine_is_the_embedded_one_at_a_low_priority(tmp_path: Path) -> None:
    nice_engine = importlib.import_module("nice_engine")
    config = load_config(["demo"], ["rollout.engine=nice_engine:KIND"])
    assert engine_kind(config.rollout.engine) is nice_engine.KIND
    (spec,) = nice_engine.engine_specs(
        resolve(config, demo_model_path()), [tmp_path / "log"], [30000], Placement(num_servers=1).on()
    )
    assert (spec.url, spec.log) == ("http://127.0.0.1:30000", tmp_path / "log")
    assert spec.command[:7] == ["nice", "-n", "10", sys.executable, "-P", "-m", "bapo_megatron.engines.embedded"]


@torch.no_grad()
def test_the_family_has_the_tensors_and_logits_of_transformers(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 2}
    reference = save_randomised(transformers.SeedOssConfig(**sizes, head_dim=10), tmp_path).eval()
    hf_config = load_hf_config(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        model_shape(hf_config)
    assert str(refused.value).startswith("model_type 'seed_oss' is not supported; the families are gemma, granite, ")

    own = own_family(load_config(["demo"], ["model.family=seed_oss:FAMILY"]).model.family)
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


def test_the_page_builds_a_family_with_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run what the page shows; tests/integration/test_hf_roundtrip.py splits the block over two tensor ranks."""
    (shown,) = re.findall(r"((?:^    (?:python|bapo) .*exaone4.*\n)+)", EXTENDING, re.MULTILINE)
    for name in ("docs", "configs"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    monkeypatch.chdir(tmp_path)
    for line in shown.splitlines():
        program, *arguments = line.split()
        if program == "python":
            runpy.run_path(*arguments)
        else:
            assert cli.main(arguments) == 0, line
    told = capsys.readouterr().out
    assert float(re.search("largest difference: (.*)", told)[1]) < 1e-5
    assert "exaone4, 2 layers, 76,160 parameters" in told
    with pytest.raises(CheckpointError, match="sliding_window=16 is not supported: only checkpoints with null"):
        model_shape(load_hf_config("tiny-exaone4") | {"sliding_window": 16}, own=own_family("exaone4:FAMILY"))


def test_every_setting_named_exists() -> None:
    known = {".".join(path) for path in schema()}
    rows = [line.strip().strip("|").split("|") for line in COMING_FROM.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[-1].strip() != "here" and "`" in row[-1]]  # without heads and plain answers
    assert len(rows) >= 200
    for row in rows:
        named = {found for found in re.findall(r"`([a-z0-9_.]+)[`=]", row[-1]) if "." in found}
        assert named <= known, f"{named - known} in {row}"
    sections = {path[0] for path in schema()}
    for found in re.findall(r"`([a-z]+\.[a-z_]+)", EXTENDING):
        section, key = found.split(".")
        assert section not in sections or key in ("md", "py", "toml") or found in known, found
