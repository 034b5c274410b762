"""The control of BAPO's search: what its draw depends on, and what it does not."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.algorithms.update_rules import update_rule
from bapo_megatron.config.losses import LOSSES, CustomLoss
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import found_of, loss_inputs
from tests.unit.test_rivals import part_of

NARROW, WIDE = (0.6, 1.2), (0.9, 3.0)


def control(**options: float) -> CustomLoss:
    return CustomLoss(name="studies.random_windows:RANDOM_WINDOWS", options=options)


def update(num_tokens: int, version: int, seed: int = 0) -> LossInputs:
    """Return trained tokens of several ages, each followed by a masked one."""
    generator = torch.Generator().manual_seed(seed)
    log_probs_R, advantages_R, noise_R = torch.randn(3, 2 * num_tokens, generator=generator, dtype=torch.float64)
    ages_R = torch.randint(0, version + 1, (2 * num_tokens,), generator=generator)
    mask_R = torch.arange(2 * num_tokens) % 2 == 0
    inputs = loss_inputs(
        log_probs_R=log_probs_R.requires_grad_(),
        behaviour_logprobs_R=log_probs_R.detach() + noise_R,
        advantages_R=advantages_R,
        mask_R=mask_R,
        ages_R=ages_R.where(mask_R, 10**9),
        bounds=None,  # type: ignore[arg-type]
    )
    return replace(inputs, batch=replace(inputs.batch, versions_R=(version - ages_R).where(mask_R, -5)))


def window(bounds: ClipBounds) -> tuple[float, float]:
    return bounds.low, bounds.high


def total_of(num_tokens: int, version: int) -> Tensor:
    return torch.tensor([num_tokens, num_tokens * version], dtype=torch.float64)


@given(num_tokens=st.integers(1, 40), version=st.integers(0, 10**6), cut=st.integers(0, 80), seed=st.integers(1, 9))
def test_neither_the_tokens_nor_a_split_change_the_window(num_tokens: int, version: int, cut: int, seed: int) -> None:
    """Log-probs, advantages, ages and masked tokens differ; the number of tokens and the weights' version do not."""
    drawn, other = found_of(control(), update(num_tokens, version)), update(num_tokens, version, seed)
    assert window(drawn) in (NARROW, WIDE)
    is_first_R = torch.arange(2 * num_tokens) < cut
    assert window(found_of(control(), part_of(other, is_first_R), part_of(other, ~is_first_R))) == window(drawn)


def test_the_order_is_another_in_each_seed_and_the_same_after_a_resume() -> None:
    """Two seeds sample other numbers of tokens. A resume makes a new rule."""
    rule, orders = update_rule(control(), ClipBoundConfig()), []
    for seed in range(4):
        updates = [(1500 + (37 * seed + 11 * v) % 97, v) for v in range(80)]
        orders.append([window(rule.decide(total_of(*numbers), None)) for numbers in updates])
        resumed = update_rule(control(), ClipBoundConfig())
        assert [window(resumed.decide(total_of(*numbers), None)) for numbers in updates[40:]] == orders[-1][40:]
    for one, other in combinations(orders, 2):
        assert 20 <= sum(a == b for a, b in zip(one, other, strict=True)) <= 60, "as often as chance would have it"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.535, 1.0])
def test_the_wide_window_has_its_share(share: float) -> None:
    rule, num_draws = update_rule(control(wide_share=share), ClipBoundConfig()), 4000
    drawn = [window(rule.decide(total_of(1000 + v % 300, v), None)) for v in range(num_draws)]
    assert drawn.count(WIDE) + drawn.count(NARROW) == num_draws
    assert drawn.count(WIDE) / num_draws == pytest.approx(share, abs=4 * (share * (1 - share) / num_draws) ** 0.5)


def test_the_loss_is_that_of_bapo_with_these_bounds() -> None:
    bapo, seen = LOSSES["bapo"].model_validate({"name": "bapo"}), set()
    for version in range(20):
        inputs = update(30, version)
        bounds = found_of(control(), inputs)
        seen.add(window(bounds))
        ours, theirs = (loss.tokens(replace(inputs, found=bounds)).loss_R for loss in (control(), bapo))
        assert torch.equal(ours, theirs)
    assert seen == {NARROW, WIDE}
