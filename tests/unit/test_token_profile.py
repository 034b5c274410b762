"""The token profile against a loop over tokens, for any split into micro-batches and updates."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.diagnostics import BINS, MEANS
from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.algorithms.mismatch import no_mismatch
from bapo_megatron.algorithms.objectives.clipped import BapoLoss
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import SelectingLoss
from bapo_megatron.learner.base import StepResult
from bapo_megatron.metrics import METRICS, reduce_updates
from bapo_megatron.monitor.record import UpdateMetrics
from bapo_megatron.types import ClipBounds
from tests.unit import loss_inputs as helpers
from tests.unit.loss_inputs import loss_inputs

BOUNDS = ClipBounds(low=0.75, high=1.5, positive_share=0.5, saturated=False, num_moves=0)

tokens = st.lists(
    st.tuples(
        st.integers(0, 999).map(lambda n: (n + 0.5) / 1000),  # probability, not on the edge of a bin
        st.floats(-1.5, 1.5).filter(lambda x: min(abs(x - math.log(b)) for b in (0.75, 1.5)) > 1e-6),  # log-ratio
        st.sampled_from([-1.0, 0.0, 2.0]),  # advantage
        st.floats(0, 3),  # entropy
        st.booleans(),  # trained
    ),
    max_size=24,
)


def make_inputs(rows: list[tuple]) -> LossInputs:
    columns = list(zip(*rows, strict=True)) or [()] * 5
    mask_R = torch.tensor(columns[4], dtype=torch.bool)
    probs_R, log_ratio_R, advantages_R, entropy_R = (torch.tensor(c, dtype=torch.float64) for c in columns[:4])
    log_probs_R = torch.where(mask_R, probs_R.log(), torch.nan)  # masked tokens may hold anything
    return loss_inputs(
        log_probs_R=log_probs_R.requires_grad_(),
        behaviour_logprobs_R=log_probs_R.detach() - log_ratio_R,
        advantages_R=advantages_R,
        mask_R=mask_R,
        ages_R=torch.zeros_like(mask_R, dtype=torch.int64),
        bounds=BOUNDS,
        entropy_R=torch.where(mask_R, entropy_R, torch.nan),
    )


def profile(sums: dict) -> dict[str, float]:
    return {name: value for name, value in sums.items() if name.startswith("profile/")}


def sums_of(rows: list[tuple]) -> dict[str, float]:
    return profile(helpers.sums_of(BapoLoss().tokens(make_inputs(rows)), with_profile=True))


def means_of(rows: list[tuple]) -> dict[str, float]:
    """Return the profile from its definition, bin by bin."""
    found, num_trained = {}, sum(row[4] for row in rows)
    for b, name in enumerate(BINS):
        mine = [row for row in rows if row[4] and b / 10 <= row[0] < (b + 1) / 10]
        values = {
            "ratio": [math.exp(r) for _, r, *_ in mine],
            "abs_log_ratio": [abs(r) for _, r, *_ in mine],
            "entropy": [entropy for *_, entropy, _ in mine],
            "clip_high_share": [a > 0 and math.exp(r) >= BOUNDS.high for _, r, a, *_ in mine],
            "clip_low_share": [a < 0 and math.exp(r) <= BOUNDS.low for _, r, a, *_ in mine],
        }
        found[f"{name}_share"] = len(mine) / num_trained
        found |= {f"{name}_{v}": sum(x) / len(x) if x else math.nan for v, x in values.items()}
    return found


@settings(max_examples=60, deadline=None)
@given(rows=tokens.filter(lambda rows: any(row[4] for row in rows)), cut=st.integers(0, 24))
def test_means_equal_a_loop_over_tokens_whatever_the_micro_batches(rows: list[tuple], cut: int) -> None:
    first, second, num_trained = sums_of(rows[:cut]), sums_of(rows[cut:]), sum(row[4] for row in rows)
    found = reduce_updates({name: [(first[name] + second[name]) / num_trained] for name in first})
    assert found == pytest.approx(means_of(rows), rel=1e-5, abs=1e-5, nan_ok=True)
    units = {"ratio": "ratio", "abs_log_ratio": "nats", "entropy": "nats"}
    assert {name: METRICS[name].unit for name in found} == {
        f"{name}_{v}": units.get(v, "share") for name in BINS for v in ("share", *MEANS)
    }


def test_the_ends_of_the_scale_belong_to_the_outer_bins() -> None:
    sums = sums_of([(1.0, 0.0, 1.0, 0.0, True), (1e-30, 0.0, 1.0, 0.0, True), (0.5, 0.0, 1.0, 0.0, True)])
    assert {name for name, value in sums.items() if name.endswith("0_share") and value} == {
        "profile/p00_share",
        "profile/p50_share",
        "profile/p90_share",
    }


def test_a_step_pools_the_tokens_of_its_updates() -> None:
    """Two updates of four tokens each fill their bins unequally."""
    update_a = [(0.05, 1.0, 2.0, 1.0, True)] * 3 + [(0.95, 0.0, -1.0, 0.1, True)]
    update_b = [(0.05, -1.0, -1.0, 2.0, True)] * 1 + [(0.95, 0.2, 2.0, 0.2, True)] * 3
    step = UpdateMetrics(Config())
    for rows in (update_a, update_b):
        per_token = {name: value / len(rows) for name, value in sums_of(rows).items()}
        step.add(StepResult(per_token, None, no_mismatch(), (BOUNDS,)))
    assert profile(step.result()) == pytest.approx(means_of(update_a + update_b), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", LOSSES)
def test_off_unless_asked_for(name: str) -> None:
    rows = [(0.3, 0.1, 1.0, 0.5, True)]
    inputs = make_inputs(rows)
    if isinstance(config := LOSSES[name](), SelectingLoss):
        inputs = replace(inputs, found=helpers.found_of(config, inputs))
    tokens = config.tokens(inputs)
    assert profile(helpers.sums_of(tokens)) == {}
    assert bool(profile(helpers.sums_of(tokens, with_profile=True))) == LOSSES[name].clips
