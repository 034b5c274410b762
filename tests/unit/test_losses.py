"""Losses and their gradients against the formula, token by token."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.clip_bounds import contribution_table
from bapo_megatron.algorithms.losses import importance_ratio
from bapo_megatron.algorithms.mismatch import no_mismatch
from bapo_megatron.algorithms.objectives.clipped import BapoLoss, GrpoLoss
from bapo_megatron.algorithms.objectives.supervised import SftLoss
from bapo_megatron.config.losses import LOSS, LOSS_SECTIONS, LOSSES
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.learner.token_metrics import TokenMetrics
from bapo_megatron.metrics import METRICS, Metric, reduce_updates
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import fixed_bounds, float32_sum_error, loss_inputs, maxima_of, sums_of

BOUNDS = ClipBounds(low=0.6, high=1.45, positive_share=0.4, saturated=False, num_moves=5)
CONFIG = BapoLoss()


def make_inputs(log_ratios, advantages, mask=None, entropies=None, ages=None, bounds=BOUNDS):
    num = len(log_ratios)
    behaviour_R = torch.linspace(-3, -0.5, num, dtype=torch.float64)
    log_probs_R = (behaviour_R + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    return loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=behaviour_R,
        advantages_R=torch.tensor(advantages, dtype=torch.float64),
        mask_R=torch.tensor(mask or [True] * num, dtype=torch.bool),
        ages_R=torch.tensor(ages or [0] * num, dtype=torch.int64),
        entropy_R=None if entropies is None else torch.tensor(entropies, dtype=torch.float64),
        bounds=bounds,
    )


def test_every_metric_of_tokens_names_a_value_of_the_record():
    record = CONFIG.tokens(make_inputs([0.1], [1.0]))
    declared = [metric for metric in METRICS.values() if metric.tokens]
    assert [metric.key for metric in declared if metric.of and not hasattr(record, metric.of)] == []
    from_tables = {metric.key for metric in declared if not metric.of}
    assert {*sums_of(record, with_profile=True), *maxima_of(record)} - {m.key for m in declared} == set()
    assert from_tables == {key for key in sums_of(record, with_profile=True) if not METRICS[key].of}


def test_a_metric_of_the_rule_is_no_field_of_the_record():
    of_rule = Metric("loss/of_rule", "tokens", "Kept.", updates="max")
    record = CONFIG.tokens(make_inputs([0.1], [1.0]))
    summed, plain = (TokenMetrics(own).summarize(record, no_mismatch(), with_profile=False) for own in ([of_rule], []))
    assert torch.equal(summed.sums, plain.sums)
    assert reduce_updates({"loss/of_rule": [3.0, 1.0]}, [of_rule]) == {"loss/of_rule": 3.0}


def literal_loss(log_ratio, advantage, dual_clip=None):
    ratio = math.exp(log_ratio)
    objective = min(ratio * advantage, min(max(ratio, BOUNDS.low), BOUNDS.high) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


tokens = st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=12)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@settings(max_examples=200, deadline=None)
@given(tokens=tokens)
def test_loss_and_gradient_equal_the_formula(dual_clip, tokens):
    log_ratios, advantages = zip(*tokens, strict=True)
    inputs = make_inputs(log_ratios, advantages)
    loss_R = BapoLoss(dual_clip=dual_clip).tokens(inputs).loss_R
    assert loss_R.tolist() == pytest.approx([literal_loss(x, a, dual_clip) for x, a in tokens], rel=1e-9, abs=1e-12)
    loss_R.sum().backward()
    kinks = [math.log(BOUNDS.low), math.log(BOUNDS.high), math.log(3.0)]
    for (x, a), gradient in zip(tokens, inputs.log_probs_R.grad.tolist(), strict=True):
        if min(abs(x - kink) for kink in kinks) > 1e-5:
            slope = (literal_loss(x + 1e-6, a, dual_clip) - literal_loss(x - 1e-6, a, dual_clip)) / 2e-6
            assert gradient == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_gradient_is_exactly_zero_where_clipped_and_only_there():
    ratios = [1.5, 1.45, 1.44, 0.1, 0.5, 0.6, 0.61, 9.0, 1.5, 0.5]
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0, 0.0]
    inputs = make_inputs([0.0] * len(ratios), advantages)
    log_probs_R = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    low, high = log_probs_R.detach()[[4, 0]].exp().tolist()  # 0.5 and 1.5 after a round trip through logarithms
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=torch.zeros(len(ratios), dtype=torch.float64),
        advantages_R=inputs.batch.advantages_R,
        mask_R=inputs.batch.mask_R,
        ages_R=inputs.ages_R,
        bounds=ClipBounds(low=low, high=high, positive_share=0.4, saturated=False, num_moves=0),
    )
    CONFIG.tokens(inputs).loss_R.sum().backward()
    clipped = [gradient == 0.0 for gradient in inputs.log_probs_R.grad.tolist()]
    assert clipped == [True, False, False, False, True, False, False, False, True, True]


@settings(max_examples=100, deadline=None)
@given(tokens=tokens)
def test_the_gradient_reading_counts_the_tokens_that_carry_gradient(tokens):
    """P and N of the search are the masses whose gradient the loss lets through."""
    log_ratios, advantages = zip(*tokens, strict=True)
    config = ClipBoundConfig(contribution="gradient")
    bounds = ClipBounds(low=0.6, high=1.2, positive_share=0.4, saturated=False, num_moves=0)
    inputs = make_inputs(log_ratios, advantages, bounds=bounds)
    CONFIG.tokens(inputs).loss_R.sum().backward()
    gradient_R = -inputs.log_probs_R.grad  # r A unless it is clipped
    ratio_R = importance_ratio(inputs.log_probs_R.detach(), inputs.batch.behaviour_logprobs_R, inputs.batch.mask_R)
    table = contribution_table(ratio_R, inputs.batch.advantages_R, inputs.batch.mask_R, None, config)
    assert float(table[0]) == pytest.approx(float(gradient_R.clamp(min=0).sum()), abs=1e-9)
    assert float(table[len(config.high.points)]) == pytest.approx(-float(gradient_R.clamp(max=0).sum()), abs=1e-9)


def test_masked_tokens_may_hold_anything():
    inputs = make_inputs([0.1, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], mask=[True, False, False, False])
    bad_R = torch.tensor([0.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
    log_probs_R = (inputs.log_probs_R.detach() + bad_R).requires_grad_()
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=inputs.batch.behaviour_logprobs_R + bad_R,
        advantages_R=inputs.batch.advantages_R + bad_R,
        mask_R=inputs.batch.mask_R,
        ages_R=inputs.ages_R + torch.tensor([0, 99, 99, 99]),
        entropy_R=1 + bad_R,
        bounds=BOUNDS,
    )
    result = CONFIG.tokens(inputs)
    result.loss_R.sum().backward()
    assert log_probs_R.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0, 0.0])
    assert all(math.isfinite(x) for x in (*sums_of(result).values(), *maxima_of(result).values()))
    assert int(result.mask_R.sum()) == 1
    assert maxima_of(result)["staleness/max"] == 0


def test_extreme_log_ratios_stay_finite():
    inputs = make_inputs([2000.0, 2000.0, -2000.0, -2000.0], [1.0, -1.0, 1.0, -1.0])
    result = CONFIG.tokens(inputs)
    result.loss_R.sum().backward()
    assert torch.isfinite(result.loss_R).all()
    assert all(math.isfinite(x) for x in sums_of(result).values())
    assert torch.isfinite(inputs.log_probs_R.grad).all()


def test_metrics_count_what_they_say():
    log_ratios = [math.log(r) for r in (2.0, 1.0, 0.5, 4.0, 3.0)]
    inputs = make_inputs(
        log_ratios,
        [1.0, 2.0, -1.0, -0.5, 1.0],
        mask=[True, True, True, True, False],
        entropies=[0.5, 1.0, 1.5, 0.0, 9.0],
        ages=[0, 1, 2, 5, 7],
    )
    result = BapoLoss(dual_clip=3.0).tokens(inputs)
    assert int(result.mask_R.sum()) == 4
    sums = {name: value for name, value in sums_of(result).items() if "entropy_rule/" not in name}
    assert sums == pytest.approx(
        {
            "loss/policy": -1.45 - 2 + 0.6 + 1.5,
            "loss/positive_token_share": 2,
            "loss/negative_token_share": 2,
            "loss/clip_high_share": 1,
            "loss/clip_low_share": 1,
            "loss/dual_clip_share": 1,
            "loss/positive_mass": 3.45,
            "loss/negative_mass": 2.1,
            "loss/ratio_mean": 7.5,
            "loss/effective_share": 7.5,
            "loss/importance_square": 4 + 1 + 0.25 + 16,
            "loss/importance_weight_mean": 4,
            "loss/importance_capped_share": 0,
            "loss/approx_kl": 7.5 - 4 - sum(log_ratios[:4]),
            "loss/entropy": 3.0,
            "staleness/mean": 8,
        },
        rel=1e-6,
    )
    assert maxima_of(result) == pytest.approx({"loss/ratio_max": 4.0, "staleness/max": 5.0})


@settings(max_examples=50, deadline=None)
@given(tokens=tokens, cut=st.integers(0, 12))
def test_sums_add_up_over_micro_batches(tokens, cut):
    log_ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))

    def run(part):
        num = log_ratios[part].numel()
        return CONFIG.tokens(
            loss_inputs(
                log_probs_R=log_ratios[part],
                behaviour_logprobs_R=torch.zeros(num, dtype=torch.float64),
                advantages_R=advantages[part],
                mask_R=torch.ones(num, dtype=torch.bool),
                ages_R=torch.arange(len(tokens))[part],
                bounds=BOUNDS,
            )
        )

    whole, first, second = run(slice(None)), run(slice(0, cut)), run(slice(cut, None))
    sums, maxima = [sums_of(x) for x in (whole, first, second)], [maxima_of(x) for x in (whole, first, second)]
    covariance_R = whole.ratio_R * whole.inputs.log_probs_R * whole.advantages_R  # at least each token's term
    for name, value in sums[0].items():
        values_R = getattr(whole, METRICS[name].of) if METRICS[name].of else covariance_R
        error = 3 * float32_sum_error(values_R, num_roundings=13)  # three sums of 12 tokens, or 12 cells of a table
        assert sums[1][name] + sums[2][name] == pytest.approx(value, rel=0, abs=error)
    for name, value in maxima[0].items():
        assert max(maxima[1][name], maxima[2][name]) == value


@settings(max_examples=300, deadline=None)
@given(tokens=tokens, cut=st.integers(0, 12), scale=st.floats(-3, 3), dropped=st.integers(0, 3))
def test_the_effective_share_is_kish_s_formula_for_any_loss_and_division(tokens, cut, scale, dropped):
    """It does not change if all weights are scaled, and masked tokens do not count."""
    tokens = [*tokens, *[(9.0, 1.0)] * dropped]
    is_trained = [i < len(tokens) - dropped for i in range(len(tokens))]

    def share(loss, parts, shift):
        rows = []
        for part in parts:
            log_ratios, advantages = zip(*tokens[part], strict=True) if tokens[part] else ((), ())
            inputs = make_inputs([x + shift for x in log_ratios], advantages, mask=is_trained[part])
            rows.append(TokenMetrics().summarize(loss.tokens(inputs), no_mismatch(), with_profile=False))
        alone = SimpleNamespace(reduce_over_data=lambda table, op=None: table)
        return TokenMetrics().reduce(rows, sum(is_trained), alone)[0]["loss/effective_share"]

    weights = [math.exp(x) for (x, _), kept in zip(tokens, is_trained, strict=True) if kept]
    expected = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    assert 1 / len(weights) <= expected * (1 + 1e-9)
    parts = [slice(0, cut), slice(cut, None)]
    for loss in (CONFIG, LOSSES["gspo"]()):
        assert share(loss, [slice(None)], 0.0) == pytest.approx(expected, rel=1e-5)
        assert share(loss, parts, scale) == pytest.approx(expected, rel=1e-5)


def test_fixed_bounds():
    grpo, clip_higher = fixed_bounds(GrpoLoss()), fixed_bounds(GrpoLoss(clip_high=1.28))
    assert (grpo.low, grpo.high) == (0.8, 1.2)
    assert (clip_higher.low, clip_higher.high) == (0.8, 1.28)
    assert set(LOSSES) == set(LOSS_SECTIONS) - {"custom"} == set(LOSS.names)
    with pytest.raises(AssertionError, match="search"):
        fixed_bounds(BapoLoss())


@settings(max_examples=50, deadline=None)
@given(tokens=tokens)
def test_the_supervised_loss_is_the_negative_log_prob_of_trained_tokens(tokens):
    log_ratios, advantages = zip(*tokens, strict=True)
    mask = [i % 3 != 1 for i in range(len(tokens))]
    inputs = make_inputs(log_ratios, advantages, mask, entropies=[0.5] * len(tokens), ages=[7] * len(tokens))
    expected = [-x if m else 0.0 for x, m in zip(inputs.log_probs_R.tolist(), mask, strict=True)]
    inputs.log_probs_R.data[~inputs.batch.mask_R] = math.nan  # a masked token may hold anything
    result = SftLoss().tokens(inputs)
    assert result.loss_R.tolist() == pytest.approx(expected)
    result.loss_R.sum().backward()
    assert inputs.log_probs_R.grad.tolist() == [-float(m) for m in mask]
    count = int(result.mask_R.sum())
    assert count == sum(mask)
    sums, error = sums_of(result), float32_sum_error(torch.tensor(expected, dtype=torch.float64))
    assert sums.pop("loss/policy") == pytest.approx(math.fsum(expected), rel=0, abs=error)
    assert sums == {"loss/entropy": 0.5 * count, "staleness/mean": 7 * count}
    assert maxima_of(result) == {"staleness/max": 7 if count else 0}


def test_the_supervised_loss_takes_an_empty_micro_batch_and_has_no_bounds():
    result = SftLoss().tokens(make_inputs([], []))
    assert result.loss_R.shape == (0,)
    assert maxima_of(result)["staleness/max"] == 0
    assert math.isnan(fixed_bounds(SftLoss()).low)
