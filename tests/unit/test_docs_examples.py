"""The worked examples of docs/how-to, each used as its page says."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig

from bapo_megatron import cli, metrics
from bapo_megatron.algorithms.losses import fixed_bounds
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema_loss import CustomLoss
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.learner import metrics as learner_metrics
from bapo_megatron.rewards.judges import Judge
from tests.unit.loss_inputs import loss_inputs, sums_of

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)
    for example in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, example.stem, raising=False)


@pytest.mark.parametrize(
    "settings",
    [
        ["loss.name=cispo:cispo"],
        ["loss.name=cispo:cispo", "loss.options.cap=4"],
        ["reward.kind=brief:judge"],
        ["rollout.engine=nice_engine:KIND"],
    ],
    ids=" ".join,
)
def test_bapo_check_accepts_an_example(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo", *settings]) == 0, capsys.readouterr().err


def test_options_of_the_loss_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo", "loss.name=cispo:cispo", "loss.options.cap=-1"]) == 2
    assert 'loss.options do not fit loss.name="cispo:cispo": cap: ' in capsys.readouterr().err


def cispo_record():
    """Ratios 1, 3 and a masked token; the cap is 2."""
    from cispo import CispoOptions, cispo

    ratios_R = torch.tensor([1.0, 3.0, 9.0])
    behaviour_R = torch.tensor([-1.0, -2.0, -3.0])
    log_probs_R = (behaviour_R + ratios_R.log()).requires_grad_()
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=behaviour_R,
        advantages_R=torch.tensor([1.0, -1.0, 1.0]),
        mask_R=torch.tensor([True, True, False]),
        bounds=fixed_bounds(CustomLoss(name="cispo:cispo")),
    )
    return cispo(inputs, CispoOptions()), log_probs_R


def test_the_gradient_of_the_loss_is_weight_times_advantage() -> None:
    record, log_probs_R = cispo_record()
    record.loss_R.sum().backward()
    torch.testing.assert_close(log_probs_R.grad, torch.tensor([-1.0, 2.0, 0.0]))
    assert record.weight_capped_R.tolist() == [False, True, False]


def test_a_declared_metric_is_reduced_documented_and_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    ((key, table),) = tomllib.loads((EXAMPLES / "metric.toml").read_text()).items()
    metric = metrics.Metric(key, **table)
    monkeypatch.setattr(learner_metrics, "_MEANS", [*learner_metrics._MEANS, metric])
    record, _ = cispo_record()
    assert sums_of(record)[key] == 1.0
    assert metric.panel in {m.panel for m in metrics.METRICS.values()}, "the figure that the page names exists"


def test_the_judge_prefers_short_answers() -> None:
    import brief

    judge = Judge.of(brief.judge, "brief:judge")
    fields = {"prompt": "3+5=", "answer": "8", "source": "mine"}
    responses = {"It is 8.": 1.0, "x" * 200 + " 8": 0.5, "9": 0.0, "": 0.0}
    assert {text: judge({**fields, "response": text}) for text in responses} == responses


def test_the_engine_starts_the_embedded_server_at_low_priority(tmp_path: Path) -> None:
    import nice_engine

    config = load_config(["demo"], [])
    (spec,) = nice_engine.specs(config, tmp_path, [tmp_path / "engine-0.log"], [30000], EngineShare(1, 0))
    assert spec.url == "http://127.0.0.1:30000"
    assert spec.command[:3] == ["nice", "-n", "19"]


def test_the_family_computes_what_transformers_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seed_oss import SEED_OSS

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "initializer_range": 0.2}
    config = SeedOssConfig(**sizes, **heads, attention_out_bias=True, mlp_bias=True, pad_token_id=0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # so that no bias is zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="'seed_oss' is not supported"):
        Model.from_pretrained(tmp_path, max_len=16)
    monkeypatch.setitem(FAMILIES, "seed_oss", SEED_OSS)
    model = Model.from_pretrained(tmp_path, max_len=16)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    logits_BV = model.prefill(ids, torch.tensor([5]), model.new_cache(num_rows=1, max_len=16), 0)
    with torch.no_grad():
        torch.testing.assert_close(logits_BV, reference(ids).logits[:, -1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_shows_its_example(page: Path) -> None:
    (example,) = re.findall(r'^--8<-- "(.*)"$', page.read_text(), flags=re.MULTILINE)
    assert (EXAMPLES / example).is_file()
