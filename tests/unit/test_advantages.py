"""Advantages against their formulas in plain Python."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.advantages import ADVANTAGES, advantages_of

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=9).filter(
    lambda r: len(set(r)) > 1
)


@settings(max_examples=100, deadline=None)
@given(rewards=rewards)
def test_formulas(rewards):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    expected = {
        "grpo": [(r - mean) / (std + 1e-6) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - other for r, other in zip(rewards, others, strict=True)],
    }
    for name, values in expected.items():
        got = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64))
        assert got.tolist() == pytest.approx(values, abs=1e-12), name


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1.0], []])
def test_equal_rewards_give_exact_zeros(name, dtype, rewards):
    advantages = ADVANTAGES[name](torch.tensor(rewards, dtype=dtype))
    assert advantages.dtype == dtype
    assert advantages.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(("name", "expected"), [("baseline_40", [-0.4, 0.6]), ("baseline_50", [-0.5, 0.5])])
def test_a_constant_baseline_is_not_centred_on_the_group(name, expected):
    advantage = advantages_of(f"bapo_megatron.reproduce.baselines:{name}")
    assert advantage(torch.tensor([0.0, 1.0])).tolist() == pytest.approx(expected)
    assert advantage(torch.zeros(2)).tolist() == pytest.approx([expected[0]] * 2)
