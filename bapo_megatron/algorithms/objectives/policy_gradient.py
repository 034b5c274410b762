"""Policy gradient: the loss of a token is -f A log pi, and its factor f is a constant (docs/losses.md).

    reinforce        f = 1 (Williams 1992; `gpg` in verl's core_algos.py)
    vespo            f = e^lambda w^k e^(-lambda w), with w the product of a response's r_t (arXiv 2602.10693;
                     `get_gamma_weights` in TRL's grpo_trainer.py)
    ipo              f = min(r, max_ratio), 0 if |p - q| is above a limit (`IPOLoss` in prime-rl's trainer/rl/loss.py)
    dppo_tv          f = min(r, max_ratio), 0 if A moves the token away from q and |p - q| is above a limit
                     (arXiv 2602.04879; `dppo_tv` in verl's core_algos.py)
    dppo_kl          as dppo_tv, with D(q || p) in place of |p - q| (`dppo_kl` in verl's core_algos.py)
    kpop             f = r, 0 if D(p || q) or D(q || p) is above a limit (ringtech.notion.site/kpop; prime-rl #3283)
    sao              f = r, 0 outside two bounds of r, whatever the sign of A (arXiv 2607.07508, Eq. 3)
    flash_reinforce  f = r, 0 if the mean of D(q || p) over the response is above a limit (OpenRLHF #1339)
    topr             f = 1 if A > 0, otherwise min(w, 1), with w the product of a response's r_t (arXiv 2503.14286;
                     verl #6986 takes their geometric mean)
    dro              f = 1, and + beta / 2 (log r)^2 on all tokens (`dro` in verl's core_algos.py and in Tinker's docs)

r = p / q is the token's ratio, p its probability in the policy, and q in the policy that r compares with. D is the KL
divergence between the events "this token" and "another token". A masked token has f = 0 and stays in the token count.

The value is a multiple of log pi, as in verl, TRL and SAO's paper; prime-rl's is the multiple of A alone, with the same
gradient.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from bapo_megatron.config.base import LARGEST, NonNegative, Positive
from bapo_megatron.config.schema_loss import BoundedLoss, CenteredLoss, RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.algorithms.losses import ClippedTokenLoss, LossInputs, RatioTokenLoss, TokenRatios
    from bapo_megatron.types import ClipBounds

_SMALLEST = 1e-6  # probabilities in D, as in prime-rl and OpenRLHF


class ReinforceLoss(CenteredLoss):
    """Plain policy gradient: no ratio, no bounds, no mask."""

    name: Literal["reinforce"] = "reinforce"
    other_names = ("a2c", "gpg")

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute -w A log pi per token."""
        return inputs.weighted(inputs.ratios(self), _log_probs(inputs))

    def factor(self, ratio: Tensor, bounds: object) -> Tensor:
        """Return 1."""
        return ratio.new_ones(ratio.shape)


class VespoLoss(RatioLoss):
    """A soft weight of whole responses, largest near the policy's own samples (VESPO, arXiv 2602.10693)."""

    name: Literal["vespo"] = "vespo"
    reads_responses = True

    k_positive: float = Field(2.0, ge=0, le=LARGEST)
    """Power of the response's ratio where A >= 0; higher values fade responses sooner that became unlikely."""
    lambda_positive: Positive = 3.0
    """Decay with the response's ratio where A >= 0; higher values fade responses sooner that became likely."""
    k_negative: float = Field(3.0, ge=0, le=LARGEST)
    """As `k_positive`, where A < 0."""
    lambda_negative: Positive = 2.0
    """As `lambda_positive`, where A < 0."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute -w phi A log pi per token, with phi(W) = exp(lambda + k log W - lambda W) of the response.

        log W is the sum of the tokens' log r, each within +-20, between log 1e-8 and 20; phi(1) = 1.
        """
        ratios = inputs.ratios(self)
        log_ratio_R = ratios.ratio_R.detach().log()
        total_R = inputs.response_sums(log_ratio_R).clamp(math.log(1e-8), 20.0)
        is_negative_R = inputs.batch.advantages_R < 0
        k_R = total_R.new_full(total_R.shape, self.k_positive).masked_fill(is_negative_R, self.k_negative)
        lambda_R = total_R.new_full(total_R.shape, self.lambda_positive)
        lambda_R = lambda_R.masked_fill(is_negative_R, self.lambda_negative)
        phi_R = (lambda_R + k_R * total_R - lambda_R * total_R.exp()).exp().to(log_ratio_R.dtype)
        return inputs.weighted(ratios, phi_R * _log_probs(inputs))


class ProbabilityLoss(RatioLoss):
    """A loss that masks tokens by how far their probability has moved."""

    clips = True

    max_ratio: float = Field(LARGEST, ge=1, le=LARGEST)
    """Cap of the ratio that weights a token that is not masked; its gradient stays. 1e9 means none."""
    kl_tau: NonNegative = 0.0
    """Weight of (log r)^2 in the loss of all trained tokens, masked ones too: it draws the policy back to the
    older one. The name is prime-rl's, whose default was 1e-3 until September 2026."""

    def masks(self, new_R: Tensor, old_R: Tensor, advantages_R: Tensor) -> Tensor:
        """Return the tokens to mask, bool [R]; False where a probability is nan, so that the update is skipped.

        Args:
            new_R: probabilities in the policy, float64; old_R: in the policy that the ratio compares with.
        """
        raise NotImplementedError

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w min(r, max_ratio) A log pi per token, 0 where masked, plus kl_tau (log r)^2 on all of them."""
        ratios = inputs.ratios(self)
        masked_R = self.masks(*_probabilities(inputs), inputs.batch.advantages_R)
        tokens = _masked(inputs, ratios, masked_R, self.max_ratio)
        return replace(tokens, loss_R=tokens.loss_R + self.kl_tau * ratios.ratio_R.log().square())


class IpoLoss(ProbabilityLoss):
    """Tokens whose probability moved too much are masked, whatever the sign of A (INTELLECT policy optimization)."""

    name: Literal["ipo"] = "ipo"

    max_change: float = Field(0.3, gt=0, le=1)
    """Largest change of a token's probability, up or down; the default is prime-rl's `eps`."""
    max_ratio: float = Field(1e4, ge=1, le=LARGEST)
    """Cap of the ratio that weights a token that is not masked; its gradient stays. The default is prime-rl's."""

    def masks(self, new_R: Tensor, old_R: Tensor, advantages_R: Tensor) -> Tensor:
        """Mask |p - q| > max_change."""
        return (new_R - old_R).abs() > self.max_change


class DppoLoss(ProbabilityLoss):
    """A token is masked once A has moved its probability too far by some divergence."""

    max_ratio: float = Field(20.0, ge=1, le=LARGEST)
    """Cap of the ratio that weights a token that is not masked; its gradient stays. 20 is the fallback of verl's
    function, and 3 the default of its configuration."""
    max_fall: float
    max_rise: float

    def divergence(self, new_R: Tensor, old_R: Tensor) -> Tensor:
        """Return the divergence of p from q, float64 [R]."""
        raise NotImplementedError

    def masks(self, new_R: Tensor, old_R: Tensor, advantages_R: Tensor) -> Tensor:
        """Mask where A > 0, p > q and the divergence is above max_rise, or A <= 0, p < q and it is above max_fall."""
        divergence_R = self.divergence(new_R, old_R)
        rose_R = (new_R > old_R) & (divergence_R > self.max_rise)
        fell_R = (new_R < old_R) & (divergence_R > self.max_fall)
        return rose_R.where(advantages_R > 0, fell_R)


class DppoTvLoss(DppoLoss):
    """A token is masked once A has moved its probability too far (DPPO-Binary-TV, arXiv 2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"

    max_fall: float = Field(0.2, gt=0, le=1)
    """Largest q - p of a token with A < 0; the default is verl's and TRL's."""
    max_rise: float = Field(0.2, gt=0, le=1)
    """Largest p - q of a token with A > 0; the default is verl's, TRL's is 0.28."""

    def divergence(self, new_R: Tensor, old_R: Tensor) -> Tensor:
        """Compute |p - q|."""
        return (new_R - old_R).abs()


class DppoKlLoss(DppoLoss):
    """As dppo_tv, by a KL divergence: tighter near probabilities 0 and 1 (DPPO-Binary-KL, arXiv 2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"

    max_fall: Positive = 0.05
    """Largest D(q || p), in nats, of a token with A < 0 whose probability fell; default as in open-instruct #1790."""
    max_rise: Positive = 0.05
    """Largest D(q || p), in nats, of a token with A > 0 whose probability rose; default as in open-instruct #1790."""

    def divergence(self, new_R: Tensor, old_R: Tensor) -> Tensor:
        """Compute D(q || p), with 1e-8 added to 1 - p and 1 - q in its logarithm, as in verl."""
        return _binary_kl(old_R, new_R, 1e-8)


class KpopLoss(ProbabilityLoss):
    """A token is masked if a KL divergence is too large in either direction, whatever the sign of A (KPop)."""

    name: Literal["kpop"] = "kpop"

    max_kl: Positive = 0.1
    """Largest D(p || q) and D(q || p), in nats; the default is the authors'."""

    def masks(self, new_R: Tensor, old_R: Tensor, advantages_R: Tensor) -> Tensor:
        """Mask D(p || q) > max_kl or D(q || p) > max_kl, of probabilities in [1e-6, 1 - 1e-6]."""
        new_R, old_R = _inner(new_R), _inner(old_R)
        return (_binary_kl(new_R, old_R) > self.max_kl) | (_binary_kl(old_R, new_R) > self.max_kl)


class SaoLoss(CenteredLoss, BoundedLoss):
    """Tokens whose ratio is outside the bounds are masked, whatever the sign of A (SAO's mask, arXiv 2607.07508)."""

    name: Literal["sao"] = "sao"
    clips = True

    clip_low: float = Field(0.7, gt=0, lt=1)
    """Ratios on or under it are masked; the default is the paper's for reasoning, 0.2 is its value for coding."""
    clip_high: float = Field(6.0, gt=1, le=LARGEST)
    """Ratios on or over it are masked; the default is the paper's for reasoning, 4 is its value for coding."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w r A log pi per token, 0 unless clip_low < r < clip_high."""
        ratios = inputs.ratios(self)
        return _masked(inputs, ratios, self.factor(ratios.ratio_R.detach().double(), inputs.bounds) == 0)

    def factor(self, ratio: Tensor, bounds: ClipBounds) -> Tensor:
        """Return r, 0 unless clip_low < r < clip_high; nan stays, so that the update is skipped."""
        return ratio.masked_fill((ratio <= bounds.low) | (ratio >= bounds.high), 0.0)


class FlashReinforceLoss(RatioLoss):
    """Responses that are too far from the policy are masked as a whole (FlashREINFORCE's gate, OpenRLHF #1339)."""

    name: Literal["flash_reinforce"] = "flash_reinforce"
    clips = True
    reads_responses = True

    max_mean_kl: Positive = 5e-3
    """Largest mean of D(q || p) over a response's trained tokens, in nats; the default is OpenRLHF's."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> ClippedTokenLoss:
        """Compute -w r A log pi per token, 0 in responses whose mean of D(q || p) is above max_mean_kl.

        Probabilities in D are in [1e-6, 1 - 1e-6].
        """
        new_R, old_R = _probabilities(inputs)
        mean_R = inputs.response_means(_binary_kl(_inner(old_R), _inner(new_R)))
        return _masked(inputs, inputs.ratios(self), mean_R > self.max_mean_kl)


class ToprLoss(RatioLoss):
    """Responses with A < 0 fade as they become unlikely, those with A > 0 never do (TOPR, arXiv 2503.14286)."""

    name: Literal["topr"] = "topr"
    reads_responses = True

    taper_level: Literal["token", "sequence", "geometric"] = "sequence"
    """Ratio that fades a token with A < 0. sequence: the product over its response's trained tokens, as in the paper;
    geometric: their geometric mean, as in verl #6986; token: its own, as in ROLL and Trinity-RFT."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute -w A log pi per token, times the ratio, at most 1, where A < 0."""
        ratios = inputs.ratios(self)
        log_ratio_R = ratios.ratio_R.detach().log()
        if self.taper_level != "token":
            of_response = inputs.response_sums if self.taper_level == "sequence" else inputs.response_means
            log_ratio_R = of_response(log_ratio_R).to(log_ratio_R.dtype)
        taper_R = log_ratio_R.clamp(max=0.0).exp().where(inputs.batch.advantages_R < 0, 1.0)
        return inputs.weighted(ratios, taper_R * _log_probs(inputs))


class DroLoss(RatioLoss):
    """No ratio weights the gradient, and a penalty draws the policy back (DRO, arXiv 2405.19107, as in Tinker)."""

    name: Literal["dro"] = "dro"

    beta: Positive = 0.1
    """Weight of (log r)^2 / 2 in the loss of all trained tokens. verl has no default, and Tinker's example is 0.05."""

    def tokens(self, inputs: LossInputs[ClipBounds]) -> RatioTokenLoss:
        """Compute w (beta / 2 (log r)^2 - A log pi) per token."""
        ratios = inputs.ratios(self)
        record = inputs.weighted(ratios, _log_probs(inputs))
        penalty_R = self.beta / 2 * ratios.ratio_R.log().square()
        return replace(record, loss_R=record.loss_R + ratios.weight_R * penalty_R)


def _masked(
    inputs: LossInputs[ClipBounds], ratios: TokenRatios, masked_R: Tensor, max_ratio: float = math.inf
) -> ClippedTokenLoss:
    """Return the record of -w min(r, max_ratio) A log pi, 0 where masked."""
    return inputs.masked(ratios, ratios.ratio_R.detach().clamp(max=max_ratio) * _log_probs(inputs), masked_R)


def _log_probs(inputs: LossInputs[ClipBounds]) -> Tensor:
    return inputs.log_probs_R.where(inputs.batch.mask_R, 0.0)


def _probabilities(inputs: LossInputs[ClipBounds]) -> tuple[Tensor, Tensor]:
    """Return p and q, float64 [R] without gradient; equal where masked."""
    batch = inputs.batch
    old_R = batch.behaviour_logprobs_R if batch.proximal_logprobs_R is None else batch.proximal_logprobs_R
    new_R, old_R = (x_R.detach().double().where(batch.mask_R, -1.0) for x_R in (inputs.log_probs_R, old_R))
    return new_R.clamp(max=0.0).exp(), old_R.clamp(max=0.0).exp()


def _inner(probabilities_R: Tensor) -> Tensor:
    return probabilities_R.clamp(_SMALLEST, 1 - _SMALLEST)


def _binary_kl(p_R: Tensor, q_R: Tensor, added: float = 0.0) -> Tensor:
    """Return D(p || q) in nats; `added` keeps the logarithm of 1 - p and 1 - q finite."""
    return p_R * (p_R / q_R).log() + (1 - p_R) * ((1 - p_R + added) / (1 - q_R + added)).log()
