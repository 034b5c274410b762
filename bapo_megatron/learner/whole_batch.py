"""Scores of a whole rollout batch, on every rank: values, and log-probs of the proximal and the reference policy."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.buffer.packing import Pass, Share, one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.learner.reference import ReferencePolicy
from bapo_megatron.learner.split_model import SplitModel
from bapo_megatron.types import Batch, MiniBatch


def batch_log_probs(batch: Batch, scorer: Learner | ReferencePolicy, config: Config) -> Tensor:
    """Return log-probs as `of_batch` does, float32, of the rows that are here."""
    return batch.here(of_batch(batch, scorer.log_probs, scorer, config).to("cpu", torch.float32))


def of_batch(
    batch: Batch, score: Callable[[MiniBatch], list[Tensor]], model: Learner | SplitModel, config: Config
) -> Tensor:
    """Return the score of every sampled token, float64 [T], 0 on given ones: one pass and one all-reduce. Collective.

    Every rank gets all values, since each pass over the batch may give a sequence to another rank. The batch has a
    trained token.

    Args:
        score: a method of the model that returns one [R] per micro-batch, none off the last stage.
    """
    whole = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=model.share)
    scores = score(whole)
    mine_T = torch.zeros(batch.sampled_T.shape, dtype=torch.float64)
    for micro_batch, scores_R in zip(whole.micro_batches, scores, strict=bool(scores)):
        mine_T[micro_batch.batch_rows_R] = scores_R.to(mine_T)
    return model.sum_over_data_ranks(mine_T)


def with_fixed_logprobs(batch: Batch, policy: Learner, reference: ReferencePolicy | None, config: Config) -> Batch:
    """Add the log-probs that all updates of a step share: the reference's and the proximal policy's, if used.

    Call it on every rank, before the step's first update. A batch without a trained token stays as it is.

    Args:
        reference: the reference policy of the KL term; None without one.
    """
    if reference is not None and batch.num_trained_tokens and not config.train.rollout_only:
        batch = replace(batch, reference_logprobs_T=batch_log_probs(batch, reference, config))
    return with_proximal_logprobs(batch, policy, config) if config.loss.scores_proximal else batch


def with_proximal_logprobs(batch: Batch, policy: Learner, config: Config) -> Batch:
    """Add `proximal_logprobs_T` at the policy's current weights: one scoring pass and one all-reduce.

    They are the scores of the step's first mini-batch as well: see `Learner.score`.
    """
    if not batch.num_trained_tokens:
        return batch
    proximal_T = batch_log_probs(batch, policy, config)
    return replace(batch, proximal_logprobs_T=proximal_T, proximal_version=policy.version)


def update_pass(config: Config, step: int, share: Share, num_epochs: int) -> Pass:
    """Return the pass of a step's updates."""
    return Pass(
        share,
        config.train.max_tokens_per_microbatch,
        num_minibatches=config.train.minibatches_per_step,
        num_epochs=num_epochs,
        seed=config.run.seed * 1_000_003 + step,
    )


def policy_passes(config: Config, step: int, policy: Learner, reference: ReferencePolicy | None) -> list[Pass]:
    """Return the passes of a step that score a batch with the policy and its reference, and that train the policy."""
    scorers = [policy] if config.loss.scores_proximal else []
    passes = [Pass(scorer.share, config.train.max_tokens_per_microbatch) for scorer in (*scorers, reference) if scorer]
    return [*passes, policy_updates(config, step, policy.share)]


def policy_updates(config: Config, step: int, share: Share) -> Pass:
    """Return the pass of a step's updates of the policy; it has no epoch in steps that do not train the policy."""
    is_trained = not config.train.rollout_only and step >= config.critic.warmup_steps
    return update_pass(config, step, share, config.train.epochs_per_step if is_trained else 0)
