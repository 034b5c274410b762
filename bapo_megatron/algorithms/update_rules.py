"""Decisions that a loss needs from all tokens of an update before its first backward pass.

    micro-batch -> values -> table, float64, additive over tokens
                               |  one sum over micro-batches and ranks
                               v
                             decide -> the decision, or another round of tables: Again
                               |
                               v
                             LossInputs.found; mask and divisor of the loss

A rule only computes, and keeps no state: the learner (`learner/bounds.py`) scores, sums and remembers for it. The loss
says which tokens its rule reads (`LossConfig.rule_reads`). The rules:

    NoBounds           none
    FixedBounds        the bounds in the loss's own section
    ContributionRule   BAPO's search (`bound_search`)
    SecondMomentRule   M2PO's limit (`second_moment`)
    TopShare           a share of the update's tokens, those with the largest scores (`top_share`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import Found, ScoredTokens
from bapo_megatron.config.dotted import imported
from bapo_megatron.config.schema_loss import ClipBoundConfig, LossConfig
from bapo_megatron.types import ClipBounds


@dataclass(frozen=True, slots=True)
class Again:
    """A request for another round of tables."""

    so_far: Any
    """What the rounds so far have found; the next rounds get it."""


class UpdateRule(Generic[Found]):
    """A decision from an update's tokens; it is the same on every rank because the table is.

    Args:
        options: what the loss's function reads: its section, or its typed [loss.options].
        bapo: the section [bapo].
    """

    shape: tuple[int, ...] = ()
    """The shape of the table."""
    masks: bool = False
    """Whether `mask` leaves tokens out."""

    def __init__(self, options: Any, bapo: ClipBoundConfig) -> None:
        self.options = options

    def values(self, tokens: ScoredTokens) -> Any:
        """Return what the tables of a micro-batch are computed from; called once, whatever the number of rounds."""
        return tokens

    def table(self, values: Any, so_far: Any) -> Tensor:
        """Return the table of a micro-batch: float64 [*shape], additive over tokens.

        Args:
            values: the result of `values`.
            so_far: the previous round's `Again.so_far`; None in the first round.
        """
        raise NotImplementedError

    def decide(self, total: Tensor, so_far: Any) -> Found | Again:
        """Return the decision, or ask for another round.

        Args:
            total: the sum of all tables, on the CPU.
        """
        raise NotImplementedError

    def remember(self, total: Tensor, past: Tensor | None) -> Tensor | None:
        """Return the table for later updates from a finished update's `total`; for rules that read earlier updates."""
        return total

    def mask(self, tokens: ScoredTokens, found: Found) -> Tensor:
        """Return the tokens of a micro-batch that its update trains: bool [R], within its own mask.

        On some machines the log-probs differ by a rounding error from those behind the tables: at a limit, the token
        left out may not be the one that was counted.
        """
        raise NotImplementedError

    def num_trained_tokens(self, found: Found) -> int:
        """Return the number of tokens that `mask` leaves on all ranks: the divisor of `mean_over = "tokens"`.

        If it is 0, there is nothing to learn: the gradient is 0.
        """
        raise NotImplementedError

    def num_trained_responses(self, found: Found) -> int:
        """Return the number of responses with a token that `mask` leaves on all ranks: any other `mean_over` needs it.

        If `mask` leaves whole responses, their tokens' `ScoredTokens.response_shares` add up to it.
        """
        raise NotImplementedError

    def metrics(self, found: Found) -> dict[str, float]:
        """Return the decision as numbers, by metric key."""
        return {}


class BoundsRule(UpdateRule[ClipBounds]):
    """A rule that decides on clip bounds."""

    def metrics(self, found: ClipBounds) -> dict[str, float]:
        """Return both bounds."""
        return {"bapo/low": found.low, "bapo/high": found.high}


class NoBounds(BoundsRule):
    """The rule of a loss without bounds, which are nan."""

    def decide(self, total: Tensor, so_far: Any) -> ClipBounds:
        """Return nan, whatever the tokens."""
        return ClipBounds(math.nan, math.nan, positive_share=math.nan, saturated=False, num_moves=0)


class FixedBounds(NoBounds):
    """The bounds in the loss's section."""

    def decide(self, total: Tensor, so_far: Any) -> ClipBounds:
        """Return the bounds, whatever the tokens."""
        return replace(super().decide(total, so_far), low=self.options.clip_low, high=self.options.clip_high)


def update_rule(loss: LossConfig, bapo: ClipBoundConfig) -> UpdateRule[Any]:
    """Return the update rule of a loss."""
    rule = imported(loss.rule) if isinstance(loss.rule, str) else loss.rule
    return rule(loss.function_options, bapo)


def no_tokens(rule: UpdateRule[Any]) -> Tensor:
    """Return the table of no tokens."""
    return torch.zeros(rule.shape, dtype=torch.float64)
