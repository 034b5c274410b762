"""GAE and n-step advantages against their definitions, token by token in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.gae import explained_variance, gae, n_step, td_errors, whitened
from bapo_megatron.config.schema import AdvantageConfig
from bapo_megatron.learner.values import token_advantages
from bapo_megatron.types import Batch

number = st.floats(-5, 5)
sequence = st.tuples(st.integers(1, 4), number, st.lists(number, min_size=1, max_size=20))  # prompt, reward, values
sequences = st.lists(sequence, min_size=1, max_size=6)
discount = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])
Sequence = tuple[int, float, list[float]]


def errors_of(batch: list[Sequence], gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    return td_errors(
        torch.tensor([reward for _, reward, _ in batch], dtype=torch.float64),
        torch.tensor([v for _, _, values in batch for v in values], dtype=torch.float64),
        torch.tensor([len(values) for _, _, values in batch]),
        gamma=gamma,
    )


def joined(per_sequence: list[list[float]]) -> list[float]:
    return [a for values in per_sequence for a in values]


def rewards_of(reward: float, length: int) -> list[float]:
    return [0.0] * (length - 1) + [reward]


def literal_n_step(reward: float, values: list[float], gamma: float, n: int) -> list[float]:
    """Return r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n} - V_t, where V after the last token is 0."""
    length, rewards = len(values), rewards_of(reward, len(values))
    advantages = []
    for t in range(length):
        total = sum(gamma**k * rewards[t + k] for k in range(n) if t + k < length)
        if t + n < length:
            total += gamma**n * values[t + n]
        advantages.append(total - values[t])
    return advantages


def literal_gae(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    """Return (1 - lam) sum_n lam^(n-1) A^(n), Eq. 16's exponentially weighted mean; all n past the end are the same."""
    length = len(values)
    by_n = [literal_n_step(reward, values, gamma, n) for n in range(1, length + 1)]
    advantages = []
    for t in range(length):
        left = length - t
        mean = (1 - lam) * sum(lam ** (n - 1) * by_n[n - 1][t] for n in range(1, left))
        advantages.append(mean + lam ** (left - 1) * by_n[left - 1][t])
    return advantages


@settings(max_examples=150, deadline=None)
@given(batch=sequences, gamma=discount, lam=discount)
def test_gae_is_the_weighted_mean_of_n_step_advantages(batch, gamma, lam):
    got = gae(*errors_of(batch, gamma), gamma=gamma, lam=lam)
    want = joined([literal_gae(reward, values, gamma, lam) for _, reward, values in batch])
    assert got.tolist() == pytest.approx(want, abs=1e-10)


@settings(max_examples=150, deadline=None)
@given(batch=sequences, gamma=discount, n=st.integers(1, 25))
def test_n_step_is_the_bootstrapped_return_less_the_value(batch, gamma, n):
    got = n_step(*errors_of(batch, gamma), gamma=gamma, num_steps=n)
    want = joined([literal_n_step(reward, values, gamma, n) for _, reward, values in batch])
    assert got.tolist() == pytest.approx(want, abs=1e-10)


@settings(max_examples=100, deadline=None)
@given(batch=sequences, gamma=discount)
def test_the_ends_of_both_families(batch, gamma):
    """lam = 0 and n = 1 are the TD error; lam = 1 and n = infinity are the discounted reward minus the value."""
    errors_R, num_left_R = errors_of(batch, gamma)
    monte_carlo = [gamma ** (len(v) - 1 - t) * r - v[t] for _, r, v in batch for t in range(len(v))]
    assert torch.equal(gae(errors_R, num_left_R, gamma=gamma, lam=0.0), errors_R)
    assert torch.equal(n_step(errors_R, num_left_R, gamma=gamma, num_steps=1), errors_R)
    assert gae(errors_R, num_left_R, gamma=gamma, lam=1.0).tolist() == pytest.approx(monte_carlo, abs=1e-10)
    assert n_step(errors_R, num_left_R, gamma=gamma, num_steps=10**9).tolist() == pytest.approx(monte_carlo, abs=1e-10)


@settings(max_examples=100, deadline=None)
@given(batch=sequences, gamma=discount.filter(bool), data=st.data())
def test_given_tokens_add_nothing_wherever_they_lie(batch, gamma, data):
    """Values on given tokens are nan, because nothing may depend on them."""
    sampled = [
        [False] * prompt + [here for _ in values for here in [False] * data.draw(st.integers(0, 2)) + [True]]
        for prompt, _, values in batch
    ]
    sampled_T = torch.tensor(joined(sampled))
    values_T = torch.full(sampled_T.shape, math.nan, dtype=torch.float64)
    values_T[sampled_T] = torch.tensor(joined([values for _, _, values in batch]), dtype=torch.float64)
    zeros_T = torch.zeros(sampled_T.shape)
    step = Batch(
        token_ids_T=zeros_T.long(),
        seq_lens_S=torch.tensor([len(s) for s in sampled]),
        sampled_T=sampled_T,
        advantages_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        versions_T=zeros_T.long(),
        mask_T=sampled_T,
        rewards_S=torch.tensor([reward for _, reward, _ in batch], dtype=torch.float64),
    )
    config = AdvantageConfig.model_validate({"kind": "gae", "gamma": gamma, "lam": 0.9})
    advantages_T, returns_T = token_advantages(step, values_T, config)
    want = joined([literal_gae(reward, values, gamma, 0.9) for _, reward, values in batch])
    assert advantages_T[sampled_T].tolist() == pytest.approx(want, abs=1e-10)
    assert not advantages_T[~sampled_T].any()
    assert torch.equal(returns_T[sampled_T], (advantages_T + values_T)[sampled_T])
    assert not returns_T[~sampled_T].any()


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(sequence, min_size=2, max_size=6), lam=discount, n=st.integers(1, 25))
def test_a_sequence_does_not_depend_on_its_neighbours(batch, lam, n):
    for estimate in (
        lambda e, left: gae(e, left, gamma=0.9, lam=lam),
        lambda e, left: n_step(e, left, gamma=0.9, num_steps=n),
    ):
        together = estimate(*errors_of(batch, 0.9)).tolist()
        alone = [a for one in batch for a in estimate(*errors_of([one], 0.9)).tolist()]
        assert together == pytest.approx(alone, abs=1e-12)


def test_a_long_response_is_summed_without_loss():
    """Compare 64k tokens, at a discount close to 1, with a float64 loop and exact summation."""
    length, decay = 65_536, 0.9999
    errors_R = torch.randn(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = gae(errors_R, torch.arange(length, 0, -1), gamma=1.0, lam=decay)
    running, want = 0.0, []
    for error in reversed(errors_R.tolist()):
        running = error + decay * running
        want.append(running)
    torch.testing.assert_close(got, torch.tensor(want[::-1], dtype=torch.float64), rtol=1e-11, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.tuples(number, st.booleans()), min_size=1, max_size=30))
def test_whitening_counts_trained_tokens_only(tokens):
    advantages_T = torch.tensor([a for a, _ in tokens], dtype=torch.float64)
    mask_T = torch.tensor([m for _, m in tokens])
    got = whitened(advantages_T, mask_T)
    trained = [a for a, m in tokens if m]
    assert got[~mask_T].eq(0).all()
    if len(trained) < 2:
        assert got[mask_T].tolist() == trained
        return
    mean = math.fsum(trained) / len(trained)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in trained) / (len(trained) - 1))
    assert got[mask_T].tolist() == pytest.approx([(a - mean) / (std + 1e-8) for a in trained], rel=1e-6, abs=1e-6)


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full_like(returns, 7), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones_like(returns)))
    assert math.isnan(explained_variance(returns, torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)))
