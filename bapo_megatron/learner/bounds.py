"""The clip bounds of each optimizer step: from BAPO's search in one of its scopes, from M2PO's limit, or fixed."""

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from bapo_megatron.algorithms.bound_search import BoundSearch, BoundSearchState
from bapo_megatron.algorithms.clip_bounds import empty_table, search_bounds
from bapo_megatron.algorithms.losses import TokenRatios, fixed_bounds, token_ratios
from bapo_megatron.algorithms.second_moment import moving_away, second_moment_bounds
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import M2poLoss, RatioLoss
from bapo_megatron.learner.base import BoundsOf, Learner
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch


class BoundsFinder:
    """Bounds for one optimizer step, the same on every rank.

    exact: the ratios of the whole global mini-batch at the current weights (`Learner.score`).
    lagged: the ratios that the previous optimizer step saw in its own forward pass; no extra pass, one step late.
    smoothed: the same, averaged over several previous steps. The first step is searched as in exact.
    microbatch: found by the step itself, for each micro-batch from the ratios that its own forward pass gives its own
        tokens (on all data ranks); no extra pass, but the result depends on how the mini-batch was split.
    fixed, and losses with fixed bounds: no search.

    M2PO's bounds come from the ratios of the whole global mini-batch, too.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._search = BoundSearch(config.bapo, self._sum_over_ranks)

    def find(self, minibatch: MiniBatch) -> ClipBounds | BoundsOf:
        """Find the bounds: one all-reduce of a small table in scope exact, one per micro-batch in scope microbatch,
        at most three for M2PO."""
        if isinstance(self._config.loss, M2poLoss):
            return self._within_second_moment(minibatch, self._config.loss)
        if self._config.loss.bounds != "bapo":
            return fixed_bounds(self._config.loss)
        if not self._config.searches_bounds:
            return search_bounds(empty_table(self._config.bapo), self._config.bapo)
        if self._config.bapo.scope == "microbatch":
            return self._of_micro_batch
        if (found := self._search.search_past()) is not None:
            return found
        tables = self._tables(minibatch, self._learner.score(minibatch))
        return self._search.search(sum(tables, empty_table(self._config.bapo)))

    def observe(self, minibatch: MiniBatch, log_probs: list[Tensor]) -> None:
        """Keep the table of a finished step, from the log-probs of its forward pass, for the steps after it."""
        if self._config.searches_bounds and self._config.bapo.looks_back:
            for table in self._tables(minibatch, log_probs):
                self._search.add(table)
            self._search.finish_update()

    def state_dict(self) -> BoundSearchState:
        return self._search.state_dict()

    def load_state_dict(self, state: BoundSearchState) -> None:
        self._search.load_state_dict(state)

    def _sum_over_ranks(self, table: Tensor) -> Tensor:
        if self._config.bapo.scope == "microbatch":  # inside the forward pass, where only the last stage takes part
            return self._learner.sum_over_last_stage(table)
        return self._learner.sum_over_data_ranks(table)

    def _tables(self, minibatch: MiniBatch, log_probs: list[Tensor]) -> list[Tensor]:
        """Tabulate this rank's micro-batches; there are no log-probs off the last stage."""
        pairs = zip(minibatch.micro_batches, log_probs, strict=bool(log_probs))
        return [self._table(mb, log_probs_R) for mb, log_probs_R in pairs]

    def _within_second_moment(self, minibatch: MiniBatch, loss: M2poLoss) -> ClipBounds:
        log_probs = self._learner.score(minibatch)
        log_ratios = [torch.zeros(0, dtype=torch.float64)]
        for mb, log_probs_R in zip(minibatch.micro_batches, log_probs, strict=bool(log_probs)):
            mb = mb.to(log_probs_R.device)
            ratios = self._ratios(mb, log_probs_R)
            log_ratios.append(moving_away(ratios.ratio_R, mb.advantages_R, mb.mask_R & (ratios.weight_R > 0)))
        return second_moment_bounds(torch.cat(log_ratios), loss.max_second_moment, self._learner.sum_over_data_ranks)

    def _of_micro_batch(self, mb: MicroBatch, log_probs_R: Tensor) -> ClipBounds:
        return self._search.search(self._table(mb, log_probs_R))

    def _table(self, mb: MicroBatch, log_probs_R: Tensor) -> Tensor:
        mb = mb.to(log_probs_R.device)
        ratios = self._ratios(mb, log_probs_R)
        return self._search.tabulate(
            ratios.ratio_R, mb.advantages_R, mb.mask_R, mb.behaviour_logprobs_R, ratios.weight_R
        )

    def _ratios(self, mb: MicroBatch, log_probs_R: Tensor) -> TokenRatios:
        """Compute the ratios where the loss does, so that both have the same bits."""
        loss = self._config.loss
        assert isinstance(loss, RatioLoss), "sft has no bounds"
        return token_ratios(mb, log_probs_R, loss, self._learner.sum_over_context)


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
