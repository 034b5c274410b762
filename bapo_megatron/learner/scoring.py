"""What a model says of a whole rollout batch, on every rank: log-probs of the proximal or reference policy, values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from bapo_megatron.buffer.packing import Share, one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.types import Batch, MiniBatch


class SplitModel(Protocol):
    """A model split over processes; see `learner.base.Learner`."""

    share: Share

    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor: ...


class Scorer(SplitModel, Protocol):
    """A policy that can tell log-probs."""

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None: ...


def batch_log_probs(batch: Batch, scorer: Scorer, config: Config) -> Tensor:
    """Log-prob of every response token, float32 [T], 0 on prompts: see `of_batch`."""
    return of_batch(batch, scorer.log_probs, scorer, config).to(batch.behaviour_logprobs_T)


def of_batch(
    batch: Batch, score: Callable[[MiniBatch], list[Tensor] | None], model: SplitModel, config: Config
) -> Tensor:
    """What `score` says of every response token, float64 [T], 0 on prompts: one pass and one all-reduce. Collective.

    The values reach every rank, since each pass over the batch may give a sequence to another one. The batch has a
    token that is trained.

    Args:
        score: of the model; one [R] per micro-batch, None where not on the last stage.
    """
    whole = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=model.share)
    scores = score(whole)
    mine_T = None
    if scores is not None:
        mine_T = torch.zeros(batch.token_ids_T.shape, dtype=torch.float64)
        for micro_batch, scores_R in zip(whole.micro_batches, scores, strict=True):
            mine_T[micro_batch.batch_rows_R] = scores_R.to(mine_T)
    return model.sum_over_data_ranks(mine_T)
