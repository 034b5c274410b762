"""The proximal policy of `loss.proximal = "learner"`: the learner's own log-probs at the weights a step begins with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.buffer.packing import minibatches
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.types import Batch, MiniBatch


def with_proximal_logprobs(batch: Batch, learner: Learner, config: Config) -> Batch:
    """The batch with `proximal_logprobs_T` at the learner's current weights: one scoring pass and one all-reduce.

    They are the step's first mini-batch's scores as well (`known_log_probs`).

    Call it on every rank, before the step's first update. The values reach every rank, since a later pass over the
    batch may give a sequence to another one.
    """
    (whole,) = minibatches(
        batch,
        num_minibatches=1,
        num_epochs=1,
        seed=0,
        max_tokens=config.train.max_tokens_per_microbatch,
        share=learner.share,
    )
    log_probs = learner.log_probs(whole)
    mine_T = None
    if log_probs is not None:
        mine_T = torch.zeros(batch.token_ids_T.shape, dtype=torch.float64)
        for micro_batch, log_probs_R in zip(whole.micro_batches, log_probs, strict=True):
            mine_T[micro_batch.batch_rows_R] = log_probs_R.to(mine_T)
    all_T = learner.sum_over_data_ranks(mine_T)
    proximal_T = all_T.to(batch.behaviour_logprobs_T)
    return replace(batch, proximal_logprobs_T=proximal_T, proximal_version=learner.version)


def known_log_probs(minibatch: MiniBatch) -> list[Tensor]:
    """Its log-probs at the weights of `proximal_version`: one float32 [R] per micro-batch."""
    found = [batch.proximal_logprobs_R for batch in minibatch.micro_batches]
    return [log_probs_R for log_probs_R in found if log_probs_R is not None]
