"""Alarms of the gradient norm, and the end of a run that only skips."""

import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.mismatch import no_mismatch
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DivergedError
from bapo_megatron.learner.base import StepResult
from bapo_megatron.learner.gradient_guard import GradientGuard
from bapo_megatron.monitor.alarms import AlarmLog
from bapo_megatron.monitor.record import UpdateMetrics
from bapo_megatron.runs.summary import summarize_run
from bapo_megatron.types import ClipBounds


def make_guard(max_skipped: int = 20, **monitor: float) -> GradientGuard:
    return GradientGuard(Config.model_validate({"monitor": monitor}), max_skipped)


def alarms(guard: GradientGuard, norms: list[float]) -> list[bool]:
    return [guard.observe(norm)["optimizer/grad_alarms"] == 1 for norm in norms]


def brute_force(norms: list[float], limit: float) -> list[bool]:
    found = []
    for i, norm in enumerate(norms):
        before = [x for x in norms[:i] if math.isfinite(x)][-101:]
        is_spike = len(before) >= 11 and norm > 10 * statistics.median(before)
        found.append(math.isfinite(norm) and (norm > limit or is_spike))
    return found


norm_lists = st.lists(st.floats(0.1, 10) | st.sampled_from([30.0, 200.0, math.inf, math.nan]), min_size=0, max_size=150)


@settings(max_examples=60, deadline=None)
@given(norms=norm_lists, limit=st.none() | st.floats(5, 100), cut=st.integers(0, 150))
def test_alarms_are_those_of_the_definition_also_after_a_resume(norms, limit, cut):
    guard = make_guard(1000, grad_norm_alarm=limit)
    found = alarms(guard, norms[:cut])
    resumed = make_guard(1000, grad_norm_alarm=limit)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert found + alarms(resumed, norms[cut:]) == brute_force(norms, limit or math.inf)
    assert resumed.state_dict()["norms"] == [x for x in norms if math.isfinite(x)][-101:]


def test_a_growing_norm_is_no_spike_and_a_spike_does_not_hide_the_next_one():
    guard = make_guard()
    assert not any(alarms(guard, [1.03**n for n in range(120)]))
    usual = statistics.median([1.03**n for n in range(19, 120)])
    assert alarms(guard, [11 * usual, 11 * usual, 9 * usual]) == [True, True, False]


def test_a_run_that_only_skips_ends_with_what_to_do():
    guard = make_guard(3)
    for norms in ([math.nan, math.inf, 1.0], [math.inf, math.inf]):
        assert not any(alarms(guard, norms))
    resumed = make_guard(3)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    with pytest.raises(DivergedError, match=r"the last 3 updates were skipped .* lower optimizer.lr"):
        resumed.observe(math.nan)


def test_alarms_reach_the_metrics_of_the_step_and_the_user():
    guard, updates = make_guard(), UpdateMetrics(Config())
    bounds = ClipBounds(0.8, 1.2, 0.5, False, 0)
    for norm in [1.0] * 11 + [50.0, math.nan, 40.0]:
        metrics = {"optimizer/grad_norm": norm} | guard.observe(norm)
        updates.add(StepResult(metrics, None, no_mismatch(), (bounds,)))
    row = updates.result() | {"reward/mean": 0.5}
    assert row["optimizer/grad_alarms"] == 2
    assert row["optimizer/grad_norm_max"] == 50
    assert row["optimizer/grad_norm"] == pytest.approx((11 + 90) / 13)
    (alarm,) = AlarmLog([row | {"step": 1.0, "version": 7.0}, row | {"step": 2.0, "version": 14.0}]).raised
    assert alarm.saw.startswith("the gradient norm spiked in 4 of the 14 updates of the last 2 steps, up to 50:")
    assert "2 updates with a spike" in summarize_run([row]).text()
