"""KL to a reference policy: estimators, loss and gradient against formulas and exact expectations; the controller."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.kl import ESTIMATORS, KLCoefficient, reference_kl
from bapo_megatron.algorithms.losses import LossInputs, TokenLoss
from bapo_megatron.algorithms.objectives.clipped import BapoLoss
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema_loss import ClipBoundConfig, LossConfig, SelectingLoss
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import fixed_bounds, found_of, loss_inputs, sums_of

FORMULAS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}

# log pi_theta - log pi_behaviour, log pi_theta - log pi_ref, advantage
tokens = st.lists(st.tuples(st.floats(-2, 2), st.floats(-4, 4), st.floats(-2, 2)), min_size=1, max_size=12)


def rounding(terms: list[float]) -> float:
    """Return the most by which a float32 sum of rounded terms may differ from the exact sum."""
    return (len(terms) + 1) * torch.finfo(torch.float32).eps * sum(map(abs, terms)) + 1e-12


def make_inputs(tokens, mask=None) -> LossInputs:
    ratios, differences, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    log_probs_R = torch.linspace(-3, -0.5, len(tokens), dtype=torch.float64).requires_grad_()
    return loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=log_probs_R.detach() - ratios,
        advantages_R=advantages,
        mask_R=torch.tensor(mask or [True] * len(tokens)),
        ages_R=torch.zeros(len(tokens), dtype=torch.int64),
        bounds=ClipBounds(low=0.6, high=1.45, positive_share=0.4, saturated=False, num_moves=5),
        reference_logprobs_R=log_probs_R.detach() - differences,
    )


def with_kl(inputs: LossInputs, config: LossConfig, coefficient: float) -> tuple[torch.Tensor, TokenLoss]:
    """Return each token's loss with its KL term, and the record, as in the learner."""
    tokens = config.tokens(inputs)
    reference_R = inputs.batch.reference_logprobs_R
    kl_R = reference_kl(inputs.log_probs_R, reference_R, inputs.batch.mask_R, config.kl_estimator)
    return tokens.loss_R + coefficient * kl_R, replace(tokens, kl_reference_R=kl_R)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=40, deadline=None)
@given(tokens=tokens, coefficient=st.floats(0, 5))
def test_loss_and_gradient_equal_the_formula_with_every_loss(name, estimator, tokens, coefficient):
    config = LOSSES[name](kl_coef=0.1, kl_estimator=estimator)
    inputs = make_inputs(tokens)
    if config.rule_reads(ClipBoundConfig()) == "nothing":
        inputs = replace(inputs, found=fixed_bounds(config))
    elif isinstance(config, SelectingLoss):
        inputs = replace(inputs, found=found_of(config, inputs))
    plain = config.tokens(inputs)
    (plain_grad,) = torch.autograd.grad(plain.loss_R.sum(), inputs.log_probs_R)
    loss_R, result = with_kl(inputs, config, coefficient)
    (grad,) = torch.autograd.grad(loss_R.sum(), inputs.log_probs_R)
    kl = [FORMULAS[estimator](d) for _, d, _ in tokens]
    slopes = [SLOPES[estimator](d) for _, d, _ in tokens]
    assert (loss_R - plain.loss_R).tolist() == pytest.approx([coefficient * x for x in kl], abs=1e-9)
    assert (grad - plain_grad).tolist() == pytest.approx([coefficient * x for x in slopes], abs=1e-9)
    assert sums_of(result)["loss/kl_reference"] == pytest.approx(sum(kl), rel=0, abs=rounding(kl))
    assert sums_of(result)["loss/policy"] == sums_of(plain)["loss/policy"]


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=6),
)
def test_expectations_over_a_whole_vocabulary(logits):
    """The table in kl.py holds, with every token visited and weighted by its probability."""
    policy, other = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in zip(*logits, strict=True))
    log_p, log_q = policy.log_softmax(0), other.detach().log_softmax(0)
    p, everything = log_p.detach().exp(), torch.ones(len(logits), dtype=torch.bool)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    reversed_kl = (log_q.exp() * (log_q - log_p)).sum()
    gradients = {
        "k1": torch.zeros_like(policy),
        "k2": torch.autograd.grad(exact, policy, retain_graph=True)[0],
        "k3": torch.autograd.grad(reversed_kl, policy, retain_graph=True)[0],
    }
    for name in ESTIMATORS:
        mean = (p * reference_kl(log_p, log_q, everything, name)).sum()
        if name != "k2":
            assert float(mean.detach()) == pytest.approx(float(exact.detach()), abs=1e-9), name
        got = torch.autograd.grad(mean, policy, retain_graph=True)[0]
        torch.testing.assert_close(got, gradients[name], atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_itself_costs_nothing_and_pulls_nowhere(estimator):
    log_probs_R = torch.linspace(-9, 0, 7).requires_grad_()
    kl_R = reference_kl(log_probs_R, log_probs_R.detach(), torch.ones(7, dtype=torch.bool), estimator)
    kl_R.sum().backward()
    assert kl_R.tolist() == log_probs_R.grad.tolist() == [0.0] * 7


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_tokens_may_hold_anything_and_extremes_stay_finite(estimator):
    bad = [math.nan, math.inf, -math.inf]
    mask_R = torch.tensor([True, True, True, False, False, False])
    log_probs_R = torch.tensor([-1.0, -500.0, -0.0, *bad], requires_grad=True)
    reference_R = torch.tensor([-2.0, -0.0, -500.0, *reversed(bad)])
    kl_R = reference_kl(log_probs_R, reference_R, mask_R, estimator)
    kl_R.sum().backward()
    assert torch.isfinite(kl_R).all()
    assert kl_R[3:].tolist() == log_probs_R.grad[3:].tolist() == [0.0] * 3
    assert torch.isfinite(log_probs_R.grad).all()
    assert float(kl_R.detach()[0]) == pytest.approx(FORMULAS[estimator](1.0), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(tokens=tokens, cut=st.integers(0, 12), estimator=st.sampled_from(sorted(ESTIMATORS)))
def test_sums_add_up_over_micro_batches(tokens, cut, estimator):
    config = BapoLoss(kl_coef=0.3, kl_estimator=estimator)
    parts = [make_inputs(part) for part in (tokens[:cut], tokens[cut:]) if part]
    whole = make_inputs(tokens)
    split = sum(sums_of(with_kl(p, config, 0.3)[1])["loss/kl_reference"] for p in parts)
    error = 2 * rounding([FORMULAS[estimator](d) for _, d, _ in tokens])
    assert split == pytest.approx(sums_of(with_kl(whole, config, 0.3)[1])["loss/kl_reference"], rel=0, abs=error)


def ziegler(start: float, target: float, horizon: float, kls: list[float]) -> list[float]:
    """Return the coefficient before each update and after the last, as the paper writes it."""
    values = [start]
    for kl in kls:
        error = (kl - target) / target
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        values.append(values[-1] * (1 + 1 / horizon * error))
    return values


kls = st.lists(st.floats(-0.5, 3), max_size=30)


@settings(max_examples=100, deadline=None)
@given(kls=kls, target=st.floats(0.01, 1), cut=st.integers(0, 30))
def test_the_controller_is_zieglers_also_after_a_resume(kls, target, cut):
    config = BapoLoss(kl_coef=0.2, kl_target=target)
    controller, values = KLCoefficient(config), [0.2]
    for i, kl in enumerate(kls):
        if i == cut:
            saved = json.dumps(controller.state_dict())
            controller = KLCoefficient(config)
            controller.load_state_dict(json.loads(saved))
        controller.observe(kl)
        values.append(controller.value)
    assert values == pytest.approx(ziegler(0.2, target, 10, kls), rel=1e-12)
    assert min(values) > 0


def test_a_fixed_coefficient_stays_and_a_broken_kl_moves_nothing():
    fixed = KLCoefficient(BapoLoss(kl_coef=0.2))
    fixed.observe(7.0)
    fixed.load_state_dict({"coefficient": None})
    steered = KLCoefficient(BapoLoss(kl_coef=0.2, kl_target=0.1))
    steered.observe(math.nan)
    assert fixed.value == steered.value == 0.2


def test_the_controller_reaches_its_target_where_kl_falls_with_the_coefficient():
    controller = KLCoefficient(BapoLoss(kl_coef=0.01, kl_target=0.05))
    for _ in range(600):
        controller.observe(0.01 / controller.value)
    assert 0.01 / controller.value == pytest.approx(0.05, rel=0.01)
