"""The decisions of the loss's update rule, such as clip bounds from BAPO's search, or M2PO's limit."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.bound_search import BoundSearchState
from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.update_rules import Again, no_tokens, update_rule
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.learner.base import Learner, Scored
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch


class BoundsFinder:
    """Tables for the update rule, and its decision for one optimizer step, the same on every rank.

    The rule reads one of these sets of tokens (`LossConfig.rule_reads`):

    update: the whole global mini-batch at the current weights (`Learner.score`).
    earlier updates: the tokens that previous optimizer steps saw in their own forward passes; no extra pass, but one
        step late. The first step reads its own tokens.
    micro-batch: the tokens of each micro-batch's own forward pass (on all data ranks), read during the step; no extra
        pass, but the result depends on how the mini-batch was split. Such a rule decides on `ClipBounds`.
    nothing: no pass, and no collective.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self._learner, self._name = learner, config.loss.name
        self._rule = update_rule(config.loss, config.bapo)
        self._reads, self._with_entropy = config.rule_reads, config.loss.reads_entropy
        self._mean_over = config.loss.mean_over
        self._past: Tensor | None = None  # table of earlier updates, summed over all ranks

    def find(self, minibatch: MiniBatch) -> Any:
        """Return the decision, or a `FoundOf` that makes it for each micro-batch.

        Each round of the rule makes one all-reduce of a small table.
        """
        if self._reads == "nothing":
            return self._rule.decide(no_tokens(self._rule), None)
        if self._reads == "micro-batch":
            return self._of_micro_batch
        if self._past is not None:
            return self._rule.decide(self._past, None)
        values = self._values(minibatch, self._learner.score(minibatch, with_entropy=self._with_entropy))
        return self._decision(values, self._learner.sum_over_data_ranks)

    def observe(self, minibatch: MiniBatch, log_probs: list[Tensor]) -> None:
        """Keep the table of a finished step for later steps; it comes from the log-probs of its forward pass."""
        if self._reads == "earlier updates":
            table = self._table(self._values(minibatch, [(log_probs_R, None) for log_probs_R in log_probs]), None)
            self._past = self._rule.remember(self._learner.sum_over_data_ranks(table).cpu(), self._past)

    def state_dict(self) -> BoundSearchState:
        return {"lagged": None if self._past is None else self._past.flatten().tolist()}

    def load_state_dict(self, state: BoundSearchState) -> None:
        """Restore what `state_dict` returned. Raises CheckpointError if the table belongs to another rule."""
        lagged = state["lagged"]
        if lagged is not None and len(lagged) != (size := no_tokens(self._rule).numel()):
            raise CheckpointError(f"the checkpoint's table of bounds has {len(lagged)} entries, not {size}")
        past = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)
        self._past = None if past is None else past.reshape(self._rule.shape)

    def _values(self, minibatch: MiniBatch, scored: list[Scored]) -> list[Any]:
        """Read this rank's micro-batches; off the last stage nothing is scored."""
        pairs = zip(minibatch.micro_batches, scored, strict=bool(scored))
        return [self._rule.values(self._scored(mb, *scores)) for mb, scores in pairs]

    def _scored(self, mb: MicroBatch, log_probs_R: Tensor, entropy_R: Tensor | None) -> ScoredTokens:
        if self._with_entropy and entropy_R is None:
            raise UserError(
                f'loss.name="{self._name}" selects tokens by their entropy, which {type(self._learner).__name__} does '
                "not compute: choose another loss"
            )
        mb = mb.to(log_probs_R.device)
        ages_R = self._learner.version - mb.versions_R
        return ScoredTokens(mb, log_probs_R, ages_R, self._learner.sum_over_context, entropy_R, self._mean_over)

    def _table(self, values: Sequence[Any], so_far: Any) -> Tensor:
        return sum((self._rule.table(each, so_far).cpu() for each in values), no_tokens(self._rule))

    def _of_micro_batch(self, tokens: ScoredTokens) -> Any:
        """Decide during the forward pass, in which only the last stage takes part."""
        return self._decision([self._rule.values(tokens)], self._learner.sum_over_last_stage)

    def _decision(self, values: Sequence[Any], sum_over_ranks: Callable[[Tensor], Tensor]) -> Any:
        found: Any = Again(None)
        while isinstance(found, Again):
            total = sum_over_ranks(self._table(values, found.so_far)).cpu()
            found = self._rule.decide(total, found.so_far)
        return found


def found_on_all_stages(
    found: Sequence[ClipBounds], minibatch: MiniBatch, layout: ParallelLayout
) -> tuple[ClipBounds, ...]:
    """Broadcast each micro-batch's bounds, which only the last stage has `found`, to every stage."""
    table_M5 = torch.zeros(len(minibatch.micro_batches), 5, dtype=torch.float64, device=device())
    if layout.is_last_stage:
        table_M5.copy_(torch.tensor([astuple(bounds) for bounds in found], dtype=torch.float64))
    layout.from_last_stage(table_M5)
    return tuple(
        ClipBounds(low, high, share, bool(saturated), int(num_moves))
        for low, high, share, saturated, num_moves in table_M5.tolist()
    )
