"""A loss, an advantage, a judge, a filter of groups and an engine of the user's own, in one run of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.monitor.metrics import read_metrics
from tests.integration.forked import SMALL
from tests.integration.test_train import bapo

MODULE = """
from dataclasses import replace

from bapo_megatron.algorithms.losses import clipped_policy_loss
from bapo_megatron.config.base import Section
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.schema_loss import GrpoLoss
from bapo_megatron.engines.start import embedded_specs

ENGINE = EngineKind("engine of mine", specs="own:specs")


class Options(Section):
    factor: float = 1.0


def loss(inputs, options: Options):
    if inputs.mask_R.any():
        assert 0 < inputs.bounds.low < inputs.bounds.high, "search_bounds gives the bounds of [bapo]"
    result = clipped_policy_loss(inputs, GrpoLoss())
    return replace(result, loss_R=options.factor * result.loss_R)


def advantage(rewards_G):
    return rewards_G - 1.0


def judge(response):
    return float(len(response) % 3)


def keep(group, config):
    return group.prompt.prompt_id % 2 == 0


def specs(config, model_path, logs, ports, share):
    found = embedded_specs(config, model_path, logs, ports, share)
    print("specs of mine", len(found), flush=True)
    return found
"""


@pytest.mark.slow
def test_all_five_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODULE)
    options = ("parallel.tensor=1", "train.num_steps=2", "loss.name=own:loss", "loss.search_bounds=true")
    options += ("advantage.kind=own:advantage", "reward.kind=own:judge", "rollout.keep_group=own:keep")
    rows = []
    for name, factor in (("small", 1e-3), ("large", 1.0)):
        extra = (f"run.name={name}", f"loss.options.factor={factor}", "rollout.engine=own:ENGINE")
        done = bapo("train", "demo", *SMALL, *options, *extra)
        assert done.returncode == 0, done.stderr
        assert "specs of mine 1" in done.stdout
        rows.append(read_metrics(tmp_path / "runs" / name / "metrics.jsonl"))
    small, large = rows
    assert len(small) == len(large) == 2
    assert all(row["ledger/dropped"] > 0 for row in large), "half of the prompts are turned down"
    assert {row["reward/mean"] for row in large} != {0.0}
    assert large[0]["reward/mean"] == small[0]["reward/mean"], "the same samples"
    assert small[0]["optimizer/grad_norm"] < 0.01 * large[0]["optimizer/grad_norm"], "the loss has its options"
    assert large[0]["bapo/low"] > 0
