"""The losses besides BAPO and GRPO against the formulas of their papers, written out; all in float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, response_means, token_ratios
from bapo_megatron.algorithms.objectives.rivals import M2poLoss, SapoLoss
from bapo_megatron.algorithms.second_moment import moving_away
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema_loss import BoundedLoss, RatioLoss
from bapo_megatron.types import ClipBounds
from tests.unit.literal_factors import FACTORS, Factors, penalty_of
from tests.unit.loss_inputs import fixed_bounds, loss_inputs, second_moment_bounds, sums_of

RIVALS = ("gspo", "gmpo", "cispo", "sapo", "m2po", *FACTORS)
OPTIONS: dict[str, dict[str, Any]] = {  # besides the defaults
    "sapo": {"temperature_positive": 0.7, "temperature_negative": 1.9},
    "m2po": {"max_second_moment": 0.7},
    "reinforce": {},
    "vespo": {"k_positive": 0.0, "lambda_positive": 0.4, "k_negative": 1.5, "lambda_negative": 5.0},
    "ipo": {"max_change": 0.05, "max_ratio": 1.5, "kl_tau": 0.01},
    "dppo_tv": {"max_fall": 0.02, "max_rise": 0.1, "max_ratio": 1.5, "kl_tau": 0.01},
    "dppo_kl": {"max_fall": 0.2, "max_rise": 0.01, "max_ratio": 1.5, "kl_tau": 0.01},
    "kpop": {"max_kl": 0.01, "max_ratio": 1e9, "kl_tau": 0.01},
    "flash_reinforce": {"max_mean_kl": 0.05},
    "topr": {"taper_level": "geometric"},
    "dro": {"beta": 0.7},
}


def config_of(name: str, **options: Any) -> RatioLoss:
    return LOSS_SECTIONS[name].model_validate({"name": name} | options)  # type: ignore[return-value]


def sign(number: float) -> float:
    return math.copysign(1.0, number) if number else 0.0


def gspo(ratios: Tensor, advantage: float, config: BoundedLoss, log_probs: Tensor) -> Tensor:
    """Return Eq. 5 and 7 of arXiv 2507.18071, times the length."""
    s = ratios.log().mean().exp()
    return len(ratios) * torch.minimum(s * advantage, s.clamp(config.clip_low, config.clip_high) * advantage)


def gmpo(ratios: Tensor, advantage: float, config: BoundedLoss, log_probs: Tensor) -> Tensor:
    """Return Eq. 4 of arXiv 2507.20673, times the length; its clip is over r^sgn(A), with the bounds of either sign."""
    signed = ratios ** sign(advantage)
    low, high = config.clip_low ** sign(advantage), config.clip_high ** sign(advantage)
    held = torch.minimum(signed, signed.clamp(min(low, high), max(low, high)))
    return len(ratios) * held.log().mean().exp() ** sign(advantage) * advantage


def cispo(ratios: Tensor, advantage: float, config: BoundedLoss, log_probs: Tensor) -> Tensor:
    """Return Eq. 4 of arXiv 2506.13585."""
    return (ratios.detach().clamp(config.clip_low, config.clip_high) * advantage * log_probs).sum()


def sapo(ratios: Tensor, advantage: float, config: SapoLoss, log_probs: Tensor) -> Tensor:
    """Return Eq. 5 and 6 of arXiv 2511.20347."""
    tau = config.temperature_positive if advantage > 0 else config.temperature_negative
    return (4 / tau / (1 + torch.exp(-tau * (ratios - 1))) * advantage).sum()


def m2po_keeps(ratios: Sequence[float], advantages: Sequence[float], limit: float) -> list[bool]:
    """Run Algorithm 1 of arXiv 2510.01161; tokens with equal float32 |log r| are masked together."""
    moment = {
        i: abs(math.log(ratio))
        for i, (ratio, advantage) in enumerate(zip(ratios, advantages, strict=True))
        if (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    }
    keeps = [True] * len(ratios)
    while moment and sum(x**2 for x in moment.values()) / len(moment) > limit:
        largest = max(np.float32(x) for x in moment.values())
        for i in [i for i, x in moment.items() if np.float32(x) == largest]:
            keeps[i] = False
            del moment[i]
    return keeps


def policy_gradient(factors: Factors) -> Callable[..., Tensor]:
    """Return sum_t f A log pi, with constants f."""

    def objective(ratios: Tensor, advantage: float, config: RatioLoss, log_probs: Tensor) -> Tensor:
        new = log_probs.detach().exp()
        old = new / ratios.detach()
        f = torch.tensor(factors(config, advantage, new.tolist(), old.tolist()), dtype=torch.float64)
        square = penalty_of(config) * ratios.log().square()
        return (f * advantage * log_probs - square).sum()

    return objective


WIDE_OPEN = ClipBounds(0.0, math.inf, math.nan, saturated=False, num_moves=0)
REFERENCES: dict[str, Callable[..., Tensor]] = {"gspo": gspo, "gmpo": gmpo, "cispo": cispo, "sapo": sapo}
REFERENCES |= {name: policy_gradient(factors) for name, factors in FACTORS.items()}


def objective_of(
    config: RatioLoss, ratio_R: Tensor, advantages_R: Tensor, sequence_R: Tensor, log_probs_R: Tensor
) -> Tensor:
    """Sum over all tokens of an update, response by response; `advantages_R` has one value per response."""
    if isinstance(config, M2poLoss):
        kept = m2po_keeps(ratio_R.tolist(), advantages_R.tolist(), config.max_second_moment)
        return (torch.tensor(kept) * ratio_R * advantages_R).sum()
    total = torch.zeros((), dtype=torch.float64)
    for s in sequence_R.unique():
        of_s = sequence_R == s
        advantage = float(advantages_R[of_s][0])
        total = total + REFERENCES[config.name](ratio_R[of_s], advantage, config, log_probs_R[of_s])
    return total


Response = tuple[float, list[float]]  # advantage, log-ratios
responses = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=1, max_size=6)), min_size=1, max_size=5
)


def inputs_of(responses: Sequence[Response], config: RatioLoss, weights: Tensor | None = None) -> LossInputs:
    lens_S = [len(ratios) for _, ratios in responses]
    log_ratios_R = torch.tensor([x for _, ratios in responses for x in ratios], dtype=torch.float64)
    advantages_R = torch.tensor([a for a, _ in responses], dtype=torch.float64).repeat_interleave(torch.tensor(lens_S))
    higher_R = torch.linspace(-3, -0.05, len(log_ratios_R), dtype=torch.float64)  # the higher log-prob
    behaviour_R = higher_R - log_ratios_R.clamp(min=0)
    inputs = loss_inputs(
        log_probs_R=(behaviour_R + log_ratios_R).requires_grad_(),
        behaviour_logprobs_R=behaviour_R if weights is None else behaviour_R - weights.log(),
        proximal_logprobs_R=None if weights is None else behaviour_R,
        advantages_R=advantages_R,
        mask_R=torch.ones(len(log_ratios_R), dtype=torch.bool),
        bounds=WIDE_OPEN if isinstance(config, M2poLoss) else fixed_bounds(config),
        lens_S=lens_S,
    )
    if isinstance(config, M2poLoss):
        bounds = second_moment_bounds(away_of(inputs), config.max_second_moment, lambda table: table)
        inputs = replace(inputs, found=bounds)
    return inputs


def away_of(inputs: LossInputs) -> Tensor:
    """Return |log r| of the tokens whose second moment M2PO limits."""
    batch = inputs.batch
    ratios = token_ratios(batch, inputs.log_probs_R.detach(), config_of("m2po"))
    return moving_away(ratios.ratio_R, batch.advantages_R, batch.mask_R)


def reference(inputs: LossInputs, config: RatioLoss) -> tuple[Tensor, Tensor]:
    """Return loss and gradient."""
    batch, log_probs_R = inputs.batch, inputs.log_probs_R.detach().requires_grad_()
    ratio_R = (log_probs_R - batch.behaviour_logprobs_R).exp()
    loss = -objective_of(config, ratio_R, batch.advantages_R, batch.sequence_R, log_probs_R)
    (gradient_R,) = torch.autograd.grad(loss, log_probs_R)
    return loss.detach(), gradient_R


def is_off_the_kinks(inputs: LossInputs, config: RatioLoss) -> bool:
    """Return whether no ratio is on a bound, where the gradient of either side is right."""
    if not isinstance(config, BoundedLoss):
        return True
    log_ratio_R = (inputs.log_probs_R - inputs.batch.behaviour_logprobs_R).detach()
    every = torch.cat([log_ratio_R, response_means(log_ratio_R, inputs.batch)])
    kinks = [math.log(bound) for bound in (config.clip_low, config.clip_high) if bound]
    return all(float((every - kink).abs().min()) > 1e-9 for kink in kinks)


def is_off_the_limit(away: Tensor, limit: float) -> bool:
    """Return whether no mean that M2PO compares is so near its limit that a rounding error decides."""
    squares = away.square().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
    return bool(((means - limit).abs() > 1e-9).all())


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("is_default", [True, False])
@settings(max_examples=200, deadline=None)
@given(responses=responses)
def test_loss_and_gradient_equal_the_paper(name: str, is_default: bool, responses: list[Response]) -> None:
    options = {} if is_default else OPTIONS.get(name, {"clip_low": 0.7, "clip_high": 1.4})
    check_against_paper(config_of(name, **options), responses)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(max_examples=400, deadline=None)
@given(responses=responses)
def test_topr_fades_by_each_ratio(level: str, responses: list[Response]) -> None:
    check_against_paper(config_of("topr", taper_level=level), responses)


def check_against_paper(config: RatioLoss, responses: list[Response]) -> None:
    inputs = inputs_of(responses, config)
    if isinstance(config, M2poLoss):
        assume(is_off_the_limit(away_of(inputs), config.max_second_moment))
    loss = config.tokens(inputs).loss_R.sum()
    (gradient_R,) = torch.autograd.grad(loss, inputs.log_probs_R)
    expected, expected_gradient_R = reference(inputs, config)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=1e-9)
    if is_off_the_kinks(inputs, config):
        torch.testing.assert_close(gradient_R, expected_gradient_R, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RIVALS)
def test_the_ratio_to_the_proximal_policy_is_weighted(name: str) -> None:
    config = config_of(name, importance_cap=2.0)
    responses: list[Response] = [(1.0, [0.1, -0.2, 0.3]), (-0.5, [-0.4, 0.2])]
    weights_R = torch.tensor([0.5, 1.0, 3.0, 0.25, 8.0], dtype=torch.float64)
    plain, weighted = inputs_of(responses, config), inputs_of(responses, config, weights_R)
    tokens = config.tokens(weighted)
    torch.testing.assert_close(
        tokens.loss_R, config.tokens(plain).loss_R * weights_R.clamp(max=2.0), rtol=1e-12, atol=1e-12
    )
    assert tokens.capped_R.tolist() == [False, False, True, False, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RIVALS)
@settings(max_examples=25, deadline=None)
@given(responses=responses, data=st.data())
def test_any_cut_over_context_ranks_gives_the_same(name: str, responses: list[Response], data: st.DataObject) -> None:
    """Each rank has some of a response's tokens, perhaps none; a table is summed over the ranks."""
    config = config_of(name)
    whole = inputs_of(responses, config)
    rank_R = torch.tensor([data.draw(st.integers(0, 2)) for _ in whole.log_probs_R])
    parts = [part_of(whole, rank_R == rank) for rank in range(3)]
    tables: list[Tensor] = []
    for part in parts:
        config.tokens(replace(part, over_context=lambda table: tables.append(table) or table))
    total = torch.stack(tables).sum(0) if tables else None
    loss_R, gradient_R = torch.zeros_like(whole.log_probs_R), torch.zeros_like(whole.log_probs_R)
    for rank, part in enumerate(parts):
        if tables:
            part = replace(part, over_context=lambda _: total)
        of_rank_R = config.tokens(part).loss_R
        loss_R[rank_R == rank] = of_rank_R.detach()
        gradient_R[rank_R == rank] = torch.autograd.grad(of_rank_R.sum(), part.log_probs_R)[0]
    expected_R = config.tokens(whole).loss_R
    torch.testing.assert_close(loss_R, expected_R.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient_R, torch.autograd.grad(expected_R.sum(), whole.log_probs_R)[0], rtol=1e-12, atol=1e-12
    )


def part_of(inputs: LossInputs, mine_R: Tensor) -> LossInputs:
    columns = ("rows_R", "sequence_R", "batch_rows_R", "targets_R", "advantages_R", "behaviour_logprobs_R")
    columns = (*columns, "versions_R", "mask_R")
    batch = replace(inputs.batch, **{name: getattr(inputs.batch, name)[mine_R] for name in columns})
    return LossInputs(
        batch,
        inputs.log_probs_R.detach()[mine_R].requires_grad_(),
        inputs.ages_R[mine_R],
        entropy_R=inputs.entropy_R[mine_R],
        found=inputs.found,
    )


@pytest.mark.parametrize("name", RIVALS)
def test_masked_tokens_count_nowhere(name: str) -> None:
    config = config_of(name)
    inputs = inputs_of([(1.0, [0.1, -0.2, 0.3]), (-0.5, [-0.4, 0.2])], config)
    kept_R = torch.tensor([True, False, True, True, False])
    expected_R = config.tokens(part_of(inputs, kept_R)).loss_R
    noise_R = torch.where(kept_R, 0.0, math.nan)
    masked = replace(inputs.batch, mask_R=kept_R, advantages_R=inputs.batch.advantages_R + noise_R)
    log_probs_R = (inputs.log_probs_R.detach() + noise_R).requires_grad_()
    tokens = config.tokens(replace(inputs, batch=masked, log_probs_R=log_probs_R))
    torch.testing.assert_close(tokens.loss_R[kept_R], expected_R, rtol=1e-12, atol=1e-12)
    assert tokens.loss_R[~kept_R].tolist() == [0.0, 0.0]
    assert torch.autograd.grad(tokens.loss_R.sum(), log_probs_R)[0].isfinite().all()
    assert all(math.isfinite(value) for value in sums_of(tokens).values())


@pytest.mark.parametrize("name", RIVALS)
def test_a_micro_batch_without_responses(name: str) -> None:
    config = config_of(name)
    empty = part_of(inputs_of([(1.0, [0.1])], config), torch.tensor([False]))
    assert config.tokens(empty).loss_R.sum() == 0


def test_on_the_policys_own_samples_all_have_the_gradient_of_reinforce() -> None:
    for name in RIVALS:
        config = config_of(name)
        inputs = inputs_of([(1.0, [0.0, 0.0]), (-0.5, [0.0])], config)
        (gradient_R,) = torch.autograd.grad(config.tokens(inputs).loss_R.sum(), inputs.log_probs_R)
        assert gradient_R.tolist() == pytest.approx([-1.0, -1.0, 0.5], rel=1e-12), name


MASKED = ("ipo", "dppo_tv", "dppo_kl", "kpop", "sao", "flash_reinforce")


@pytest.mark.parametrize("name", MASKED)
def test_masked_tokens_have_no_gradient_and_count_as_clipped_by_the_sign_of_the_advantage(name: str) -> None:
    far, near = 3.0, 1e-4
    config = config_of(name)
    inputs = inputs_of([(1.0, [near]), (-1.0, [near]), (0.0, [far]), (1.0, [far]), (-1.0, [-far])], config)
    tokens = config.tokens(inputs)
    (gradient_R,) = torch.autograd.grad(tokens.loss_R.sum(), inputs.log_probs_R)
    assert [x != 0 for x in gradient_R.tolist()] == [True, True, False, False, False]
    assert tokens.clipped_high_R.tolist() == [False, False, False, True, False]  # type: ignore[attr-defined]
    assert tokens.clipped_low_R.tolist() == [False, False, False, False, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FACTORS)
def test_a_log_prob_that_is_nan_is_not_masked(name: str) -> None:
    """Its gradient is nan, so that the learner skips the update."""
    inputs = inputs_of([(1.0, [0.0, 0.1])], config_of(name))
    for place in (0, 1):
        broken_R = inputs.log_probs_R.detach().index_fill(0, torch.tensor(place), math.nan).requires_grad_()
        loss = config_of(name).tokens(replace(inputs, log_probs_R=broken_R)).loss_R.sum()
        assert loss.isnan()


@pytest.mark.parametrize(("name", "cap"), [("ipo", 1e4), ("dppo_tv", 20.0), ("dppo_kl", 20.0)])
@pytest.mark.parametrize("log_ratio", [12.0, 30.0])
def test_a_capped_ratio_keeps_its_gradient(name: str, cap: float, log_ratio: float) -> None:
    """30 is beyond the largest log-ratio that has a gradient of its own."""
    inputs = inputs_of([(-1.0, [0.0, log_ratio])], config_of(name))
    inputs = replace(inputs, log_probs_R=(inputs.log_probs_R - 5).detach().requires_grad_())
    batch = replace(inputs.batch, behaviour_logprobs_R=inputs.batch.behaviour_logprobs_R - 5)
    loss = config_of(name).tokens(replace(inputs, batch=batch)).loss_R.sum()
    (gradient_R,) = torch.autograd.grad(loss, inputs.log_probs_R)
    assert gradient_R.tolist() == pytest.approx([1.0, cap], rel=1e-12)


LIMITS = (1e-4, 0.04, 0.5)
near_values = st.sampled_from([0.2, -0.2, 0.2 + 1e-12, 0.2 + 1e-7, 1.0])


@pytest.mark.parametrize("limit", LIMITS)
@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.tuples(st.one_of(st.floats(-3, 3), near_values), st.sampled_from([-1.0, 0.0, 1.0]))))
def test_m2po_masks_the_tokens_of_algorithm_1(limit: float, tokens: list[tuple[float, float]]) -> None:
    ratio_R, advantages_R = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2).unbind(1)
    ratio_R, sums = ratio_R.exp(), []
    away = moving_away(ratio_R, advantages_R, torch.ones_like(ratio_R, dtype=torch.bool))
    assume(is_off_the_limit(away, limit))
    bounds = second_moment_bounds(away, limit, lambda table: sums.append(table) or table)
    masked_R = ((advantages_R > 0) & (ratio_R >= bounds.high)) | ((advantages_R < 0) & (ratio_R <= bounds.low))
    assert masked_R.tolist() == [not kept for kept in m2po_keeps(ratio_R.tolist(), advantages_R.tolist(), limit)]
    assert len(sums) == (3 if masked_R.any() else 1)
    assert all(table.shape == (2, 2048) for table in sums)


def test_m2po_masks_equal_tokens_together_and_none_within_its_limit() -> None:
    def masks(*log_ratios: float) -> list[bool]:
        config = config_of("m2po")
        inputs = inputs_of([(1.0, list(log_ratios))], config)
        tokens = config.tokens(inputs)
        assert tokens.loss_R[tokens.clipped_R].abs().sum() == 0  # type: ignore[attr-defined]
        return tokens.clipped_R.tolist()  # type: ignore[attr-defined, no-any-return]

    assert masks(0.1, 0.2, 0.25) == [False, False, False]
    assert masks(0.1, 0.3, 0.3) == [False, True, True]  # the mean of the first two would meet the limit
    assert masks(0.1, -5.0, 0.3, 0.1) == [False, False, False, False]  # -5 moves back
    assert masks(3.0, 0.5) == [True, True]
    assert masks() == []
