"""The one-pass search against a literal Algorithm 1 that visits every token at every probe, in exact arithmetic."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bapo_megatron.algorithms.clip_bounds import (
    contribution_table,
    empty_table,
    search_bounds,
)
from bapo_megatron.config.schema_loss import PRESETS, BoundRange, ClipBoundConfig
from tests.unit.loss_inputs import positive_share

READINGS = ("gradient", "surrogate", "net", "official")
WEIGHTS = ("uniform", "rollout_prob")
ORDERS = ("high_first", "low_first")
LOWS = ([0.5, 0.875, 0.125], [0.5, 0.5, 0.125], [0.25, 0.95, 0.25])  # the last grid's last step does not fit
HIGHS = ([1.25, 2.0, 0.25], [1.5, 1.5, 0.25], [1.0, 3.1, 0.5])


class Oracle:
    """Algorithm 1 as printed, with Python loops. Bounds move in exact decimals, contributions in fractions."""

    def __init__(self, tokens, config):
        self.tokens, self.config = tokens, config
        self.gaps = []  # distance of rho from its target at every probe

    def rho(self, low, high):
        low, high, positive, negative = float(low), float(high), Fraction(0), Fraction(0)
        clipped_counts = self.config.contribution != "gradient"
        for ratio, advantage, kept, logprob in self.tokens:
            if not kept:
                continue
            weight = math.exp(logprob) if self.config.token_weight == "rollout_prob" else 1
            mass = Fraction(weight) * abs(Fraction(advantage))
            if advantage > 0 and (ratio < high or clipped_counts):
                positive += mass * Fraction(min(ratio, high))
            if advantage < 0 and (ratio > low or clipped_counts):
                negative += mass * Fraction(max(ratio, low))
        if positive + negative == 0:
            return None
        if self.config.contribution == "net":
            rho = positive / abs(positive - negative) if positive != negative else math.inf
        elif self.config.contribution == "official":
            rho = positive / negative if negative else math.inf
        else:
            rho = positive / (positive + negative)
        self.gaps.append(abs(float(rho) - self.config.rho0))
        return rho

    def search(self):
        def exact(x):
            return Fraction(str(x))

        low, high, target = exact(self.config.low.start), exact(self.config.high.start), Fraction(self.config.rho0)
        b_minus, delta2 = exact(self.config.low.stop), exact(self.config.low.step)
        b_plus, delta1 = exact(self.config.high.stop), exact(self.config.high.step)
        moves = 0

        def unmet():
            rho = self.rho(low, high)
            return rho is not None and rho < target

        if self.config.order == "high_first":
            while unmet() and low + delta2 <= b_minus:
                if high + delta1 <= b_plus:
                    high += delta1
                else:
                    low += delta2
                moves += 1
        else:
            while unmet() and low + delta2 <= b_minus:
                low += delta2
                moves += 1
            while unmet() and high + delta1 <= b_plus:
                high += delta1
                moves += 1
        return float(low), float(high), self.rho(low, high), unmet(), moves


def tensors(tokens):
    ratio, advantages, mask, logprobs = zip(*tokens, strict=True) if tokens else ((), (), (), ())
    as_double = [torch.tensor(x, dtype=torch.float64) for x in (ratio, advantages, logprobs)]
    return as_double[0], as_double[1], torch.tensor(mask, dtype=torch.bool), as_double[2]


def table_of(tokens, config):
    return contribution_table(*tensors(tokens), config)


def check_against_oracle(tokens, config, exact):
    oracle = Oracle(tokens, config)
    low, high, rho, saturated, moves = oracle.search()
    if not exact:  # rounding may decide a probe that ends (nearly) on the target
        assume(all(gap > 1e-9 for gap in oracle.gaps))
    bounds = search_bounds(table_of(tokens, config), config)
    assert (bounds.low, bounds.high) == (low, high)
    assert (bounds.saturated, bounds.num_moves) == (saturated, moves)
    if rho is None:
        assert math.isnan(bounds.positive_share)
    else:
        assert bounds.positive_share == pytest.approx(float(rho), rel=1e-9)


# Few distinct dyadic values, so that ratios sit exactly on bounds, rho exactly on its target, and sums are exact.
dyadic_tokens = st.lists(
    st.tuples(
        st.sampled_from([0.125, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0]),
        st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([0.0, -0.5, -2.0]),
    ),
    max_size=10,
)
# Advantages are float32 (types.Batch): their products with ratios and probabilities never underflow in float64.
float_tokens = st.lists(
    st.tuples(st.floats(0.3, 4.0), st.floats(-2.0, 2.0, width=32), st.booleans(), st.floats(-5.0, 0.0)), max_size=40
)


@pytest.mark.parametrize(("reading", "weight", "order"), list(itertools.product(READINGS, WEIGHTS, ORDERS)))
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_search_equals_algorithm_1(reading, weight, order, data):
    share = reading in ("gradient", "surrogate")
    config = ClipBoundConfig(
        rho0=data.draw(st.sampled_from([0.25, 0.5, 0.75] if share else [0.5, 1.0, 2.0])),
        low=data.draw(st.sampled_from(LOWS)),
        high=data.draw(st.sampled_from(HIGHS)),
        contribution=reading,
        token_weight=weight,
        order=order,
    )
    tokens = data.draw(dyadic_tokens)
    sign = data.draw(st.sampled_from([0, 0, 0, 1, -1]))  # includes batches with advantages of one sign
    tokens = [(r, sign * abs(a) if sign else a, kept, lp) for r, a, kept, lp in tokens]
    check_against_oracle(tokens, config, exact=weight == "uniform")


@pytest.mark.parametrize("preset", [name for name, base in PRESETS.items() if base.get("scope") != "fixed"])
@settings(max_examples=100, deadline=None)
@given(tokens=float_tokens)
def test_presets_equal_algorithm_1_on_their_decimal_grids(preset, tokens):
    check_against_oracle(tokens, ClipBoundConfig(preset=preset), exact=False)


@pytest.mark.parametrize(("reading", "weight"), list(itertools.product(READINGS, WEIGHTS)))
@settings(max_examples=50, deadline=None)
@given(tokens=float_tokens, cut=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_tables_add_up_and_ignore_order(reading, weight, tokens, cut, seed):
    config = ClipBoundConfig(contribution=reading, token_weight=weight)
    whole = table_of(tokens, config)
    parts = empty_table(config) + table_of(tokens[:cut], config) + table_of(tokens[cut:], config)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    shuffled = contribution_table(*(x[order] for x in tensors(tokens)), config)
    torch.testing.assert_close(shuffled, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reading", READINGS)
def test_nothing_to_count_leaves_the_bounds_at_their_start(reading):
    config = ClipBoundConfig(contribution=reading)
    masked = [(5.0, 1.0, False, -1.0), (0.1, -1.0, False, -1.0), (1.0, 0.0, True, -1.0)]
    for tokens in ([], masked):
        bounds = search_bounds(table_of(tokens, config), config)
        assert (bounds.low, bounds.high, bounds.num_moves, bounds.saturated) == (0.6, 1.2, 0, False)
        assert math.isnan(bounds.positive_share)
        assert table_of(tokens, config)[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("preset", ["default", "official"])  # targets of 1/2 and 1, which equal sums meet
@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8), min_size=1, max_size=8),
    length=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_sums_that_are_equal_but_for_rounding_move_no_bound(preset, groups, length, seed):
    rewards = [torch.tensor(group) for group in groups if max(group) - min(group) >= 0.25]
    assume(rewards)
    advantages = torch.cat([(group - group.mean()) / (group.std() + 1e-4) for group in rewards])
    order = torch.randperm(len(advantages) * length, generator=torch.Generator().manual_seed(seed))
    advantages = advantages.repeat_interleave(length)[order]
    config = ClipBoundConfig(preset=preset)
    ones = torch.ones_like(advantages)
    found = search_bounds(contribution_table(ones, advantages, ones.bool(), None, config), config)
    assert (found.num_moves, found.saturated) == (0, False), found


def test_the_last_step_of_the_paper_grid_is_reached():
    config = ClipBoundConfig()
    assert (len(config.low.points), len(config.high.points)) == (16, 37)
    assert config.low.points[-1] == 0.9
    assert config.low.points[7] == 0.74
    assert config.high.points[-1] == 3.0
    assert ClipBoundConfig(low=[0.9, 1.0, 0.1]).low.points == [0.9, 1.0]  # (1.0 - 0.9) / 0.1 < 1 in floating point
    bounds = search_bounds(table_of([(1.0, -1.0, True, 0.0)], config), config)
    assert (bounds.low, bounds.high, bounds.num_moves, bounds.saturated) == (0.9, 3.0, 36 + 15, True)


@settings(max_examples=300, deadline=None)
@given(
    start=st.floats(0.01, 2.0),
    step=st.one_of(st.sampled_from([1e-9, 1e-3, 0.02, 0.05, 0.1, 1 / 3]), st.floats(1e-9, 2.0)),
    num_steps=st.integers(0, 999),
    seed=st.integers(0, 2**31),
)
def test_a_ratio_at_a_bound_or_beside_it_falls_on_its_side(start, step, num_steps, seed):
    """The table is compared with every bound."""
    grid = {"start": start, "stop": start + num_steps * step, "step": step}
    at = torch.tensor(BoundRange(**grid).points, dtype=torch.float64)
    beside = [torch.nextafter(at, torch.tensor(end, dtype=torch.float64)) for end in (-math.inf, math.inf)]
    anywhere = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 * at[-1]
    ratio = torch.cat([at, *beside, anywhere, torch.tensor([0.0, 1e300], dtype=torch.float64)])
    config = ClipBoundConfig(
        low={"start": 1e-6, "stop": 1e-6, "step": 1.0}, high={"start": 1e9, "stop": 1e9, "step": 1.0}
    )
    for side, sign in (("high", 1.0), ("low", -1.0)):
        of_side = config.model_copy(update={side: BoundRange(**grid)})
        ones = torch.full_like(ratio, sign)
        table = contribution_table(ratio, ones / ratio.clamp(min=1e-300), ones.bool(), None, of_side)
        is_inside = ratio[:, None] < at if side == "high" else ratio[:, None] > at
        found = table[: len(at)] if side == "high" else table[1:-2]
        expected = (is_inside & (ratio[:, None] > 0)).sum(0)  # each token adds 1, except that ratio 0 adds nothing
        torch.testing.assert_close(found, expected.double(), rtol=1e-9, atol=1e-6)


def test_masked_values_and_unused_logprobs_do_no_harm():
    config = ClipBoundConfig()
    nan, inf = float("nan"), float("inf")
    ratio = torch.tensor([1.0, nan, inf, 1.0])
    advantages = torch.tensor([1.0, nan, 1.0, -3.0])
    mask = torch.tensor([True, False, False, True])
    table = contribution_table(ratio, advantages, mask, None, config)
    expected = contribution_table(ratio[[0, 3]], advantages[[0, 3]], mask[[0, 3]], None, config)
    assert torch.equal(table, expected)
    assert positive_share(table, config, 0.6, 1.2) == 0.25
    assert table[-2:].tolist() == [1, 1]


@pytest.mark.parametrize("contribution", ["gradient", "surrogate"])
@pytest.mark.parametrize(
    ("where", "advantage"),
    itertools.product(("ratio", "advantages", "behaviour_logprobs", "weights"), (1.0, -1.0, 0.0)),
)
def test_one_nan_of_a_trained_token_leaves_the_bounds_of_all_ranks_at_their_start(where, contribution, advantage):
    config = ClipBoundConfig(contribution=contribution, token_weight="rollout_prob", rho0=0.99)
    values = {
        "ratio": torch.ones(3),
        "advantages": torch.tensor([advantage, 1.0, -1.0]),
        "behaviour_logprobs": torch.full((3,), -0.5),
        "weights": torch.ones(3),
    }
    mask = torch.ones(3, dtype=torch.bool)
    whole = contribution_table(**values, mask=mask, config=config)
    assert search_bounds(whole, config).saturated
    values[where][0] = math.nan
    table = contribution_table(**values, mask=mask, config=config)
    assert table.isnan().all()
    bounds = search_bounds(table + whole, config)  # as with another rank's table
    assert (bounds.low, bounds.high, bounds.saturated, bounds.num_moves) == (0.6, 1.2, False, 0)
    assert math.isnan(bounds.positive_share)
    assert math.isnan(positive_share(table, config, 0.6, 1.2))


@settings(max_examples=50, deadline=None)
@given(tokens=float_tokens)
def test_positive_share_reads_any_grid_point(tokens):
    config = ClipBoundConfig(contribution="surrogate")
    table = table_of(tokens, config)
    for low, high in ((0.6, 3.0), (0.74, 1.2), (0.9, 2.05)):
        expected = Oracle(tokens, config).rho(low, high)
        share = positive_share(table, config, low, high)
        assert math.isnan(share) if expected is None else share == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(
    ("config", "low", "high"),
    [(ClipBoundConfig(scope="fixed"), 0.6, 1.2), (ClipBoundConfig(preset="wide"), 0.9, 3.0)],
    ids=["default", "wide"],
)
def test_fixed_scope_reports_but_does_not_move(config, low, high):
    bounds = search_bounds(table_of([(1.0, 1.0, True, 0.0), (1.0, -4.0, True, 0.0)], config), config)
    assert (bounds.low, bounds.high, bounds.positive_share, bounds.num_moves) == (low, high, 0.2, 0)
    assert not bounds.saturated


def test_explicit_keys_override_the_preset():
    config = ClipBoundConfig(preset="official", low={"stop": 0.9}, order="high_first")
    assert config.low.model_dump() == {"start": 0.6, "stop": 0.9, "step": 0.05}
    assert (config.rho0, config.order, config.high.stop) == (1.0, "high_first", 2.0)
    assert ClipBoundConfig.model_validate(config.model_dump()) == config
    assert ClipBoundConfig() == ClipBoundConfig(preset="default", **PRESETS["default"])


@pytest.mark.parametrize(
    ("settings_", "complaint"),
    [
        ({"low": [0.6, 1.1, 0.1]}, "low.stop"),
        ({"high": [0.9, 2.0, 0.1]}, "high.start"),
        ({"high": [2.0, 1.5, 0.1]}, "must not be above stop"),
        ({"high": [1.2, 2.0, 0.0]}, "greater than or equal to 0.000000001"),
        ({"rho0": 1.0}, "below 1"),
        ({"rho0": 0.0, "contribution": "official"}, "greater than 0"),
        ({"rho0": 0.0}, "greater than 0"),
        ({"low": {"begin": 0.6}}, "begin"),
        ({"preset": "papre"}, "preset"),
    ],
)
def test_bad_settings_are_named(settings_, complaint):
    with pytest.raises(ValidationError, match=complaint):
        ClipBoundConfig(**settings_)


def test_all_problems_come_in_one_answer():
    with pytest.raises(ValidationError) as error:
        ClipBoundConfig(low=[0.6, 1.1, 0.1], high=[0.9, 2.0, 0.1], rho0=2)
    assert all(name in str(error.value) for name in ("low.stop", "high.start", "rho0"))
