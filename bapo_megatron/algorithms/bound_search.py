"""BAPO's search from update to update: the tables that an optimizer update's bounds come from.

    exact        the table of the update's own tokens, searched before the update
    microbatch   the table of each micro-batch's own tokens
    lagged       the table of the previous update
    smoothed     an exponential mean of the tables of earlier updates
    fixed        none

The mean needs no divisor: every reading of rho is a quotient of P and N, so a common factor cancels. The framework's
learner follows `ContributionRule`; the plugins keep a `BoundSearch`.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.clip_bounds import contribution_table, empty_table, search_bounds
from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.update_rules import BoundsRule
from bapo_megatron.config.schema_loss import ClipBoundConfig, RatioOptions
from bapo_megatron.errors import CheckpointError
from bapo_megatron.types import ClipBounds, Number


class ContributionRule(BoundsRule):
    """BAPO's search over a table of contributions."""

    def __init__(self, options: Any, bapo: ClipBoundConfig) -> None:
        super().__init__(options, bapo)
        self._bapo = bapo
        self._ratio_options = (
            options if isinstance(options, RatioOptions) else RatioOptions()
        )  # the loss computes with them
        self.shape = tuple(empty_table(bapo).shape)

    def table(self, values: ScoredTokens, so_far: Any) -> Tensor:
        """Return the `contribution_table`."""
        batch, ratios, in_mean_R = values.batch, values.ratios(self._ratio_options), values.loss_weights()
        weight_R = ratios.weight_R if in_mean_R is None else ratios.weight_R * in_mean_R
        return tabulated(
            ratios.ratio_R, batch.advantages_R, batch.mask_R, batch.behaviour_logprobs_R, self._bapo, weight_R
        )

    def decide(self, total: Tensor, so_far: Any) -> ClipBounds:
        """Search the table."""
        return search_bounds(total, self._bapo)

    def remember(self, total: Tensor, past: Tensor | None) -> Tensor | None:
        """Return the table that the next update searches: see `remembered`."""
        return remembered(total, past, self._bapo)

    def metrics(self, found: ClipBounds) -> dict[str, float]:
        """Return the bounds, and how the search went."""
        if self._bapo.scope == "fixed":
            return super().metrics(found)
        start, limits = ((self._bapo.low.points[i], self._bapo.high.points[i]) for i in (0, -1))
        bounds = (found.low, found.high)
        return super().metrics(found) | {
            "bapo/positive_share": found.positive_share,
            "bapo/saturated_share": float(found.saturated),
            "bapo/inert_share": float(bounds == start),
            "bapo/num_at_start": float(bounds == start),
            "bapo/num_inside": float(bounds not in (start, limits)),
            "bapo/num_at_limits": float(bounds == limits != start),
            "bapo/num_moves": float(found.num_moves),
        }


def tabulated(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behaviour_logprobs: Tensor | None,
    bapo: ClipBoundConfig,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the `contribution_table` of this rank's tokens, computed on the CPU.

    On the CPU, the order of additions is the same in every run.
    """
    sampled, weights = (None if x is None else x.detach().cpu() for x in (behaviour_logprobs, weights))
    ratio, advantages, mask = (x.detach().cpu() for x in (ratio, advantages, mask))
    return contribution_table(ratio, advantages, mask, sampled, bapo, weights)


def remembered(total: Tensor, past: Tensor | None, bapo: ClipBoundConfig) -> Tensor | None:
    """Return the table for the bounds of later updates, from a finished update's table: scopes lagged and smoothed.

    An update that was skipped because of a nan, or in which no token has an advantage, does not change these bounds.
    """
    if not total.isfinite().all() or total[-2:].sum() == 0:  # the same on every rank
        return past
    if bapo.scope == "smoothed" and past is not None:
        return total + (1 - 1 / bapo.smoothing_updates) * past
    return total


class BoundSearchState(TypedDict):
    """The state of a `BoundSearch` in a checkpoint."""

    lagged: list[Annotated[Number, Field(gt=-1e18, lt=1e18)]] | None  # sums over tokens


class BoundSearch:
    """The search in a plugin: tables in, bounds out, the same on every rank.

    Args:
        config: the section [bapo].
        sum_over_ranks: returns the sum of a float64 vector [K + 2], on the CPU, over all ranks that hold other tokens
            of the update. It is the only collective.
    """

    def __init__(self, config: ClipBoundConfig, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        self.config = config
        self.bounds = search_bounds(empty_table(config), config)  # in force
        self.sum_over_ranks = sum_over_ranks
        self._open = empty_table(config)  # this rank's table in the current update
        self._past: Tensor | None = None  # all ranks' table from earlier updates

    def tabulate(
        self,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        behaviour_logprobs: Tensor | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the table of this rank's tokens: see `tabulated`."""
        return tabulated(ratio, advantages, mask, behaviour_logprobs, self.config, weights)

    def search(self, table: Tensor) -> ClipBounds:
        """Search the table of this rank's own tokens after one all-reduce: scopes exact and microbatch."""
        self.bounds = search_bounds(self.sum_over_ranks(table), self.config)
        return self.bounds

    def search_past(self) -> ClipBounds | None:
        """Search the tables of earlier updates: scopes lagged and smoothed. None before the first update."""
        if self._past is None:
            return None
        self.bounds = search_bounds(self._past, self.config)
        return self.bounds

    def add(self, table: Tensor) -> None:
        """Add a micro-batch to the current update."""
        self._open += table

    def finish_update(self) -> None:
        """Keep what was added since the last call for the bounds of later updates: see `remembered`.

        Makes one all-reduce.
        """
        table, self._open = self.sum_over_ranks(self._open), empty_table(self.config)
        self._past = remembered(table, self._past, self.config)

    def metrics(self) -> dict[str, float]:
        """Return the bounds in force as numbers, under the framework's names for metrics of the same meaning."""
        return {f"bapo/{name}": float(value) for name, value in asdict(self.bounds).items()}

    def state_dict(self) -> BoundSearchState:
        return {"lagged": None if self._past is None else self._past.tolist()}

    def load_state_dict(self, state: BoundSearchState) -> None:
        """Restore a `BoundSearchState`. Raises CheckpointError if its table has another grid."""
        lagged = state["lagged"]
        if lagged is not None and len(lagged) != (size := empty_table(self.config).numel()):
            raise CheckpointError(f"the checkpoint's table of bounds has {len(lagged)} entries, not {size}")
        self._past = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)
