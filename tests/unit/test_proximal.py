"""The decoupled objective (loss.proximal = "learner"): loss, gradient and bound search against the formula."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.clip_bounds import contribution_table
from bapo_megatron.algorithms.losses import (
    LossInputs,
    importance_ratio,
    token_ratios,
)
from bapo_megatron.algorithms.objectives.clipped import BapoLoss, GrpoLoss
from bapo_megatron.buffer.packing import Pass, Share
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema_loss import ClipBoundConfig, RatioLoss
from bapo_megatron.types import Batch, ClipBounds
from tests.unit.loss_inputs import loss_inputs, positive_share, sums_of
from tests.unit.test_rivals import RIVALS

BOUNDS = ClipBounds(low=0.6, high=1.45, positive_share=0.4, saturated=False, num_moves=5)
LOW, HIGH, CAP = 0.6, 1.45, 2.0

# log pi_theta - log pi_prox, log pi_prox - log pi_behaviour, advantage
tokens = st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-2, 2, width=32)), min_size=1, max_size=12)


def make_inputs(tokens, mask=None) -> LossInputs:
    log_ratios, log_weights, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    behaviour_R = torch.linspace(-3, -0.5, len(tokens), dtype=torch.float64)
    proximal_R = behaviour_R + log_weights
    return loss_inputs(
        log_probs_R=(proximal_R + log_ratios).requires_grad_(),
        behaviour_logprobs_R=behaviour_R,
        advantages_R=advantages,
        mask_R=torch.tensor(mask or [True] * len(tokens)),
        ages_R=torch.zeros(len(tokens), dtype=torch.int64),
        bounds=BOUNDS,
        proximal_logprobs_R=proximal_R,
    )


def literal_loss(log_ratio, log_weight, advantage, cap=CAP, dual_clip=None):
    ratio, weight = math.exp(log_ratio), min(math.exp(log_weight), cap)
    objective = min(ratio * advantage, min(max(ratio, LOW), HIGH) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -weight * objective


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("cap", [1.0, 2.0, 1e9])
@settings(max_examples=100, deadline=None)
@given(tokens=tokens)
def test_loss_and_gradient_equal_the_formula(dual_clip, cap, tokens):
    inputs = make_inputs(tokens)
    loss_R = BapoLoss(dual_clip=dual_clip, importance_cap=cap).tokens(inputs).loss_R
    expected = [literal_loss(x, w, a, cap, dual_clip) for x, w, a in tokens]
    assert loss_R.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    loss_R.sum().backward()
    kinks = [math.log(LOW), math.log(HIGH), math.log(3.0)]
    for (x, w, a), gradient in zip(tokens, inputs.log_probs_R.grad.tolist(), strict=True):
        if min(abs(x - kink) for kink in kinks) > 1e-5:
            rise = literal_loss(x + 1e-6, w, a, cap, dual_clip) - literal_loss(x - 1e-6, w, a, cap, dual_clip)
            assert gradient == pytest.approx(rise / 2e-6, rel=1e-5, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(tokens=tokens)
def test_with_proximal_equal_to_behaviour_it_is_the_plain_loss_bit_for_bit(tokens):
    decoupled = make_inputs([(x, 0.0, a) for x, _, a in tokens])
    plain = loss_inputs(
        log_probs_R=decoupled.log_probs_R.detach().clone().requires_grad_(),
        behaviour_logprobs_R=decoupled.batch.behaviour_logprobs_R,
        advantages_R=decoupled.batch.advantages_R,
        mask_R=decoupled.batch.mask_R,
        ages_R=decoupled.ages_R,
        bounds=BOUNDS,
    )
    results = [BapoLoss(importance_cap=2.0).tokens(inputs) for inputs in (decoupled, plain)]
    assert torch.equal(results[0].loss_R, results[1].loss_R)
    assert sums_of(results[0]) == sums_of(results[1])
    for inputs, result in zip((decoupled, plain), results, strict=True):
        result.loss_R.sum().backward()
        assert inputs.log_probs_R.grad is not None
    assert torch.equal(decoupled.log_probs_R.grad, plain.log_probs_R.grad)


@settings(max_examples=100, deadline=None)
@given(tokens=tokens)
def test_an_uncapped_unclipped_token_has_the_plain_gradient(tokens):
    """w r = pi_theta / pi_behaviour: the weights change what is clipped, not what an unclipped token is worth."""
    inside = [(max(min(x, 0.3), -0.3), w, a) for x, w, a in tokens]
    inputs = make_inputs(inside)
    BapoLoss(importance_cap=1e9).tokens(inputs).loss_R.sum().backward()
    ratio_R = importance_ratio(inputs.log_probs_R.detach(), inputs.batch.behaviour_logprobs_R, inputs.batch.mask_R)
    torch.testing.assert_close(inputs.log_probs_R.grad, -ratio_R * inputs.batch.advantages_R, rtol=1e-9, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(tokens=tokens)
def test_the_search_counts_the_masses_of_the_loss(tokens):
    """gradient: P and N are the gradient that the loss lets through. surrogate: they are the loss's own terms."""
    inputs = make_inputs(tokens)
    result = BapoLoss(importance_cap=CAP).tokens(replace(inputs, found=ClipBounds(LOW, 1.2, 0, False, 0)))
    result.loss_R.sum().backward()
    ratios = token_ratios(inputs.batch, inputs.log_probs_R.detach(), BapoLoss(importance_cap=CAP))
    gradient_R = -inputs.log_probs_R.grad
    for contribution, part_R in (("gradient", gradient_R), ("surrogate", -result.loss_R.detach())):
        config = ClipBoundConfig(contribution=contribution)
        table = contribution_table(
            ratios.ratio_R, inputs.batch.advantages_R, inputs.batch.mask_R, None, config, weights=ratios.weight_R
        )
        positive, negative = float(table[0]), float(table[len(config.high.points)])
        assert positive == pytest.approx(float(part_R.clamp(min=0).sum()), rel=1e-6, abs=1e-9)
        assert negative == pytest.approx(-float(part_R.clamp(max=0).sum()), rel=1e-6, abs=1e-9)
        if positive + negative > 1e-6:
            assert positive_share(table, config, LOW, 1.2) == pytest.approx(positive / (positive + negative))


CORRECTIONS = [
    {"importance_kind": kind, "importance_level": level, "importance_floor": floor, "importance_cap": cap}
    for kind in ("truncate", "mask")
    for level in ("token", "sequence")
    for floor, cap in ((0.0, 2.0), (0.5, 5.0))
]
CORRECTIONS += [
    {"importance_level": level, "importance_cap": 1e9, "filter_level": filter_level, "filter_floor": 0.6} | cap
    for level in ("token", "sequence")
    for filter_level in ("token", "sequence", "geometric")
    for cap in ({}, {"filter_cap": 1.7})
]
responses = st.lists(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.sampled_from([-1.5, 0.0, 0.7])), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def literal_weights(
    config: RatioLoss,
    log_weights: Sequence[float],
    drifts: Sequence[float],
    advantages: Sequence[float],
    sequence: Sequence[int],
) -> list[float]:
    """Return w of every trained token, from log(pi_prox / pi_behaviour) and log(pi_behaviour / pi)."""
    weights = []
    for i, s in enumerate(sequence):
        mine = [j for j, other in enumerate(sequence) if other == s]
        weight = math.exp(log_weights[i])
        if config.importance_level == "sequence":
            weight = math.exp(max(-20.0, min(20.0, sum(log_weights[j] for j in mine))))
        if config.importance_kind == "truncate":
            weight = min(max(weight, config.importance_floor), config.importance_cap)
        elif not config.importance_floor <= weight <= config.importance_cap:
            weight = 0.0
        if config.filter_level is not None and config.filter_kind == "mask":
            total = math.prod(math.exp(log_weights[j]) for j in mine)
            of_level = {"token": math.exp(log_weights[i]), "sequence": total, "geometric": total ** (1 / len(mine))}
            if not config.filter_floor <= of_level[config.filter_level] <= config.filter_cap:
                weight = 0.0
        drift = sum(drifts[j] for j in mine) / len(mine)
        is_masked = config.max_drift is not None and advantages[i] < 0 and drift > config.max_drift
        weights.append(0.0 if is_masked else weight)
    return weights


def corrected_inputs(responses: list[list[tuple[float, float, float]]]) -> LossInputs:
    inputs = make_inputs([token for tokens in responses for token in tokens])
    sequence_R = torch.arange(len(responses)).repeat_interleave(torch.tensor([len(x) for x in responses]))
    cu_seqlens_S1 = torch.tensor([0, *(len(x) for x in responses)]).cumsum(0).int()
    return replace(inputs, batch=replace(inputs.batch, sequence_R=sequence_R, cu_seqlens_S1=cu_seqlens_S1))


def weights_of(inputs: LossInputs, config: RatioLoss) -> list[float]:
    batch, log_probs_R = inputs.batch, inputs.log_probs_R.detach()
    assert batch.proximal_logprobs_R is not None
    log_weights = (batch.proximal_logprobs_R - batch.behaviour_logprobs_R).tolist()
    drifts = (batch.behaviour_logprobs_R - log_probs_R).tolist()
    return literal_weights(config, log_weights, drifts, batch.advantages_R.tolist(), batch.sequence_R.tolist())


@settings(max_examples=400, deadline=None)
@given(responses=responses, correction=st.sampled_from(CORRECTIONS), max_drift=st.sampled_from([None, 0.3123]))
def test_every_correction_equals_its_formula(responses, correction, max_drift):
    config = GrpoLoss.model_validate({"proximal": "learner", "max_drift": max_drift} | correction)
    inputs = corrected_inputs(responses)
    weights = weights_of(inputs, config)
    result = config.tokens(inputs)
    expected = []
    for (log_ratio, _, advantage), weight in zip([x for tokens in responses for x in tokens], weights, strict=True):
        expected.append(weight * literal_loss(log_ratio, 0.0, advantage))
    assert result.loss_R.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert result.weight_R.tolist() == pytest.approx(weights, rel=1e-9, abs=1e-12)
    plain = GrpoLoss(proximal="learner", importance_cap=1.0, importance_floor=1.0).tokens(inputs)
    (gradient_R,) = torch.autograd.grad(result.loss_R.sum(), inputs.log_probs_R)
    (plain_R,) = torch.autograd.grad(plain.loss_R.sum(), inputs.log_probs_R)
    assert gradient_R.tolist() == pytest.approx((plain_R * result.weight_R).tolist(), rel=1e-9, abs=1e-12)
    assert (result.drifted_R is None) == (max_drift is None)
    assert (result.filtered_R is None) == (config.filter_level is None)


@settings(max_examples=30, deadline=None)
@given(responses=responses, correction=st.sampled_from(CORRECTIONS))
def test_the_search_and_other_losses_weight_a_token_alike(responses, correction):
    options = {"proximal": "learner", "max_drift": 0.3123} | correction
    inputs = corrected_inputs(responses)
    batch, ones = inputs.batch, {"proximal": "learner", "importance_floor": 1.0, "importance_cap": 1.0}
    ratios = token_ratios(batch, inputs.log_probs_R.detach(), BapoLoss.model_validate(options))
    weights_R = torch.tensor(weights_of(inputs, BapoLoss.model_validate(options)), dtype=torch.float64)
    config = ClipBoundConfig(contribution="surrogate")
    found, want = (
        contribution_table(ratios.ratio_R, batch.advantages_R, batch.mask_R, None, config, weights=x)
        for x in (ratios.weight_R, weights_R)
    )
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
    for name in RIVALS:
        section = LOSS_SECTIONS[name]
        plain_R = section.model_validate({"name": name} | ones).tokens(inputs).loss_R
        weighted_R = section.model_validate({"name": name} | options).tokens(inputs).loss_R
        torch.testing.assert_close(weighted_R, plain_R * weights_R, rtol=1e-9, atol=1e-12)


def test_sums_over_context_ranks_make_the_weights_of_a_response():
    """Two ranks hold the responses' tokens alternately; one of them has none of the last response."""
    tokens = [[(0.5, 0.9, -1.0), (0.1, -0.2, -1.0), (0.4, 0.3, -1.0)], [(-0.9, 0.1, -1.0), (-0.3, 0.6, -1.0)]]
    options = {"proximal": "learner", "importance_level": "sequence", "importance_cap": 9.0, "max_drift": 0.2}
    config = GrpoLoss.model_validate(options)
    whole = corrected_inputs(tokens)
    want = token_ratios(whole.batch, whole.log_probs_R, config)
    assert want.drifted_R.tolist() == [False] * 3 + [True] * 2
    assert want.weight_R.unique().numel() == 2
    tables, ranks = {}, torch.tensor([0, 1, 0, 0, 0])
    columns = ("sequence_R", "advantages_R", "behaviour_logprobs_R", "mask_R", "proximal_logprobs_R")
    parts = [
        (replace(whole.batch, **{name: getattr(whole.batch, name)[ranks == r] for name in columns}), ranks == r)
        for r in range(2)
    ]
    for rank, (batch, mine_R) in enumerate(parts):
        tables[rank] = []
        token_ratios(batch, whole.log_probs_R[mine_R], config, lambda t, to=tables[rank]: to.append(t) or t)
    assert len(tables[0]) == len(tables[1]) == 2
    for batch, mine_R in parts:
        sums = iter(a + b for a, b in zip(tables[0], tables[1], strict=True))
        found = token_ratios(batch, whole.log_probs_R[mine_R], config, lambda _, sums=sums: next(sums))
        torch.testing.assert_close(found.weight_R, want.weight_R[mine_R], rtol=1e-12, atol=0)
        assert torch.equal(found.drifted_R, want.drifted_R[mine_R])


def test_masked_tokens_may_hold_anything_and_metrics_count_the_weights():
    nan = math.nan
    inputs = make_inputs(
        [(0.1, math.log(3), 1.0), (0.0, math.log(0.5), -1.0), (nan, nan, nan)], mask=[True, True, False]
    )
    result = BapoLoss(importance_cap=CAP).tokens(inputs)
    result.loss_R.sum().backward()
    assert inputs.log_probs_R.grad.tolist() == pytest.approx([-2 * math.exp(0.1), 0.5, 0.0])
    sums = sums_of(result)
    assert sums["loss/importance_weight_mean"] == pytest.approx(2.5)
    assert sums["loss/importance_capped_share"] == 1
    assert sums["loss/ratio_mean"] == pytest.approx(math.exp(0.1) + 1)
    behaviour_ratios = [3 * math.exp(0.1), 0.5]
    assert sums["loss/approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in behaviour_ratios))
    assert all(math.isfinite(x) for x in sums.values())


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=2, max_size=8),
    data_size=st.integers(1, 2),
    max_tokens=st.integers(5, 40),
    seed=st.integers(0, 100),
)
def test_packing_keeps_every_proximal_log_prob_with_its_token(lengths, data_size, max_tokens, seed):
    prompt_lens, response_lens = torch.tensor(lengths).unbind(1)
    num_tokens = int((prompt_lens + response_lens).sum())
    index_T = torch.arange(num_tokens)
    is_response_T = torch.cat([torch.arange(p + r) >= p for p, r in lengths])
    batch = Batch(
        token_ids_T=index_T,
        seq_lens_S=prompt_lens + response_lens,
        sampled_T=is_response_T,
        advantages_T=torch.zeros(num_tokens),
        behaviour_logprobs_T=-index_T.float(),
        versions_T=index_T,
        mask_T=is_response_T,
        proximal_logprobs_T=-index_T.float() - 0.5,
    )
    seen = []
    for data_rank in range(data_size):
        dealt = Pass(Share(data_rank, data_size), max_tokens, num_minibatches=2, seed=seed)
        for minibatch in dealt.minibatches(batch):
            for mb in minibatch.micro_batches:
                assert torch.equal(mb.batch_rows_R, mb.targets_R)
                assert torch.equal(mb.proximal_logprobs_R, mb.behaviour_logprobs_R - 0.5)
                seen += mb.batch_rows_R.tolist()
    assert sorted(seen) == is_response_T.nonzero()[:, 0].tolist()
