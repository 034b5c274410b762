"""The Entropy-Clip Rule on tabular softmax policies, where entropy before and after a step is known exactly."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.algorithms.diagnostics import (
    AGES,
    TOKEN_CLASSES,
    covariance_terms,
)
from bapo_megatron.algorithms.losses import ClippedTokenLoss
from bapo_megatron.algorithms.objectives.clipped import BapoLoss
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import loss_inputs
from tests.unit.loss_inputs import sums_of as sums_of_record

NUM_ACTIONS = 12
BOUNDS = ClipBounds(low=0.8, high=1.2, positive_share=math.nan, saturated=False, num_moves=0)
ETAS = (1e-2, 1e-3, 1e-4)


def entropy_change(log_probs_V: Tensor, logit_change_V: Tensor) -> Tensor:
    """Return -Cov_pi(log pi, dz), the first-order change of the entropy of softmax(z), in nats, over the last axis."""
    probs_V = log_probs_V.exp()
    deviation_V = log_probs_V - (probs_V * log_probs_V).sum(-1, keepdim=True)
    return -(probs_V * deviation_V * logit_change_V).sum(-1)


def gradient_direction(log_probs_V: Tensor, kept_advantages_V: Tensor) -> Tensor:
    """Return d J / dz = pi (A X - E_pi[A X]) of the clipped J = E_{y ~ mu} min(r A, clip(r) A) for a softmax."""
    probs_V = log_probs_V.exp()
    return probs_V * (kept_advantages_V - (probs_V * kept_advantages_V).sum(-1, keepdim=True))


class Tabular:
    """A softmax policy over a few actions that has moved away from the sampling policy, in float64."""

    def __init__(self, seed: int, distance: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda: torch.randn(NUM_ACTIONS, generator=generator, dtype=torch.float64)  # noqa: E731
        behaviour_logits_V = 1.5 * draw()
        self.logits_V = behaviour_logits_V + distance * draw()
        self.advantages_V = draw()
        self.behaviour_V = behaviour_logits_V.log_softmax(0)
        self.log_probs_V = self.logits_V.log_softmax(0)
        ratio_V = (self.log_probs_V - self.behaviour_V).exp()
        self.clipped_V = torch.where(self.advantages_V > 0, ratio_V >= BOUNDS.high, ratio_V <= BOUNDS.low)
        self.kept_advantages_V = torch.where(self.clipped_V, 0.0, self.advantages_V)

    def loss_gradient(self) -> Tensor:
        """Return the gradient of the training's own loss, in expectation over the sampling policy."""
        logits_V = self.logits_V.clone().requires_grad_()
        inputs = loss_inputs(
            log_probs_R=logits_V.log_softmax(0),
            behaviour_logprobs_R=self.behaviour_V,
            advantages_R=self.advantages_V,
            mask_R=torch.ones(NUM_ACTIONS, dtype=torch.bool),
            ages_R=torch.zeros(NUM_ACTIONS, dtype=torch.int64),
            bounds=BOUNDS,
        )
        loss_V = BapoLoss().tokens(inputs).loss_R
        (gradient_V,) = torch.autograd.grad((self.behaviour_V.exp() * loss_V).sum(), logits_V)
        return gradient_V


def entropy(log_probs_V: Tensor) -> float:
    return float(-(log_probs_V.exp() * log_probs_V).sum())


def relative_errors(policy: Tabular, direction_V: Tensor, predicted: Tensor) -> list[float]:
    """Return errors of the predicted change of entropy, for a step of each length in ETAS along the direction."""
    errors = []
    for eta in ETAS:
        moved_V = (policy.logits_V + eta * direction_V).log_softmax(0)
        measured = entropy(moved_V) - entropy(policy.log_probs_V)
        errors.append(abs(eta * float(predicted) - measured) / abs(measured))
    return errors


def assert_first_order(errors: list[float]) -> None:
    assert errors[0] < 0.2
    for coarse, fine in itertools.pairwise(errors):
        assert 8 < coarse / fine < 12, errors


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_gradient_step_of_the_loss_changes_entropy_as_predicted_to_first_order(seed: int) -> None:
    policy = Tabular(seed)
    assert 0 < policy.clipped_V.sum() < NUM_ACTIONS, "some are clipped and some are not"
    direction_V = -policy.loss_gradient()
    torch.testing.assert_close(gradient_direction(policy.log_probs_V, policy.kept_advantages_V), direction_V)
    predicted = entropy_change(policy.log_probs_V, direction_V)
    assert_first_order(relative_errors(policy, direction_V, predicted))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_rule_is_the_first_order_of_a_natural_gradient_step(seed: int) -> None:
    policy = Tabular(seed)
    entropy_V = torch.full((NUM_ACTIONS,), entropy(policy.log_probs_V), dtype=torch.float64)
    weight_V = (policy.log_probs_V - policy.behaviour_V).exp()
    terms_V = covariance_terms(policy.log_probs_V, entropy_V, weight_V, policy.kept_advantages_V)
    covariance = (policy.behaviour_V.exp() * terms_V).sum()  # the expectation of what training averages
    assert_first_order(relative_errors(policy, policy.kept_advantages_V, -covariance))


def test_a_prediction_that_forgets_the_clipped_tokens_is_not_first_order() -> None:
    policy = Tabular(0)
    forgetful = entropy_change(policy.log_probs_V, gradient_direction(policy.log_probs_V, policy.advantages_V))
    errors = relative_errors(policy, -policy.loss_gradient(), forgetful)
    assert errors[2] > 0.5 * errors[0] > 0.01


def test_by_hand() -> None:
    """pi = (1/2, 1/4, 1/4), H = 1.5 ln 2, dz = (1, 0, 0): dH = -1/2 (-ln 2 + 1.5 ln 2) = -ln 2 / 4."""
    log_probs_V = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    change = entropy_change(log_probs_V, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    assert float(change) == pytest.approx(-math.log(2) / 4)


tokens = st.lists(
    st.tuples(
        st.floats(-4, -0.01),  # log-prob
        st.floats(0.01, 3),  # entropy
        st.floats(0.1, 3),  # weight
        st.sampled_from([-1.5, -0.25, 0.0, 0.25, 1.5]),
        st.booleans(),  # clipped
        st.integers(0, 9),  # age
        st.booleans(),  # trained
    ),
    max_size=20,
)


def sums_of(rows: list[tuple]) -> dict[str, float]:
    columns = list(zip(*rows, strict=True)) or [()] * 7
    floats = [torch.tensor(c, dtype=torch.float64) for c in columns[:4]]
    mask_R = torch.tensor(columns[6], dtype=torch.bool)
    floats = [torch.where(mask_R, x, torch.nan) for x in floats]  # masked tokens may hold anything
    inputs = loss_inputs(
        log_probs_R=floats[0],
        behaviour_logprobs_R=floats[0],
        advantages_R=floats[3],
        mask_R=mask_R,
        bounds=BOUNDS,
        ages_R=torch.tensor(columns[5], dtype=torch.int64),
        entropy_R=floats[1],
    )
    none_R = torch.zeros_like(mask_R)
    tokens = ClippedTokenLoss(
        inputs,
        torch.zeros_like(floats[0]),
        ratio_R=torch.where(mask_R, floats[2], 0.0),
        weight_R=mask_R.double(),
        advantages_R=torch.where(mask_R, floats[3], 0.0),
        clipped_high_R=torch.tensor(columns[4], dtype=torch.bool),
        clipped_low_R=none_R,
        dual_clipped_R=none_R,
        capped_R=none_R,
    )
    return {name: float(value) for name, value in tokens.tables(with_profile=False).items()}


@settings(max_examples=100, deadline=None)
@given(rows=tokens)
def test_sums_equal_a_loop_over_tokens(rows: list[tuple]) -> None:
    wanted = dict.fromkeys(sums_of([]), 0.0)
    assert set(wanted) == {
        f"entropy_rule/{name}{part}"
        for name in ("covariance", *TOKEN_CLASSES)
        for part in ("", *(f"_{age}" for age in AGES), *(["_clipped"] if name != "covariance" else []))
    }
    for log_prob, entropy_here, weight, advantage, clipped, age, is_trained in rows:
        if not is_trained or advantage == 0:
            continue
        sign = "positive" if advantage > 0 else "negative"
        name = f"{sign}_{'high' if log_prob >= -entropy_here else 'low'}"
        bucket = "age_0" if age == 0 else "age_1_3" if age <= 3 else "age_4_up"
        term = 0.0 if clipped else weight * (log_prob + entropy_here) * advantage
        for key, value in (
            ("covariance", term),
            (f"covariance_{bucket}", term),
            (name, 1.0),
            (f"{name}_{bucket}", 1.0),
            (f"{name}_clipped", float(clipped)),
        ):
            wanted[f"entropy_rule/{key}"] += value
    assert sums_of(rows) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(rows=tokens, cut=st.integers(0, 20))
def test_sums_do_not_depend_on_the_split_into_micro_batches(rows: list[tuple], cut: int) -> None:
    first, second = sums_of(rows[:cut]), sums_of(rows[cut:])
    whole, eps = sums_of(rows), torch.finfo(torch.float32).eps
    for name, (a, b) in {name: (first[name], second[name]) for name in first}.items():
        assert a + b == pytest.approx(whole[name], rel=0, abs=eps * (abs(a) + abs(b)) + 1e-12), name


def test_the_loss_reports_what_it_clips() -> None:
    """A > 0 beyond the upper bound, A < 0 below the lower bound, A < 0 beyond the dual clip, and two that count."""
    ratios, advantages = [1.5, 0.5, 4.0, 1.0, 1.1], [1.0, -1.0, -1.0, 1.0, -1.0]
    log_probs_R = torch.full((5,), -2.0, dtype=torch.float64)
    inputs = loss_inputs(
        log_probs_R=log_probs_R,
        behaviour_logprobs_R=log_probs_R - torch.tensor(ratios, dtype=torch.float64).log(),
        advantages_R=torch.tensor(advantages, dtype=torch.float64),
        mask_R=torch.ones(5, dtype=torch.bool),
        ages_R=torch.tensor([0, 0, 0, 0, 5]),
        bounds=BOUNDS,
        entropy_R=torch.tensor([1.0, 1.0, 3.0, 3.0, 1.0], dtype=torch.float64),
    )
    sums = sums_of_record(BapoLoss(dual_clip=3.0).tokens(inputs))
    found = {name.removeprefix("entropy_rule/"): value for name, value in sums.items() if "rule/" in name}
    assert {n: v for n, v in found.items() if v and "age" not in n} == pytest.approx(
        {
            "covariance": 1.0 * (-2 + 3) * 1 + 1.1 * (-2 + 1) * -1,
            "positive_low": 1,
            "positive_low_clipped": 1,
            "positive_high": 1,
            "negative_low": 2,
            "negative_low_clipped": 1,
            "negative_high": 1,
            "negative_high_clipped": 1,
        }
    )
    assert found["covariance_age_4_up"] == pytest.approx(1.1)
