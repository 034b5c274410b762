"""Engine against trainer: sums, quantile and alarm, against direct definitions."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.mismatch import Mismatch, logprob_mismatch, no_mismatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import StepResult
from bapo_megatron.monitor.alarms import AlarmLog
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import UpdateMetrics
from bapo_megatron.runtime.heartbeat import Heartbeat
from bapo_megatron.types import ClipBounds

BOUNDS = ClipBounds(low=0.6, high=1.2, positive_share=0.5, saturated=False, num_moves=0)
BIN = 10**0.005 * (1 + 1e-9)  # half a bin: the documented 1.2 %


def mismatch(differences, mask=None) -> Mismatch:
    difference = torch.tensor(differences, dtype=torch.float64)
    behaviour = torch.linspace(-4, -1, difference.numel(), dtype=torch.float64) if difference.numel() else difference
    counted = torch.ones_like(difference, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return logprob_mismatch(behaviour + difference, behaviour, counted)


sizes = st.floats(-7, 2).map(lambda e: 10.0**e)
differences = st.lists(st.builds(lambda x, sign: x * sign, sizes, st.sampled_from([-1, 1])), min_size=1, max_size=300)


@settings(max_examples=200, deadline=None)
@given(values=differences, share=st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_every_number_equals_its_definition(values, share):
    got, size = mismatch(values), np.abs(values)
    assert got.num_tokens == len(values)
    assert got.mean == pytest.approx(size.mean(), rel=1e-6)
    assert float(got.largest) == pytest.approx(size.max(), rel=1e-6)
    bounded = np.clip(values, -20, 20)
    assert got.kl == pytest.approx(np.mean(np.expm1(bounded) - bounded), rel=1e-6, abs=1e-14)
    exact = np.quantile(size, share, method="inverted_cdf")
    # A value on the edge between two bins may be counted in either.
    assert exact / BIN**3 <= got.quantile(share) <= exact * BIN**3


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(-6, 0))
def test_the_99th_percentile_is_within_its_stated_resolution(seed, scale):
    values = np.random.default_rng(seed).lognormal(math.log(10) * scale, 1.0, 20_000)
    exact = np.quantile(values, 0.99, method="inverted_cdf")
    assert mismatch(values).quantile(0.99) == pytest.approx(exact, rel=0.012)


def test_differences_outside_the_bins():
    tiny = mismatch([1e-12, 0.0, 0.0])
    assert tiny.quantile(0.99) == 0.0
    assert tiny.mean == pytest.approx(1e-12 / 3, abs=1e-15)
    huge = mismatch([500.0, 0.1])
    assert huge.quantile(0.99) == float(huge.largest) == pytest.approx(500.0)
    assert math.isfinite(huge.kl)


def test_no_tokens_and_masked_tokens():
    nothing = no_mismatch()
    assert nothing.num_tokens == 0
    assert all(math.isnan(x) for x in (nothing.mean, nothing.kl, nothing.quantile(0.99)))
    some = mismatch([0.5, math.nan, math.inf], mask=[True, False, False])
    assert (some.num_tokens, some.mean, float(some.largest)) == (1, 0.5, 0.5)
    assert (nothing + some).mean == 0.5


@settings(max_examples=50, deadline=None)
@given(values=differences, cut=st.integers(0, 300))
def test_parts_add_up_to_the_whole(values, cut):
    whole, parts = mismatch(values), mismatch(values[:cut]) + mismatch(values[cut:])
    assert parts.num_tokens == whole.num_tokens
    assert parts.mean == pytest.approx(whole.mean, rel=1e-6)
    assert float(parts.largest) == pytest.approx(float(whole.largest), rel=1e-6)


def step_metrics(*parts: Mismatch, **monitor) -> dict[str, float]:
    updates = UpdateMetrics(Config.model_validate({"monitor": monitor}))
    for part in parts:
        updates.add(StepResult({"loss/policy": 0.0}, None, part, (BOUNDS,)))
    return updates.result()


def test_a_step_weighs_its_updates_by_their_tokens():
    small, large = [1e-4] * 297, [1e-2] * 3
    metrics = step_metrics(mismatch(small), mismatch(large), no_mismatch())
    assert metrics["mismatch/tokens"] == 300
    assert metrics["mismatch/logprob_mean"] == pytest.approx((297e-4 + 3e-2) / 300)
    assert metrics["mismatch/logprob_p99"] == pytest.approx(1e-4, rel=0.012)  # not the mean of 1e-4 and 1e-2
    assert metrics["mismatch/logprob_max"] == pytest.approx(1e-2)
    assert metrics["mismatch/kl"] == pytest.approx((297 * 0.5e-8 + 3 * 0.5e-4) / 300, rel=0.01)
    assert metrics["mismatch/alarms"] == 1  # only the second update raises one


def test_a_step_without_tokens_of_age_0_has_no_mismatch_and_no_alarm():
    metrics = step_metrics(no_mismatch(), no_mismatch(), mismatch_alarm=1e-12)
    assert (metrics["mismatch/tokens"], metrics["mismatch/alarms"]) == (0, 0)
    names = ("mismatch/logprob_mean", "mismatch/logprob_p99", "mismatch/logprob_max", "mismatch/kl")
    assert all(math.isnan(metrics[name]) for name in names)


@pytest.mark.parametrize(
    ("differences", "monitor", "alarms"),
    [
        ([1e-6, -3e-6, 1e-5], {}, 0),
        ([2e-3, -2e-3], {}, 1),
        ([2e-3, -2e-3], {"mismatch_alarm": 0.01}, 0),
        ([math.nan, 0.0], {}, 1),
        ([5.0, 5.0], {"mismatch_alarm": 1e9}, 0),
    ],
)
def test_the_alarm_goes_off_over_its_limit_and_for_nan(differences, monitor, alarms):
    assert step_metrics(mismatch(differences), **monitor)["mismatch/alarms"] == alarms


def test_the_default_limit_fits_the_type():
    monitor = Config().monitor
    assert monitor.mismatch_limit("float32") == 1e-3
    assert monitor.mismatch_limit("bfloat16") == 0.05
    assert monitor.mismatch_limit("float32", is_expected=True) == math.inf


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"rollout": {"tokens_per_round": 8}}, False),
        ({"rollout": {"top_p": 0.9}}, True),
        ({"model": {"replay_routes": True}}, False),
        ({"model": {"replay_routes": True}, "rollout": {"tokens_per_round": 8}}, True),
        ({"model": {"replay_routes": True}, "rollout": {"abort_tail": True}}, True),
    ],
)
def test_where_engine_and_trainer_differ_by_design(settings, expected):
    assert Config.model_validate(settings).expects_mismatch is expected


def test_the_summary_counts():
    stream, rows = io.StringIO(), [{"step": float(step), "mismatch/alarms": 2.0 * (step > 1)} for step in (1, 2, 3)]
    with Console("lines", 10, stream=stream, heartbeat=Heartbeat()) as console:
        for row in rows:
            console.step(row)
        console.summary(AlarmLog(rows).raised)
    assert "alarms     mismatch at 2 steps, from 2 to 3\n" in stream.getvalue()
    assert not AlarmLog(rows[:1]).raised
