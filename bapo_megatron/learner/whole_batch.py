"""What the learner computes for all sampled tokens of a rollout batch before a step's updates, on every rank.

Values, log-probs of the proximal and the reference policy, and the streams that a loss declares (`StepStream`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.buffer.packing import Pass, Share, one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.learner.reference import ReferencePolicy
from bapo_megatron.learner.split_model import SplitModel
from bapo_megatron.tokens import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TokenStream
from bapo_megatron.types import Batch, MiniBatch

ScoringPass = Callable[[MiniBatch], Sequence[Tensor]]
"""Computes [R, *shape] for each micro-batch, or none off the last stage. Collective."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A pass over each batch that computes one stream."""

    stream: TokenStream
    model: Learner | SplitModel  # whose layout packs the batch
    scores: ScoringPass


def scorers_of(config: Config, policy: Learner, reference: ReferencePolicy | None) -> list[Scorer]:
    """Return the passes that a step makes before its first update. Call it once on every rank.

    Args:
        reference: the reference policy of the KL term; None without one.
    """
    found = []
    if reference is not None and not config.train.rollout_only:
        found.append(Scorer(REFERENCE_LOGPROBS, reference, reference.log_probs))
    if config.loss.scores_proximal:
        found.append(proximal_scorer(policy))
    return [*found, *(Scorer(one.stream, policy, one.make(config, policy)) for one in config.loss.streams)]


def proximal_scorer(policy: Learner) -> Scorer:
    """Return the pass at the policy's weights of the step's start.

    Its scores are those of the step's first mini-batch as well: see `Learner.score`.
    """
    return Scorer(PROXIMAL_LOGPROBS, policy, policy.log_probs)


def with_scores(batch: Batch, scorers: Sequence[Scorer], policy: Learner, config: Config) -> Batch:
    """Add the streams that all updates of a step share: one pass and one all-reduce for each.

    Call it on every rank, before the step's first update. A batch without a trained token stays as it is.
    """
    for scorer in scorers if batch.num_trained_tokens else ():
        stream = scorer.stream
        rows_T = of_batch(batch, scorer.scores, scorer.model, config, stream.shape)
        rows_T = rows_T.to("cpu", getattr(torch, stream.dtype))
        rows_T[~batch.sampled_T] = stream.filler
        batch = batch.having(stream, rows_T if stream.to == "every rank" else batch.here(rows_T))
        if stream == PROXIMAL_LOGPROBS:
            batch = replace(batch, proximal_version=policy.version)
    return batch


def of_batch(
    batch: Batch,
    score: ScoringPass,
    model: Learner | SplitModel,
    config: Config,
    shape: tuple[int, ...] = (),
) -> Tensor:
    """Return the score of every sampled token, float64 [T, *shape], 0 on given ones: one pass and one all-reduce.
    Collective.

    Every rank gets all values, since each pass over the batch may give a sequence to another rank. The batch has a
    trained token.
    """
    whole = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=model.share)
    scores = score(whole)
    mine_T = torch.zeros(batch.sampled_T.numel(), *shape, dtype=torch.float64)
    for micro_batch, scores_R in zip(whole.micro_batches, scores, strict=bool(scores)):
        mine_T[micro_batch.batch_rows_R] = scores_R.to(mine_T)
    return model.sum_over_data_ranks(mine_T)


def update_pass(config: Config, step: int, share: Share, num_epochs: int) -> Pass:
    """Return the pass of a step's updates."""
    return Pass(
        share,
        config.train.max_tokens_per_microbatch,
        num_minibatches=config.train.minibatches_per_step,
        num_epochs=num_epochs,
        seed=config.run.seed * 1_000_003 + step,
    )


def policy_passes(config: Config, step: int, policy: Learner, scorers: Sequence[Scorer]) -> list[Pass]:
    """Return the passes of a step that score a batch, and that train the policy."""
    passes = [Pass(scorer.model.share, config.train.max_tokens_per_microbatch) for scorer in scorers]
    return [*passes, policy_updates(config, step, policy.share)]


def policy_updates(config: Config, step: int, share: Share) -> Pass:
    """Return the pass of a step's updates of the policy; it has no epoch in steps that do not train the policy."""
    is_trained = not config.train.rollout_only and step >= config.critic.warmup_steps
    return update_pass(config, step, share, config.train.epochs_per_step if is_trained else 0)
