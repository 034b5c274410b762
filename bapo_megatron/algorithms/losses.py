"""Losses per token: a loss turns a micro-batch into a record of per-token values.

The clipped policy loss maximises sum_t w_t min(r_t A_t, clip(r_t, c_low, c_high) A_t). Its bounds come from BAPO's
search, or from the configuration (`fixed_bounds`). There are two ways to measure how far a token's policy has moved:

    proximal = "behaviour"   r_t = pi_theta / pi_rollout, w_t = 1. pi_rollout is the policy that sampled this very token
                             (BAPO, arXiv 2510.18927; PPO, arXiv 1707.06347).
    proximal = "learner"     r_t = pi_theta / pi_prox, and w_t is pi_prox / pi_rollout between bounds, a constant.
                             pi_prox is the learner at the start of the step (decoupled PPO, arXiv 2110.00641,
                             2505.24298).

The losses that a setting can name are in `objectives`; here are their inputs, their records and what they share.
Nothing here is a sum or a mean: the learner sums losses and metrics over tokens, micro-batches and ranks, and divides
once. With l_t the loss of a token, n_s the trained tokens of its response, N and S the trained tokens and the responses
that have one, in the whole optimizer step (verl's `agg_loss` in core_algos.py):

    mean_over = "tokens"      sum_t l_t / N                                        token-mean
    mean_over = "responses"   sum_t l_t / n_s / S                                  seq-mean-token-mean
    mean_over = "budget"      sum_t l_t / (S x rollout.max_response_tokens)        seq-mean-token-sum-norm

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from bapo_megatron.algorithms.diagnostics import entropy_rule_sums, token_profile_sums
from bapo_megatron.config.schema_loss import MeanOver, RatioOptions
from bapo_megatron.tokens import TEACHER_LOGPROBS
from bapo_megatron.types import ClipBounds, MicroBatch

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond any bound, and far from overflow

Found = TypeVar("Found", default=Any)
"""What the update rule decided (`update_rules`)."""


def _no_context(table: Tensor) -> Tensor:
    return table


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """A micro-batch, with log-probs at the current weights. Masked tokens may hold anything."""

    batch: MicroBatch
    log_probs_R: Tensor  # float32, nats, at the current weights; for a loss, with gradient
    ages_R: Tensor  # int64: optimizer updates since each token was sampled
    over_context: Callable[[Tensor], Tensor] = _no_context
    """Sums a float64 table over the ranks that hold the other tokens of these responses; all these ranks call it."""
    entropy_R: Tensor | None = None  # float32, nats, at the current weights; None unless the rule reads entropies
    mean_over: MeanOver = "tokens"

    def ratios(self, options: RatioOptions) -> TokenRatios:
        """Compute r_t and w_t: see `token_ratios`."""
        return token_ratios(self.batch, self.log_probs_R, options, self.over_context)

    def response_means(self, values_R: Tensor) -> Tensor:
        """Return the mean over each token's response, float64 [R]: see `response_means`."""
        return response_means(values_R, self.batch, self.over_context)

    def lots(self) -> Tensor:
        """Draw a number in [0, 1) for each token, float64 [R], from its place in the update and the weights' version.

        So every layout draws the same, and every update other ones. The hash is SplitMix64, as signed numbers.
        """
        hash_R = (self.ages_R + self.batch.versions_R) * -7046029254386353131 + self.batch.batch_rows_R
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            hash_R = (hash_R ^ (hash_R >> shift)) * factor
        return ((hash_R >> 31) & 0xFFFFFF).double() / 2**24

    def response_sums(self, values_R: Tensor) -> Tensor:
        """Return the sum over each token's response, float64 [R]; arguments as for `response_means`."""
        return _response_sums(values_R, self.batch, self.over_context)[0][self.batch.sequence_R]

    def response_shares(self) -> Tensor:
        """Return 1 / number of its response's trained tokens, float64 [R], 0 where masked.

        Added up over all ranks and rounded, they are the number of responses with a trained token.
        """
        _, count_S = _response_sums(self.log_probs_R.detach(), self.batch, self.over_context)
        return torch.where(self.batch.mask_R, 1 / count_S[self.batch.sequence_R], 0.0)

    def loss_weights(self) -> Tensor | None:
        """Return what the update's mean multiplies each token's loss by, float64 [R]; None means 1."""
        return self.response_shares() if self.mean_over == "responses" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs(ScoredTokens, Generic[Found]):
    """The tokens of a micro-batch, with everything that a loss may read."""

    entropy_R: Tensor  # float32, nats, at the current weights, without gradient; for the metrics
    found: Found  # the decision of the loss's update rule for this optimizer step

    @property
    def bounds(self) -> ClipBounds:
        """The decision, if it is clip bounds."""
        assert isinstance(self.found, ClipBounds), f"the update rule found {self.found!r}, not clip bounds"
        return self.found

    def plain(self, loss_R: Tensor) -> TokenLoss:
        """Return the record of a loss, [R], 0 where masked."""
        return TokenLoss(self, loss_R)

    def weighted(self, ratios: TokenRatios, objective_R: Tensor) -> RatioTokenLoss:
        """Return the record of the loss -w A times the objective, [R]."""
        return RatioTokenLoss(**self._record(ratios, objective_R))

    def clipped(self, ratios: TokenRatios, dual_clip: float | None = None) -> ClippedTokenLoss:
        """Return the record of the loss -w min(r A, clip(r, c_low, c_high) A).

        With `dual_clip` c, the loss is at most w c |A| where A < 0 (arXiv 1912.09729). A token on its bound is clipped,
        without gradient, as in the `gradient` reading of the search. Bounds are compared in float64, as in the search.
        """
        bounds, ratio_R = self.bounds, ratios.ratio_R
        advantages_R = torch.where(self.batch.mask_R, self.batch.advantages_R, 0.0)
        exact_R = ratio_R.detach().double()
        clipped_high_R = (advantages_R > 0) & (exact_R >= bounds.high)
        clipped_low_R = (advantages_R < 0) & (exact_R <= bounds.low)
        dual_clipped_R = (advantages_R < 0) & (exact_R >= (dual_clip or math.inf))

        bounded_R = torch.where(clipped_high_R, bounds.high, ratio_R)
        bounded_R = torch.where(clipped_low_R, bounds.low, bounded_R)
        if dual_clip is not None:
            bounded_R = torch.where(dual_clipped_R, dual_clip, bounded_R)
        return ClippedTokenLoss(
            **self._record(ratios, bounded_R),
            clipped_high_R=clipped_high_R,
            clipped_low_R=clipped_low_R,
            dual_clipped_R=dual_clipped_R,
        )

    def masked(self, ratios: TokenRatios, objective_R: Tensor, masked_R: Tensor) -> ClippedTokenLoss:
        """Return the record of the loss -w A times the objective, [R], 0 where masked: there, the sign of A says which
        bound a token counts for."""
        record = self._record(ratios, objective_R.masked_fill(masked_R, 0.0))
        return ClippedTokenLoss(
            **record,
            clipped_high_R=masked_R & (record["advantages_R"] > 0),
            clipped_low_R=masked_R & (record["advantages_R"] < 0),
            dual_clipped_R=masked_R.new_zeros(masked_R.shape),
        )

    def _record(self, ratios: TokenRatios, objective_R: Tensor) -> dict[str, Any]:
        """Return the fields of a `RatioTokenLoss` that maximises w A times `objective_R`."""
        mask_R = self.batch.mask_R
        advantages_R = torch.where(mask_R, self.batch.advantages_R, 0.0)
        return {
            "inputs": self,
            "loss_R": -ratios.weight_R * objective_R * advantages_R,
            "ratio_R": torch.where(mask_R, ratios.ratio_R.detach(), 0.0),
            "weight_R": torch.where(mask_R, ratios.weight_R, 0.0),
            "advantages_R": advantages_R,
            "capped_R": ratios.capped_R,
            "drifted_R": ratios.drifted_R,
            "filtered_R": ratios.filtered_R,
        }


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and the values that metrics are computed from (`Metric.of`). All are 0 where masked.

    A loss with more values returns a subclass. A metric applies if the record has its field, and the field is not None.
    """

    inputs: LossInputs
    loss_R: Tensor  # the mean over the step is the learner's; with gradient
    kl_reference_R: Tensor | None = None  # nats, from the policy to the reference; set by the learner
    divergence_R: Tensor | None = None  # nats, on a teacher's likeliest tokens; set by the learner
    prefers_other_R: Tensor | None = None  # bool: another of them than the teacher's first; set in the same place
    sampler_kl_R: Tensor | None = None  # nats, from the sampler to the policy; set by the learner with score centering
    sampler_mass_R: Tensor | None = None  # the sampler's probability of its likeliest tokens; set in the same place

    @property
    def mask_R(self) -> Tensor:
        return self.inputs.batch.mask_R

    @property
    def entropy_R(self) -> Tensor:
        return torch.where(self.mask_R, self.inputs.entropy_R, 0.0)

    @property
    def ages_R(self) -> Tensor:
        return torch.where(self.mask_R, self.inputs.ages_R, 0)

    @property
    def top_k_mass_R(self) -> Tensor | None:
        """The teacher's probability of its likeliest tokens; None without them."""
        likely_RX = self.inputs.batch.likely_logprobs_RX
        return None if likely_RX is None else torch.where(self.mask_R, likely_RX[:, :-1].exp().sum(1), 0.0)

    @property
    def teacher_kl_R(self) -> Tensor | None:
        """Log mu - log teacher, in nats; None if the teacher gives an advantage, or there is none."""
        batch = self.inputs.batch
        if batch.likely_logprobs_RX is None:
            return None
        return torch.where(self.mask_R, batch.behaviour_logprobs_R - batch.extra[TEACHER_LOGPROBS], 0.0)

    def tables(self, *, with_profile: bool) -> dict[str, Tensor]:
        """Sum whatever is not one value per token: float32 scalars by the key of a declared mean."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTokenLoss(TokenLoss):
    """The record of a loss that uses ratios."""

    ratio_R: Tensor  # r_t, or the response's ratio
    weight_R: Tensor  # w_t
    advantages_R: Tensor
    capped_R: Tensor  # bool: the importance weight was moved to a bound, or masked beyond it
    drifted_R: Tensor | None = None  # bool: masked by `max_drift`; None without it
    filtered_R: Tensor | None = None  # bool: masked by the filter; None without it

    @property
    def positive_R(self) -> Tensor:
        return self.advantages_R > 0

    @property
    def negative_R(self) -> Tensor:
        return self.advantages_R < 0

    @property
    def positive_mass_R(self) -> Tensor:
        return torch.where(self.positive_R, -self.loss_R, 0.0)

    @property
    def negative_mass_R(self) -> Tensor:
        return torch.where(self.negative_R, self.loss_R, 0.0)

    @property
    def approx_kl_R(self) -> Tensor:
        """KL divergence from the rollout's policy to the current one, in nats, estimator k3."""
        ratio_R = importance_ratio(self.inputs.log_probs_R, self.inputs.batch.behaviour_logprobs_R, self.mask_R)
        return ratio_R - 1 - ratio_R.log()

    @property
    def importance_R(self) -> Tensor:
        """pi_theta / pi_rollout, whatever the loss makes of it: the weights of Kish's effective sample size."""
        ratio_R = importance_ratio(self.inputs.log_probs_R, self.inputs.batch.behaviour_logprobs_R, self.mask_R)
        return torch.where(self.mask_R, ratio_R, 0.0)

    @property
    def importance_square_R(self) -> Tensor:
        return self.importance_R.square()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokenLoss(RatioTokenLoss):
    """The record of a loss that gives no gradient to clipped tokens."""

    clipped_high_R: Tensor  # bool: A > 0 and on or over the upper bound, or masked by the loss
    clipped_low_R: Tensor  # bool: A < 0 and on or under the lower bound, or masked by the loss
    dual_clipped_R: Tensor  # bool: A < 0 and on or over `dual_clip`

    @property
    def clipped_R(self) -> Tensor:
        return self.clipped_high_R | self.clipped_low_R | self.dual_clipped_R

    def tables(self, *, with_profile: bool) -> dict[str, Tensor]:
        """Sum the entropy rule's classes of tokens, and the bins of the token profile: see `diagnostics`."""
        policy = {"mask_R": self.mask_R, "log_probs_R": self.inputs.log_probs_R, "entropy_R": self.entropy_R}
        sums = entropy_rule_sums(
            **policy,
            ages_R=self.ages_R,
            weight_R=self.weight_R * self.ratio_R,
            advantages_R=self.advantages_R,
            clipped_R=self.clipped_R,
        )
        if not with_profile:
            return sums
        clipped = {"clipped_high_R": self.clipped_high_R, "clipped_low_R": self.clipped_low_R}
        return sums | token_profile_sums(**policy, ratio_R=self.ratio_R, **clipped)


def importance_ratio(log_probs: Tensor, denominator_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return pi / pi_denominator per token; 1 where masked.

    A log-ratio beyond +-20 is cut off and carries no gradient. The gradient of nan is nan, so the update is skipped.
    """
    # Select the inputs, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    log_ratio = torch.where(mask, log_probs - denominator_logprobs, 0.0)
    cut = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, cut, log_ratio).exp()  # the gradient of clamp hides a nan


@dataclass(frozen=True, slots=True)
class TokenRatios:
    """The ratios and weights of a micro-batch's tokens, for the loss and for the search for its bounds."""

    ratio_R: Tensor  # r_t, with the gradient of the log-probs; 1 where masked
    weight_R: Tensor  # w_t, at least 0, without gradient; 1 where masked
    capped_R: Tensor  # bool: the importance weight was moved to a bound, or masked beyond it
    drifted_R: Tensor | None  # bool: masked by `max_drift`; None without it
    filtered_R: Tensor | None  # bool: masked by the filter; None without it


def token_ratios(
    batch: MicroBatch,
    log_probs_R: Tensor,
    options: RatioOptions,
    over_context: Callable[[Tensor], Tensor] = _no_context,
) -> TokenRatios:
    """Compute r_t and w_t of the objective.

    A token's weight is 0 outside the filter, if that masks (`outside_filter`). With `max_drift`, it is also 0 if A < 0
    and the mean of log(pi_rollout / pi_theta) over its response's trained tokens exceeds `max_drift` (off-policy
    sequence masking: DeepSeek-V3.2, arXiv 2512.02556, Eq. 9).

    Args:
        log_probs_R: nats, at the current weights; r_t keeps their gradient.
        over_context: see `ScoredTokens`; called the same number of times for each micro-batch.
    """
    mask_R, behaviour_R, proximal_R = batch.mask_R, batch.behaviour_logprobs_R, batch.proximal_logprobs_R
    ratio_R = importance_ratio(log_probs_R, behaviour_R if proximal_R is None else proximal_R, mask_R)
    weight_R, capped_R = torch.ones_like(ratio_R), torch.zeros_like(mask_R)
    if proximal_R is not None:
        weight_R, capped_R = _importance_weight(batch, proximal_R, options, over_context)
    drifted_R = filtered_R = None
    if proximal_R is not None and options.filter_level is not None and options.filter_kind == "mask":
        filtered_R = outside_filter(batch, options, over_context)
        weight_R = weight_R.masked_fill(filtered_R, 0.0)
    if options.max_drift is not None:
        drift_R = response_means(behaviour_R - log_probs_R.detach(), batch, over_context)
        drifted_R = mask_R & (batch.advantages_R < 0) & (drift_R > options.max_drift)
        weight_R = weight_R.masked_fill(drifted_R, 0.0)
    return TokenRatios(ratio_R, weight_R.detach(), capped_R, drifted_R, filtered_R)


def outside_filter(
    batch: MicroBatch, options: RatioOptions, over_context: Callable[[Tensor], Tensor] = _no_context
) -> Tensor:
    """Return the trained tokens whose ratio pi_prox / pi_rollout is outside filter_floor and filter_cap, bool [R].

    The ratio is the token's, or its response's: `sequence` the product over trained tokens, `geometric` the product to
    the power 1 / n. A bound itself is inside, and so is nan: the update will be skipped.

    Args:
        batch: with proximal log-probs.
        over_context: see `ScoredTokens`.
    """
    assert batch.proximal_logprobs_R is not None, "the filter is of the ratio to the behaviour policy"
    log_ratio_R = (batch.proximal_logprobs_R - batch.behaviour_logprobs_R).double()
    if options.filter_level != "token":
        total_S, count_S = _response_sums(log_ratio_R, batch, over_context)
        of_response_S = total_S / count_S.clamp(min=1) if options.filter_level == "geometric" else total_S
        log_ratio_R = of_response_S[batch.sequence_R]
    low = math.log(options.filter_floor) if options.filter_floor else -math.inf
    return batch.mask_R & ((log_ratio_R < low) | (log_ratio_R > math.log(options.filter_cap)))


def _importance_weight(
    batch: MicroBatch, proximal_R: Tensor, options: RatioOptions, over_context: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the bounded weights, and whether each was on a bound or, for `mask`, beyond it."""
    mask_R, low, high = batch.mask_R, options.importance_floor, options.importance_cap
    weight_R = importance_ratio(proximal_R, batch.behaviour_logprobs_R, mask_R)
    if options.importance_level == "sequence":
        total_S, _ = _response_sums(proximal_R - batch.behaviour_logprobs_R, batch, over_context)
        of_response_S = total_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(weight_R.dtype)
        weight_R = torch.where(mask_R, of_response_S[batch.sequence_R], 1.0)
    if options.importance_kind == "mask":
        capped_R = (weight_R < low) | (weight_R > high)
        return weight_R.masked_fill(capped_R, 0.0), capped_R
    return weight_R.clamp(low, high), mask_R & ((weight_R <= low) | (weight_R >= high))


def response_means(
    values_R: Tensor, batch: MicroBatch, over_context: Callable[[Tensor], Tensor] = _no_context
) -> Tensor:
    """Return, for each token, the mean of `values_R` over its response's trained tokens on all context ranks.

    Args:
        values_R: values without gradient; masked tokens may hold anything.
        over_context: see `ScoredTokens`.

    Returns float64 [R]; 0 if a response has no trained token.
    """
    total_S, count_S = _response_sums(values_R, batch, over_context)
    return (total_S / count_S.clamp(min=1))[batch.sequence_R]


def _response_sums(
    values_R: Tensor, batch: MicroBatch, over_context: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sum of `values_R` over the trained tokens of each response, and their number; both float64 [S]."""
    places_S1 = torch.arange(batch.cu_seqlens_S1.numel(), device=batch.sequence_R.device)
    starts_S1 = torch.searchsorted(batch.sequence_R, places_S1)  # counting per response would make the CPU wait
    columns_2R = torch.stack([torch.where(batch.mask_R, values_R, 0.0).double(), batch.mask_R.double()])
    # Segments are summed in order; on a GPU, scattered additions would have a different order in each run.
    table_2S = torch.stack(
        [torch.segment_reduce(column_R, "sum", offsets=starts_S1, unsafe=True) for column_R in columns_2R]
    )
    total_S, count_S = over_context(table_2S)
    return total_S, count_S
