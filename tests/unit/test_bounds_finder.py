"""Which tokens the search sees, if one of them is not a number."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.types import MicroBatch, MiniBatch


def minibatch(*advantages: float) -> MiniBatch:
    n = len(advantages)
    rows_R, zeros_R = torch.arange(n), torch.zeros(n)
    micro = MicroBatch(
        token_ids_T=rows_R,
        position_ids_T=rows_R,
        cu_seqlens_S1=torch.tensor([0, n], dtype=torch.int32),
        rows_R=rows_R,
        sequence_R=torch.zeros_like(rows_R),
        batch_rows_R=rows_R,
        targets_R=rows_R,
        advantages_R=torch.tensor(advantages),
        behaviour_logprobs_R=zeros_R,
        versions_R=torch.zeros_like(rows_R),
        mask_R=torch.ones(n, dtype=torch.bool),
    )
    return MiniBatch((micro,), n)


def test_m2po_leaves_tokens_without_weight_out_of_its_second_moment() -> None:
    config = Config.model_validate({"loss": {"name": "m2po", "max_drift": 1.0}})
    batch = minibatch(1.0, 1.0, -3.0, -3.0)
    (micro,) = batch.micro_batches
    whole = MiniBatch(
        (replace(micro, sequence_R=torch.tensor([0, 0, 1, 1]), cu_seqlens_S1=torch.tensor([0, 2, 4])),), 4
    )
    bounds = finder(config, torch.tensor([0.1, 0.15, -2.0, -0.5])).find(whole)
    assert (bounds.low, bounds.high) == (0.0, math.inf)
    unmasked = config.model_copy(update={"loss": config.loss.model_copy(update={"max_drift": None})})
    bounds = finder(unmasked, torch.tensor([0.1, 0.15, -2.0, -0.5])).find(whole)
    assert math.exp(0.15) < bounds.high <= math.exp(0.5)
    assert bounds.low == pytest.approx(1 / bounds.high, rel=1e-12)


def finder(config: Config, log_probs_R: Tensor) -> BoundsFinder:
    learner: Any = SimpleNamespace(
        version=0,
        score=lambda *_, with_entropy: [(log_probs_R, None)],
        sum_over_data_ranks=lambda table: table,
        sum_over_context=lambda table: table,
    )
    return BoundsFinder(config, learner)


def test_an_update_that_is_skipped_for_a_nan_leaves_the_bounds_of_the_next_one_alone():
    config = Config.model_validate({"loss": {"name": "bapo"}, "bapo": {"scope": "lagged"}})
    zeros_R = torch.zeros(3)
    lagged = finder(config, zeros_R)
    whole, broken = minibatch(1.0, 1.0, -3.0), minibatch(1.0, math.nan, -3.0)
    lagged.observe(whole, [zeros_R])
    want = lagged.find(whole)
    assert want.saturated
    lagged.observe(broken, [zeros_R])
    assert lagged.find(whole) == want
    lagged.observe(whole, [torch.tensor([0.0, math.nan, 0.0])])
    resumed = finder(config, zeros_R)
    resumed.load_state_dict(json.loads(json.dumps(lagged.state_dict())))
    assert resumed.find(whole) == want


def test_a_nan_in_the_update_itself_starts_the_search_and_spoils_the_loss_so_that_it_is_skipped():
    config = Config.model_validate({"loss": {"name": "bapo"}})
    for advantages, log_probs in (((1.0, math.nan, -3.0), (0.0, 0.0, 0.0)), ((1.0, 2.0, -3.0), (math.nan, 0.0, 0.0))):
        batch, log_probs_R = minibatch(*advantages), torch.tensor(log_probs, requires_grad=True)
        bounds = finder(config, log_probs_R.detach()).find(batch)
        assert (bounds.low, bounds.high) == (config.bapo.low.start, config.bapo.high.start)
        assert math.isnan(bounds.positive_share)
        (micro,) = batch.micro_batches
        inputs = LossInputs(micro, log_probs_R, micro.versions_R, entropy_R=torch.zeros(3), found=bounds)
        config.loss.tokens(inputs).loss_R.sum().backward()
        assert not log_probs_R.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "num_of_first", "num_of_next", "num_after"),
    [
        ({"loss": {"name": "bapo"}}, 1, 1, 0),
        ({"loss": {"name": "bapo"}, "bapo": {"scope": "lagged"}}, 1, 0, 1),
        ({"loss": {"name": "bapo"}, "bapo": {"scope": "fixed"}}, 0, 0, 0),
        ({"loss": {"name": "m2po", "max_second_moment": 1e-4}}, 3, 3, 0),
        ({"loss": {"name": "m2po", "max_second_moment": 9.0}}, 1, 1, 0),
        ({"loss": {"name": "grpo"}}, 0, 0, 0),
        ({"loss": {"name": "sft"}}, 0, 0, 0),
    ],
)
def test_a_rule_makes_one_all_reduce_a_round_and_scores_only_what_it_reads(
    settings: dict[str, Any], num_of_first: int, num_of_next: int, num_after: int
) -> None:
    calls = []
    log_probs_R = torch.tensor([0.1, 0.2, -0.3])
    learner: Any = SimpleNamespace(
        version=0,
        score=lambda *_, with_entropy: calls.append("score") or [(log_probs_R, None)],
        sum_over_data_ranks=lambda table: calls.append("sum") or table,
        sum_over_context=lambda table: table,
    )
    found, batch = BoundsFinder(Config.model_validate(settings), learner), minibatch(1.0, 1.0, -3.0)
    for num_sums in (num_of_first, num_of_next):
        calls.clear()
        found.find(batch)
        assert calls == ["score"] * (num_sums > 0) + ["sum"] * num_sums
        calls.clear()
        found.observe(batch, [log_probs_R])
        assert calls == ["sum"] * num_after


def test_the_table_of_another_rule_is_refused() -> None:
    lagged = {"loss": {"name": "bapo"}, "bapo": {"scope": "lagged"}}
    wide = {**lagged, "bapo": {"scope": "lagged", "high": [1.2, 2.0, 0.05]}}
    zeros_R = torch.zeros(3)
    kept = finder(Config.model_validate(lagged), zeros_R)
    kept.observe(minibatch(1.0, 1.0, -3.0), [zeros_R])
    with pytest.raises(CheckpointError, match="the checkpoint's table of bounds has 55 entries, not 35"):
        finder(Config.model_validate(wide), zeros_R).load_state_dict(kept.state_dict())
