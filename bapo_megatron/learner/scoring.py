"""Log-probs without gradient: of a mini-batch through Megatron's schedule, of a whole batch for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import Module

from bapo_megatron.buffer.packing import Share, minibatches
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.batches import check_packed_for, to_device
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.types import Batch, MicroBatch, MiniBatch


class Scorer(Protocol):
    """A policy split over processes that can tell log-probs; see `learner.base.Learner`."""

    share: Share

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None: ...
    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor: ...


def minibatch_log_probs(
    chunks: Sequence[Module], minibatch: MiniBatch, layout: ParallelLayout, config: Config
) -> list[Tensor] | None:
    """One float32 [R] per micro-batch, of the tempered distribution; None where not on the last stage. Collective.

    Args:
        chunks: this rank's `PolicyModel`s, in Megatron's wrappers or without.
    """
    check_packed_for(layout, minibatch)
    batches = [to_device(batch, device()) for batch in minibatch.micro_batches]

    def forward_step(iterator: Iterator[MicroBatch], model: Module) -> tuple[Any, Callable]:
        scores = model(
            next(iterator),
            temperature=config.rollout.temperature,
            chunk_tokens=config.train.logprob_chunk_tokens,
            with_entropy=False,
        )
        return scores, lambda scores, non_loss_data: scores[0]

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens * layout.context_size,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return outputs if layout.is_last_stage else None


def batch_log_probs(batch: Batch, scorer: Scorer, config: Config) -> Tensor:
    """Log-prob of every response token, float32 [T], 0 on prompts: one scoring pass and one all-reduce. Collective.

    The values reach every rank, since each pass over the batch may give a sequence to another one.
    """
    (whole,) = minibatches(
        batch,
        num_minibatches=1,
        num_epochs=1,
        seed=0,
        max_tokens=config.train.max_tokens_per_microbatch,
        share=scorer.share,
    )
    log_probs = scorer.log_probs(whole)
    mine_T = None
    if log_probs is not None:
        mine_T = torch.zeros(batch.token_ids_T.shape, dtype=torch.float64)
        for micro_batch, log_probs_R in zip(whole.micro_batches, log_probs, strict=True):
            mine_T[micro_batch.batch_rows_R] = log_probs_R.to(mine_T)
    return scorer.sum_over_data_ranks(mine_T).to(batch.behaviour_logprobs_T)
