"""A loss, an advantage, a judge, a group filter and an engine of the user's own, in one run of real processes; and
a model family."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bapo_megatron.assets import demo_model_path
from bapo_megatron.convert import convert
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.report.gallery import PANELS, with_named
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.history import read_history
from bapo_megatron.runs.steps import read_metrics
from tests.integration.forked import SMALL
from tests.integration.test_train import bapo

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MODULE = """
from dataclasses import replace

from bapo_megatron.algorithms.objectives.clipped import GrpoLoss
from bapo_megatron.config.base import Section
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.start import embedded_specs

ENGINE = EngineKind("engine of mine", specs="own:specs", client="own:Client")


class Options(Section):
    factor: float = 1.0


def loss(inputs, options: Options):
    if inputs.batch.mask_R.any():
        assert 0 < inputs.bounds.low < inputs.bounds.high, "search_bounds gives the bounds of [bapo]"
    assert options.factor == 0.5
    result = GrpoLoss().tokens(inputs)
    return replace(result, loss_R=options.factor * result.loss_R)


def advantage(group):
    return [sample.reward - 1.0 for sample in group.samples]


def judge(response):
    return float(sum(map(ord, response)) % 5)


def keep(group, config):
    return group.prompt.prompt_id % 2 == 0


class Client(HttpEngine):
    def __init__(self, url, config, vocab_size, key):
        super().__init__(url, request_timeout_s=config.request_timeout_s, vocab_size=vocab_size, key=key)
        self.calls = []
        end = self.transport.end

        async def counted():
            self.calls.append("push")
            await end()

        self.transport.end = counted

    async def generate_many(self, requests):
        self.calls.append("generate")
        return await super().generate_many(requests)

    async def close(self):
        print("client of mine", *self.calls, flush=True)
        await super().close()


def specs(run, logs, ports, here):
    found = embedded_specs(run, logs, ports, here)
    print("specs of mine", len(found), flush=True)
    return found
"""


@pytest.mark.slow
def test_all_five_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODULE)
    options = ("parallel.tensor=1", "train.num_steps=2", "loss.name=own:loss", "loss.search_bounds=true")
    options += ("advantage.kind=own:advantage", "reward.kind=own:judge", "rollout.keep_group=own:keep")
    options += ("loss.options.factor=0.5", "rollout.engine=own:ENGINE", "run.name=own")
    done = bapo("train", "demo", *SMALL, *options)
    assert done.returncode == 0, done.stderr
    assert "specs of mine 1" in done.stdout
    log = RunDir.attach(tmp_path / "runs" / "own").log_path("trainer", 0).read_text()
    (calls,) = [line.split()[3:] for line in log.splitlines() if line.startswith("client of mine")]
    assert calls.count("push") == 3, "the first weights, and one push a step"
    assert calls.count("generate") >= 2, "each step samples"
    rows = read_metrics(tmp_path / "runs" / "own" / "metrics.jsonl")
    assert len(rows) == 2
    assert rows[-1]["ledger/dropped"] > 0, "half of the prompts are turned down"
    assert all(row["reward/mean"] > 0 for row in rows)
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    assert all(0 < row["bapo/low"] < 1 < row["bapo/high"] for row in rows)


@pytest.mark.slow
def test_the_examples_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with the five examples of docs/extending.md; tests/unit/test_docs_examples.py tests what each computes."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    options = ("parallel.tensor=1", "train.num_steps=2", "loss.name=cispo:CISPO", "loss.options.cap=3")
    options += ("advantage.kind=max_rl:max_rl", "reward.kind=last_number:last_number", "run.name=examples")
    options += ("rollout.keep_group=hard_groups:hard_groups", "rollout.engine=nice_engine:KIND")
    done = bapo("train", "demo", *SMALL, *options, f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "examples" / "metrics.jsonl")
    assert len(rows) == 2
    assert rows[-1]["ledger/dropped"] > 0, "groups of equal rewards are turned down"
    assert all(0 < row["reward/mean"] <= 0.75 for row in rows), "and so are easy ones"
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    assert all("loss/clip_high_share" not in row for row in rows), "no metric of a clipped loss"
    assert all(0 <= row["loss/cispo_cut_share"] < 1 for row in rows)
    (panel,) = [p for p in with_named(PANELS, [read_history(tmp_path / "examples")]) if p.title == "Clip fraction"]
    assert panel.curves[-1].metric == "loss/cispo_cut_share"
    assert "loss/cispo_cut_share" in (tmp_path / "examples" / "report.html").read_text()


LEARNED = ("reward/", "loss/", "bapo/", "optimizer/", "policy/", "ledger/")  # no times
FAMILY = """
from dataclasses import replace

from bapo_megatron.hf.families import FAMILIES

FAMILY = replace(FAMILIES["qwen3"], model_type="mine")
"""


@pytest.mark.slow
def test_a_family_trains_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a model_type that the package does not know, the demo trains as it does under its own, metric by metric."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FAMILY)
    shutil.copytree(demo_model_path(), "mine")
    config = load_hf_config("mine") | {"model_type": "mine"}
    Path("mine", "config.json").write_text(json.dumps(config))
    refused = bapo("check", "demo", *SMALL, "model.path=mine", "parallel.tensor=1")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "model_type 'mine' is not supported" in refused.stderr

    own, options = ("model.path=mine", "model.family=own:FAMILY"), ("parallel.tensor=1", "train.num_steps=2")
    rows = []
    for name, chosen in (("mine", own), ("demo", ())):
        done = bapo("train", "demo", *SMALL, *chosen, *options, f"run.name={name}", "checkpoint.interval_steps=2")
        assert done.returncode == 0, done.stderr
        metrics = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
        rows.append([{key: row[key] for key in row if key.startswith(LEARNED)} for row in metrics])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
    assert all(row["optimizer/grad_norm"] > 0 for row in rows[0])

    assert bapo("convert", "runs/mine").returncode == 2
    done = bapo("convert", "runs/mine", "exported", "--family", "own:FAMILY")
    assert done.returncode == 0, done.stderr
    assert load_hf_config("exported")["model_type"] == "mine"
    ids_T = torch.arange(2, 9)
    logits = []
    for run, family in (("exported", replace(FAMILIES["qwen3"], model_type="mine")), ("of-demo", None)):
        if family is None:
            convert(Path("runs/demo"), Path(run))
        model = Model.from_pretrained(run, max_len=16, own=family)
        logits.append(model.prefill(ids_T[None], torch.tensor([7]), model.new_cache(num_rows=1, max_len=16), 0))
    assert torch.equal(*logits)
