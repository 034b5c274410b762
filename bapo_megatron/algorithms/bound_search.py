"""BAPO's search from update to update: which tables the bounds of an optimizer update come from.

    exact        the table of the update's own tokens, searched before the update
    microbatch   the table of each micro-batch's own tokens
    lagged       the table of the update before
    smoothed     an exponential mean of the tables of earlier updates
    fixed        none

The mean needs no divisor: every reading of rho is a quotient of P and N, so that a factor common to both cancels. The
framework's learner and the plugins share this state.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.clip_bounds import contribution_table, empty_table, search_bounds
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.types import ClipBounds, Number


class BoundSearchState(TypedDict):
    """A `BoundSearch` in a checkpoint."""

    lagged: list[Number] | None


class BoundSearch:
    """Tables in, bounds out, the same on every rank.

    Args:
        config: [bapo].
        sum_over_ranks: returns the sum of a float64 vector [K + 2] on the CPU over all ranks that hold other tokens of
            the update. It is the only collective.
    """

    def __init__(self, config: ClipBoundConfig, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        self.config = config
        self.bounds = search_bounds(empty_table(config), config)  # in force
        self._sum_over_ranks = sum_over_ranks
        self._open = empty_table(config)  # of this rank, in the update under way
        self._past: Tensor | None = None  # of all ranks, in earlier updates

    def tabulate(
        self,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        behaviour_logprobs: Tensor | None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the `contribution_table` of this rank's tokens, computed on the CPU.

        There the order of additions is the same in every run.
        """
        sampled, weights = (None if x is None else x.detach().cpu() for x in (behaviour_logprobs, weights))
        ratio, advantages, mask = (x.detach().cpu() for x in (ratio, advantages, mask))
        return contribution_table(ratio, advantages, mask, sampled, self.config, weights)

    def search(self, table: Tensor) -> ClipBounds:
        """Search the table of this rank's own tokens, after one all-reduce: scopes exact and microbatch."""
        self.bounds = search_bounds(self._sum_over_ranks(table), self.config)
        return self.bounds

    def search_past(self) -> ClipBounds | None:
        """Search the tables of earlier updates: scopes lagged and smoothed. None before the first update."""
        if self._past is None:
            return None
        self.bounds = search_bounds(self._past, self.config)
        return self.bounds

    def add(self, table: Tensor) -> None:
        """Add a micro-batch to the update under way."""
        self._open += table

    def finish_update(self) -> None:
        """Keep what was added since the last call for the bounds of later updates, after one all-reduce.

        An update that was skipped for a nan, or in which no token has an advantage, leaves these bounds alone.
        """
        table, self._open = self._sum_over_ranks(self._open), empty_table(self.config)
        if not table.isfinite().all() or table[-2:].sum() == 0:  # the same on every rank
            return
        if self.config.scope == "smoothed" and self._past is not None:
            table = table + (1 - 1 / self.config.smoothing_updates) * self._past
        self._past = table

    def metrics(self) -> dict[str, float]:
        """Return the bounds in force as numbers, named as the framework's metrics where these have the meaning."""
        return {f"bapo/{name}": float(value) for name, value in asdict(self.bounds).items()}

    def state_dict(self) -> BoundSearchState:
        return {"lagged": None if self._past is None else self._past.tolist()}

    def load_state_dict(self, state: BoundSearchState) -> None:
        """Restore a `BoundSearchState`. Raises CheckpointError for the table of another grid."""
        lagged = state["lagged"]
        if lagged is not None and len(lagged) != (size := empty_table(self.config).numel()):
            raise CheckpointError(f"the checkpoint's table of bounds has {len(lagged)} entries, not {size}")
        self._past = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)
