"""Inputs of the losses from a few columns, and their sums as the learner makes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import measured_rho
from bapo_megatron.algorithms.losses import LossInputs, ScoredTokens, TokenLoss
from bapo_megatron.algorithms.second_moment import SecondMomentRule
from bapo_megatron.algorithms.update_rules import Again, NoBounds, no_tokens, update_rule
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema_loss import ClipBoundConfig, LossConfig
from bapo_megatron.learner.token_metrics import TokenMetrics
from bapo_megatron.metrics import Metric
from bapo_megatron.types import ClipBounds, MicroBatch


def loss_inputs(
    *,
    log_probs_R: Tensor,
    behaviour_logprobs_R: Tensor,
    advantages_R: Tensor,
    mask_R: Tensor,
    bounds: ClipBounds,
    ages_R: Tensor | None = None,
    entropy_R: Tensor | None = None,
    proximal_logprobs_R: Tensor | None = None,
    reference_logprobs_R: Tensor | None = None,
    lens_S: list[int] | None = None,
) -> LossInputs:
    """Make the inputs; `lens_S` cuts the tokens into responses, by default into one."""
    rows_R = torch.arange(mask_R.numel())
    lens_S = lens_S or [mask_R.numel()]
    batch = MicroBatch(
        token_ids_T=rows_R,
        position_ids_T=rows_R,
        cu_seqlens_S1=torch.tensor([0, *lens_S], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        rows_R=rows_R,
        sequence_R=torch.arange(len(lens_S)).repeat_interleave(torch.tensor(lens_S)),
        batch_rows_R=rows_R,
        targets_R=rows_R,
        advantages_R=advantages_R,
        behaviour_logprobs_R=behaviour_logprobs_R,
        versions_R=torch.zeros_like(rows_R),
        mask_R=mask_R,
        proximal_logprobs_R=proximal_logprobs_R,
        reference_logprobs_R=reference_logprobs_R,
    )
    entropy_R = torch.zeros_like(log_probs_R.detach()) if entropy_R is None else entropy_R
    ages_R = torch.zeros_like(rows_R) if ages_R is None else ages_R
    return LossInputs(batch, log_probs_R, ages_R, entropy_R=entropy_R, found=bounds)


def sums_of(tokens: TokenLoss, *, with_profile: bool = False, own: tuple[Metric, ...] = ()) -> dict[str, float]:
    """Return sums over tokens by metric, as the learner forms them."""
    with torch.no_grad():
        return {key: float(value) for key, value in TokenMetrics(own).sums(tokens, with_profile=with_profile).items()}


def fixed_bounds(loss: LossConfig) -> ClipBounds:
    """Return the bounds of a loss whose rule reads no token."""
    rule = update_rule(loss, ClipBoundConfig())
    assert isinstance(rule, NoBounds), f"the bounds of {loss.name} come from its search"
    return rule.decide(no_tokens(rule), None)


def found_of(loss: LossConfig, inputs: ScoredTokens, *more: ScoredTokens, log: list[Tensor] | None = None) -> Any:
    """Return what the loss's rule decides on the update of these micro-batches; `log` gets the table of each round."""
    rule, found, parts = update_rule(loss, ClipBoundConfig()), Again(None), (inputs, *more)
    while isinstance(found, Again):
        so_far, log = found.so_far, [] if log is None else log
        log.append(torch.stack([rule.table(rule.values(part), so_far) for part in parts]).sum(0))
        found = rule.decide(log[-1], so_far)
    return found


def second_moment_bounds(log_ratios: Tensor, limit: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> ClipBounds:
    """Return M2PO's bounds, from |log r| of the tokens of T."""
    rule = SecondMomentRule(LOSSES["m2po"](max_second_moment=limit), ClipBoundConfig())
    found = Again(None)
    while isinstance(found, Again):
        found = rule.decide(sum_over_ranks(rule.table(log_ratios, found.so_far)), found.so_far)
    return found


def float32_sum_error(values_R: Tensor, num_roundings: int | None = None) -> float:
    """Return a bound on the error of the float32 sum of `values_R`, float64 [R], whatever the order.

    A value is rounded at most `num_roundings` times (default: once itself, and in each addition), each time by at most
    2^-24 of a partial sum, or 2^-150 for a tiny sum.
    """
    num_roundings = values_R.numel() if num_roundings is None else num_roundings
    relative = num_roundings * 2.0**-24
    return relative / (1 - relative) * float(values_R.double().abs().sum()) + values_R.numel() * 2.0**-150


def maxima_of(tokens: TokenLoss) -> dict[str, float]:
    with torch.no_grad():
        return {key: float(value) for key, value in TokenMetrics().maxima(tokens).items()}


def positive_share(table: Tensor, config: ClipBoundConfig, low: float, high: float) -> float:
    """Return rho of the table's tokens at two grid points; raises ValueError for a bound that is not on its grid."""
    values, num_high = table.tolist(), len(config.high.points)
    i, j = config.high.points.index(high), config.low.points.index(low)
    return measured_rho(values[i], values[num_high + j], config)
