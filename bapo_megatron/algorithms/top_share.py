"""Exact selection over an update: the share of its trained tokens with the largest scores, ties by place.

    round 1      number of tokens, means of advantage and log-prob     k = floor(share x number)
    rounds 2...  counts of tokens by a digit of their key              the k-th largest key, digit by digit

A key is the float32 score, as bits that sort like the numbers, followed by the token's place in the step's batch, so
that the first places win among equal scores. No two keys are equal: for any split of the update, exactly k tokens reach
the k-th largest, or all that have a score if they are fewer. Each round makes one all-reduce of 2,048 counts. Three
rounds of digits settle the score; further rounds settle the place, if it decides.

The loss gives the scores (`SelectingLoss.scores`), and so may the options of a user's own loss.

Shape legend: R response tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.update_rules import Again, BoundsRule
from bapo_megatron.types import ClipBounds, MicroBatch

_BASE = 2048
_DIGIT_BITS, _FIRST_SHIFT = 11, 55  # split the 63 bits of a key into six digits
_PLACE_BITS = 31
_ABOVE_ALL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class UpdateMeans:
    """The trained tokens of an update, on all ranks."""

    num_tokens: int
    advantage: float
    log_prob: float  # nats, at the current weights

    def covariance(self, tokens: ScoredTokens) -> Tensor:
        """Return each token's part of the covariance of advantage and log-prob: float64 [R], without gradient."""
        log_prob_R = tokens.log_probs_R.detach().double()
        return (tokens.batch.advantages_R.double() - self.advantage) * (log_prob_R - self.log_prob)


@dataclass(frozen=True, slots=True)
class Selection(ClipBounds):
    """The decision: the loss's fixed bounds, nan if it has none, and the selected tokens."""

    means: UpdateMeans
    smallest_key: int
    num_selected: int

    def selected(self, scores_R: Tensor, batch: MicroBatch) -> Tensor:
        """Return the selected tokens of a micro-batch from its scores: bool [R]."""
        return keys(scores_R, batch) >= self.smallest_key


@dataclass(frozen=True, slots=True)
class _Search:
    """The interval of keys in which the smallest selected one lies."""

    means: UpdateMeans
    num_wanted: int
    num_left: int  # the wanted tokens within the interval; all above it are selected
    start: int
    shift: int


class TopShare(BoundsRule):
    """Selects the share `options.share` of an update's trained tokens, by `options.scores(tokens, means)`."""

    shape = (_BASE,)

    def table(self, values: ScoredTokens, so_far: _Search | None) -> Tensor:
        """Count the tokens by the next digit of their keys; in the first round, add up what the means need."""
        table = torch.zeros(self.shape, dtype=torch.float64)
        batch = values.batch
        if so_far is None:
            columns_3R = torch.stack([torch.ones_like(values.log_probs_R), batch.advantages_R, values.log_probs_R])
            table[:3] = columns_3R[:, batch.mask_R].sum(1, dtype=torch.float64)
            return table
        digit_R = (keys(self.options.scores(values, so_far.means), batch) - so_far.start) >> so_far.shift
        digit_R = digit_R[(digit_R >= 0) & (digit_R < _BASE)].cpu()
        return table.index_add_(0, digit_R, torch.ones_like(digit_R, dtype=torch.float64))

    def decide(self, total: Tensor, so_far: _Search | None) -> Selection | Again:
        """Find the digit of the k-th largest key; no more are needed once all tokens with this digit are selected."""
        if so_far is None:
            num_tokens = int(total[0])
            means = UpdateMeans(num_tokens, *(total[1:3] / max(num_tokens, 1)).tolist())
            k = int(self.options.share * num_tokens + 1e-6)  # 0.29 x 100 is 28.999999999999996
            return Again(_Search(means, k, k, 0, _FIRST_SHIFT)) if k else self._selection(means, _ABOVE_ALL, 0)
        num_left, num_from = so_far.num_left, total.flip(0).cumsum(0).flip(0)  # tokens with this digit or a larger one
        if num_from[0] <= num_left:  # no more tokens have a score; only in the first round of digits
            return self._selection(so_far.means, 0, int(num_from[0]))
        digit = int((num_from >= num_left).nonzero()[-1])
        start = so_far.start + (digit << so_far.shift)
        if num_from[digit] == num_left:
            return self._selection(so_far.means, start, so_far.num_wanted)
        num_left -= int(num_from[digit] - total[digit])
        return Again(_Search(so_far.means, so_far.num_wanted, num_left, start, so_far.shift - _DIGIT_BITS))

    def _selection(self, means: UpdateMeans, smallest_key: int, num_selected: int) -> Selection:
        low, high = (getattr(self.options, name, math.nan) for name in ("clip_low", "clip_high"))
        return Selection(low, high, math.nan, False, 0, means, smallest_key, num_selected)

    def metrics(self, found: ClipBounds) -> dict[str, float]:
        """Return the bounds, and the share of tokens that is selected."""
        assert isinstance(found, Selection)
        share = found.num_selected / found.means.num_tokens if found.means.num_tokens else math.nan
        return super().metrics(found) | {"loss/selected_share": share}


def keys(scores_R: Tensor, batch: MicroBatch) -> Tensor:
    """Return the tokens' keys, int64 [R], from their scores; -1 if a token is masked, or its score is -inf or nan."""
    bits_R = (scores_R.float() + 0.0).view(torch.int32).long()  # -0 becomes 0
    ordered_R = torch.where(bits_R < 0, -1 - (bits_R & 0x7FFFFFFF), bits_R) + 2**31  # from 0 to 2^32
    keys_R = (ordered_R << _PLACE_BITS) + (2**_PLACE_BITS - 1 - batch.batch_rows_R)
    return torch.where(batch.mask_R & (scores_R > -math.inf), keys_R, -1)
