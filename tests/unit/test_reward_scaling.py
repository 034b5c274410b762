"""Reward scaling, clipping and batch whitening against brute force, and what they must not change."""

import json
import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.advantages import ESTIMATORS, whiten
from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.schema import Config, RewardConfig
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.rewards.shaping import Moments, RewardScaler, is_informative
from bapo_megatron.types import Batch, Ended, Group, Prompt, Sample, Segment

PROMPT = Prompt(3, (1, 2), "?", "a", "test")
values = st.sampled_from([-2.0, 0.0, 0.25, 1.0, 3.0])
groups = st.lists(st.lists(values, min_size=2, max_size=5), min_size=1, max_size=5)
batches = st.lists(groups, min_size=1, max_size=5)


def make_config(kind: str = "grpo", whiten_batch: bool = False, **reward: float | bool) -> Config:
    return Config.model_validate(
        {
            "advantage": {"kind": kind, "whiten_batch": whiten_batch},
            "reward": reward,
            "rollout": {"max_response_tokens": 50},
        }
    )


def make_group(rewards: list[float]) -> Group:
    segment = Segment.sampled(0, 0, (5, 6), (-0.5, -0.5))
    return Group(
        PROMPT,
        tuple(
            Sample.of(f"3.{i}", PROMPT, (segment,), Ended("stop", r, parts={"all": r})) for i, r in enumerate(rewards)
        ),
    )


def build(config: Config, rewards: list[list[float]]) -> Batch:
    return BatchBuilder(config).build([make_group(r) for r in rewards], {})


def per_response(batch: Batch) -> list[float]:
    return batch.advantages_T[batch.mask_T][::2].tolist()


@settings(max_examples=100, deadline=None)
@given(batches=batches, offset=st.sampled_from([0.0, 1e6]))
def test_moments_are_those_of_all_values_together(batches, offset):
    moments, seen = Moments(), []
    for batch in batches:
        more = [offset + value for group in batch for value in group]
        moments, seen = moments.with_more(more), seen + more
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-12, abs=1e-12)
        assert moments.std == pytest.approx(statistics.pstdev(seen), rel=1e-8, abs=1e-8)
    assert moments.with_more([]) == moments


@settings(max_examples=100, deadline=None)
@given(batches=batches, scale=st.floats(0.1, 5), clip=st.none() | st.floats(0.1, 3), cut=st.integers(0, 5))
def test_running_scale_against_brute_force_also_after_a_resume(batches, scale, clip, cut):
    settings_ = RewardConfig(scale=scale, running_std=True, clip=clip)
    scaler, seen = RewardScaler(settings_), []
    for i, batch in enumerate(batches):
        if i == cut:
            saved = json.dumps(scaler.state_dict())
            scaler = RewardScaler(settings_)
            scaler.load_state_dict(json.loads(saved))
        seen += [value for group in batch for value in group]
        std = (statistics.pvariance(seen) + 1e-8) ** 0.5
        expected = [[scale * value / std for value in group] for group in batch]
        num_clipped = 0
        if clip is not None:
            num_clipped = sum(abs(x) > clip for group in expected for x in group)
            expected = [[max(-clip, min(clip, x)) for x in group] for group in expected]
        scaled, metrics = scaler.scaled(batch)
        for got, want in zip(scaled, expected, strict=True):
            assert got == pytest.approx(want, rel=1e-9)
        assert metrics["reward/running_std"] == pytest.approx(statistics.pstdev(seen), abs=1e-12)
        if clip is not None and all(abs(abs(scale * x / std) - clip) > 1e-9 for g in batch for x in g):
            assert metrics["reward/clipped_share"] == num_clipped / sum(map(len, batch))


@given(groups=groups)
def test_without_options_rewards_are_left_alone_bit_for_bit(groups):
    assert RewardScaler(RewardConfig()).scaled(groups) == (groups, {})


@settings(max_examples=60, deadline=None)
@given(
    rewards=groups,
    factor=st.floats(0.1, 10),
    shift=st.sampled_from([-4.0, 0.5, 7.0]),
    kind=st.sampled_from([kind for kind in ESTIMATORS if not ESTIMATORS[kind].needs_binary]),
)
def test_invariances(rewards, factor, shift, kind):
    """A shift never matters; a factor stretches dr_grpo and rloo, and does nothing once the batch is whitened."""
    assume(any(len(set(group)) > 1 for group in rewards))
    shifted, stretched = ([[f * r + s for r in g] for g in rewards] for f, s in ((1, shift), (factor, 0)))
    for whitened in (False, True):
        config = make_config(kind, whitened)
        base = per_response(build(config, rewards))
        assert per_response(build(config, shifted)) == pytest.approx(base, abs=1e-4)
        is_linear = not ESTIMATORS[kind].divides_by_group and not config.advantage.whitens
        expected = [factor * a for a in base] if is_linear else base
        assert per_response(build(config, stretched)) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert per_response(build(make_config(kind, whitened, scale=factor), rewards)) == pytest.approx(
            per_response(build(config, stretched)), rel=1e-6, abs=1e-6
        )


@settings(max_examples=60, deadline=None)
@given(rewards=groups)
def test_whitened_dr_grpo_is_reinforce_plus_plus_with_a_group_baseline_for_equal_lengths(rewards):
    assume(any(len(set(group)) > 1 for group in rewards))
    centred = [r - statistics.fmean(group) for group in rewards for r in group]
    mean, std = statistics.fmean(centred), statistics.stdev(centred)
    expected = [(a - mean) / (std + 1e-6) for a in centred]
    assert per_response(build(make_config("dr_grpo", True), rewards)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS if ESTIMATORS[kind].whitens != "tokens"])
def test_groups_without_a_difference_keep_their_zeros(kind):
    same = 1.0 if ESTIMATORS[kind].needs_binary else 0.1
    batch = build(make_config(kind, True), [[same] * 3, [0.0, 1.0, 1.0]])
    assert per_response(batch)[:3] == [0.0] * 3
    assert all(per_response(batch)[3:])
    assert whiten(torch.zeros(3)).tolist() == [0.0] * 3
    assert whiten(torch.zeros(0)).tolist() == []


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(0.1, 4), st.floats(-2, 2)), min_size=1, max_size=20),
    factor=st.sampled_from([0.25, 2.0, 8.0]),  # powers of two, so that no rounding decides a probe
    contribution=st.sampled_from(["gradient", "surrogate", "net", "official"]),
)
def test_a_factor_does_not_move_bapos_bounds(tokens, factor, contribution):
    ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    config, mask = ClipBoundConfig(rho0=0.5, contribution=contribution), torch.ones(len(tokens), dtype=torch.bool)
    base, stretched = (
        search_bounds(contribution_table(ratios, f * advantages, mask, None, config), config) for f in (1.0, factor)
    )
    assert (stretched.low, stretched.high) == (base.low, base.high)


def test_clipping_makes_rewards_equal_and_groups_uninformative():
    rewards = [5.0, 9.0]
    assert is_informative(make_group(rewards), make_config())
    assert not is_informative(make_group(rewards), make_config(clip=4.0))
    assert is_informative(make_group(rewards), make_config(clip=4.0, scale=0.5))
    assert is_informative(make_group(rewards), make_config(clip=4.0, running_std=True))
    batch = build(make_config("dr_grpo", clip=4.0), [rewards])
    assert per_response(batch) == [0.0, 0.0]
    assert {k: v for k, v in batch.metrics.items() if "clipped" in k} == {"reward/clipped_share": 1.0}


def test_a_builder_goes_on_where_it_was_saved():
    config = make_config("dr_grpo", running_std=True)
    first, second = [make_group([0.0, 1.0])], [make_group([0.0, 5.0])]
    whole = BatchBuilder(config)
    whole.build(first, {})
    resumed = BatchBuilder(config)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    expected = per_response(whole.build(second, {}))
    assert per_response(resumed.build(second, {})) == expected
    assert per_response(BatchBuilder(config).build(second, {})) != expected
