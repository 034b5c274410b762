"""The embedded engine's sampler against a literal one, row by row in float64."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.sampler import sample

LOGITS = st.integers(-80, 80).map(lambda quarters: quarters / 4)  # ties, but no two that are equal in float32 only
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 3, 5, 100]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


def tempered(logits: list[float], params: SamplingParams) -> list[float]:
    """Return probabilities of all tokens."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / (params.temperature or 1.0)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def sampled_from(logits: list[float], params: SamplingParams) -> list[float]:
    """Return probabilities of all tokens when one is drawn: tempered, cut, renormalised."""
    probs = tempered(logits, params)
    ordered = sorted(range(len(probs)), key=lambda token_id: -probs[token_id])  # stable: among equals, the first
    if params.temperature == 0:
        return [float(token_id == ordered[0]) for token_id in range(len(probs))]
    kept, before = set(), 0.0
    for rank, token_id in enumerate(ordered):
        within_k = params.top_k == -1 or rank < params.top_k
        within_p = params.top_p == 1 or before <= params.top_p
        if within_k and within_p and probs[token_id] >= params.min_p * probs[ordered[0]]:
            kept.add(token_id)
        before += probs[token_id]
    mass = sum(probs[token_id] for token_id in kept)
    return [prob / mass if token_id in kept else 0.0 for token_id, prob in enumerate(probs)]


def is_on_edge(logits: list[float], params: SamplingParams) -> bool:
    """Return whether rounding decides about a token: float32 sums and quotients differ from ours."""
    probs = sorted(tempered(logits, params), reverse=True)
    before = [sum(probs[:rank]) for rank in range(len(probs))]
    near_p = any(abs(b - params.top_p) < 1e-5 for b in before) and params.top_p < 1
    return near_p or any(abs(prob - params.min_p * probs[0]) < 1e-5 * probs[0] for prob in probs if params.min_p)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.lists(LOGITS, min_size=7, max_size=7), PARAMS), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
@example(rows=[([0.0] * 7, SamplingParams(top_k=3))], seed=0)
@example(rows=[([0.0] * 7, SamplingParams(top_p=1e-6))], seed=0)
def test_each_row_is_drawn_from_the_cut_distribution_and_has_its_log_prob(
    rows: list[tuple[list[float], SamplingParams]], seed: int
) -> None:
    logits_BV = torch.tensor([logits for logits, _ in rows])
    seeds = [seed + i for i in range(len(rows))]
    token_ids, logprobs, cut_logprobs = sample(logits_BV, [params for _, params in rows], seeds, [3] * len(rows))
    for (logits, params), token_id, logprob, cut_logprob in zip(rows, token_ids, logprobs, cut_logprobs, strict=True):
        assert logprob == pytest.approx(math.log(tempered(logits, params)[token_id]), abs=1e-4)
        assert cut_logprob <= 0
        if is_on_edge(logits, params):
            continue
        prob = sampled_from(logits, params)[token_id]
        assert prob > 0, "the token was left out"
        assert cut_logprob == pytest.approx(math.log(prob), abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(logits=st.lists(LOGITS, min_size=7, max_size=7), params=PARAMS, seed=st.integers(0, 2**31))
def test_a_row_is_sampled_alike_alone_and_beside_cut_rows(
    logits: list[float], params: SamplingParams, seed: int
) -> None:
    cut = SamplingParams(top_k=2, top_p=0.5)
    (alone,) = zip(*sample(torch.tensor([logits]), [params], [seed], [1]), strict=True)
    first, *_ = zip(*sample(torch.tensor([logits, logits]), [params, cut], [seed, seed], [1, 1]), strict=True)
    assert first == alone


@pytest.mark.parametrize("params", [{"top_p": 0.8}, {"top_k": 4}, {"top_p": 0.9, "top_k": 6, "temperature": 1.4}])
def test_frequencies_are_those_of_the_cut_distribution(params: dict[str, float]) -> None:
    sampling, num_samples = SamplingParams(**params), 20_000
    logits = torch.randn(16, generator=torch.Generator().manual_seed(5)).tolist()
    token_ids, _, cut_logprobs = sample(
        torch.tensor([logits] * num_samples), [sampling] * num_samples, range(num_samples), [7] * num_samples
    )
    counts = torch.bincount(torch.tensor(token_ids), minlength=16).double()
    expected = torch.tensor(sampled_from(logits, sampling), dtype=torch.float64) * num_samples
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 45  # at most 15 degrees of freedom: 1e-4
    by_token = dict(zip(token_ids, cut_logprobs, strict=True))
    assert sum(map(math.exp, by_token.values())) == pytest.approx(1, abs=1e-5)


def test_rows_that_are_not_numbers_have_no_log_prob() -> None:
    logits_BV = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    _, logprobs, cut_logprobs = sample(logits_BV, [SamplingParams(top_k=1)] * 2, [1, 2], [0, 0])
    assert [math.isnan(logprob) for logprob in logprobs] == [True, False]
    assert [math.isnan(logprob) for logprob in cut_logprobs] == [True, False]
