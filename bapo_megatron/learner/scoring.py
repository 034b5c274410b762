"""Log-probs of a whole rollout batch, on every rank: what the proximal and the reference policy add to it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bapo_megatron.buffer.packing import Share, minibatches
from bapo_megatron.config.schema import Config
from bapo_megatron.types import Batch, MiniBatch


class Scorer(Protocol):
    """A policy split over processes that can tell log-probs; see `learner.base.Learner`."""

    share: Share

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None: ...
    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor: ...


def batch_log_probs(batch: Batch, scorer: Scorer, config: Config) -> Tensor:
    """Log-prob of every response token, float32 [T], 0 on prompts: one scoring pass and one all-reduce. Collective.

    The values reach every rank, since each pass over the batch may give a sequence to another one. The batch has a
    token that is trained.
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
