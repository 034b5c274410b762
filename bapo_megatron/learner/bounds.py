"""The clip bounds of each optimizer step: from BAPO's search in one of its scopes, or fixed."""

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.clip_bounds import contribution_table, empty_table, search_bounds
from bapo_megatron.algorithms.losses import fixed_bounds, ratio_and_weight
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import RatioLoss
from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.base import BoundsOf, Learner
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch, Number


class BoundsState(TypedDict):
    """A `BoundsFinder` in a checkpoint."""

    lagged: list[Number] | None


class BoundsFinder:
    """Bounds for one optimizer step, the same on every rank.

    exact: the ratios of the whole global mini-batch at the current weights (`Learner.score`).
    lagged: the ratios that the previous optimizer step saw in its own forward pass; no extra pass, one step late.
    microbatch: found by the step itself, for each micro-batch from the ratios that its own forward pass gives its own
        tokens (on all data ranks); no extra pass, but the result depends on how the mini-batch was split.
    fixed, and losses with fixed bounds: no search.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._lagged: Tensor | None = None

    def find(self, minibatch: MiniBatch) -> ClipBounds | BoundsOf:
        """Find the bounds: one all-reduce of a small table in scope exact, one per micro-batch in scope microbatch."""
        if self._config.loss.bounds != "bapo":
            return fixed_bounds(self._config.loss)
        if not self._config.searches_bounds:
            return search_bounds(empty_table(self._config.bapo), self._config.bapo)
        if self._config.bapo.scope == "microbatch":
            return self._of_micro_batch
        if self._lagged is not None:
            return search_bounds(self._lagged, self._config.bapo)
        return search_bounds(self._global_table(minibatch, self._learner.score(minibatch)), self._config.bapo)

    def observe(self, minibatch: MiniBatch, log_probs: list[Tensor]) -> None:
        """Keep the table of a finished step, from the log-probs of its forward pass, for the next `lagged` search."""
        if self._config.searches_bounds and self._config.bapo.scope == "lagged":
            table = self._global_table(minibatch, log_probs)
            if not table.isnan().any():  # of an update that was skipped, the same on every rank
                self._lagged = table

    def state_dict(self) -> dict[str, list[float] | None]:
        return {"lagged": None if self._lagged is None else self._lagged.flatten().tolist()}

    def load_state_dict(self, state: dict[str, list[float] | None]) -> None:
        """Restore a `BoundsState`. Raises CheckpointError for the table of another grid."""
        lagged = state["lagged"]
        if lagged is not None and len(lagged) != (size := empty_table(self._config.bapo).numel()):
            raise CheckpointError(f"the checkpoint's table of bounds has {len(lagged)} entries, not {size}")
        self._lagged = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)

    def _global_table(self, minibatch: MiniBatch, log_probs: list[Tensor]) -> Tensor:
        table = empty_table(self._config.bapo)
        for mb, log_probs_R in zip(
            minibatch.micro_batches, log_probs, strict=bool(log_probs)
        ):  # none off the last stage
            table += self._table(mb, log_probs_R)
        return self._learner.sum_over_data_ranks(table)

    def _of_micro_batch(self, mb: MicroBatch, log_probs_R: Tensor) -> ClipBounds:
        return search_bounds(self._learner.sum_over_last_stage(self._table(mb, log_probs_R)), self._config.bapo)

    def _table(self, mb: MicroBatch, log_probs_R: Tensor) -> Tensor:
        """Tabulate a micro-batch on the CPU, where the order of additions is the same in every run."""
        mb, log_probs_R = mb.to(torch.device("cpu")), log_probs_R.cpu()
        loss = self._config.loss
        assert isinstance(loss, RatioLoss), "sft has no bounds"
        ratio_R, weight_R = ratio_and_weight(mb, log_probs_R, loss.importance_cap)
        return contribution_table(
            ratio_R, mb.advantages_R, mb.mask_R, mb.behaviour_logprobs_R, self._config.bapo, weights=weight_R
        )


def bounds_on_all_stages(
    found: Sequence[ClipBounds], minibatch: MiniBatch, layout: ParallelLayout
) -> tuple[ClipBounds, ...]:
    """Broadcast the bounds of each micro-batch, which only the last stage has `found`, to every stage."""
    table_M5 = torch.zeros(len(minibatch.micro_batches), 5, dtype=torch.float64, device=device())
    if layout.is_last_stage:
        table_M5.copy_(torch.tensor([astuple(bounds) for bounds in found], dtype=torch.float64))
    layout.from_last_stage(table_M5)
    return tuple(
        ClipBounds(low, high, share, bool(saturated), int(num_moves))
        for low, high, share, saturated, num_moves in table_M5.tolist()
    )
