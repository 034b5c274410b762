"""What the learner computes for all sampled tokens of a rollout batch before a step's updates, on every rank.

This covers values, log-probs of the proximal and the reference policy, teachers' and the advantages that follow from
them, and streams that a loss declares (`StepStream`). A teacher's likeliest tokens are computed for each update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import outside_filter
from bapo_megatron.algorithms.teacher import is_scored, teacher_advantages
from bapo_megatron.buffer.packing import Pass, Share, of_teacher
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.learner.parallel import device
from bapo_megatron.learner.reference import FrozenPolicy, OwnReference
from bapo_megatron.learner.schedule import Scores
from bapo_megatron.learner.split_model import SplitModel
from bapo_megatron.tokens import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TEACHER_LOGPROBS, TokenStream
from bapo_megatron.types import Batch, MicroBatch, MiniBatch

ScoringPass = Callable[[MiniBatch], Sequence[Tensor]]
"""Computes [R, *shape] for each micro-batch, or none off the last stage. Collective."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A pass over each batch that computes one stream."""

    stream: TokenStream
    model: Learner | SplitModel  # its layout decides how the batch is packed
    scores: ScoringPass
    teacher: int | None = None  # its number among several: it scores only its own sequences

    def over(self, max_tokens: int) -> Pass:
        """Return the pass, with at most `max_tokens` in a micro-batch."""
        return Pass(self.model.share, max_tokens, teacher=self.teacher)


def scorers_of(
    config: Config,
    policy: Learner,
    reference: FrozenPolicy | OwnReference | None,
    teachers: Sequence[FrozenPolicy] = (),
) -> list[Scorer]:
    """Return the passes that a step makes before its first update. Call it once on every rank.

    Args:
        reference: the KL term's reference policy, or None.
        teachers: those that the trainer holds, in the order of `TeacherConfig.paths`.
    """
    found = []
    if reference is not None and not config.train.rollout_only:
        packed_for = reference.policy if isinstance(reference, OwnReference) else reference
        found.append(Scorer(REFERENCE_LOGPROBS, packed_for, reference.log_probs))
    if not config.teacher.top_k and not config.train.rollout_only:
        are_several = len(teachers) > 1
        for number, teacher in enumerate(teachers):
            found.append(Scorer(TEACHER_LOGPROBS, teacher, teacher.log_probs, number if are_several else None))
    if config.loss.scores_proximal:
        found.append(proximal_scorer(policy))
    return [*found, *(Scorer(one.stream, policy, one.make(config, policy)) for one in config.loss.streams)]


def proximal_scorer(policy: Learner) -> Scorer:
    """Return the pass with the policy's weights at the start of the step.

    The step's first mini-batch reuses its scores: see `Learner.score`.
    """
    return Scorer(PROXIMAL_LOGPROBS, policy, policy.log_probs)


def with_scores(batch: Batch, scorers: Sequence[Scorer], policy: Learner, config: Config) -> Batch:
    """Add the streams that all updates of a step share, with one pass and one all-reduce for each, and the advantages
    that follow from a teacher's.

    Call it on every rank, before the step's first update. A batch without trained tokens stays as it is.
    """
    for scorer in scorers:
        if not batch.num_trained_tokens:  # from the start, or once all are rejected
            break
        stream = scorer.stream
        found_T = of_batch(batch, scorer.scores, scorer.model, config, stream.shape, scorer.teacher)
        rows_T = found_T.to("cpu", getattr(torch, stream.dtype))
        rows_T[~batch.sampled_T] = stream.filler
        rows_T = rows_T if stream.to == "every rank" else batch.here(rows_T)
        if scorer.teacher is not None and stream in batch.extra:
            assert batch.teacher_S is not None
            of_token_T = batch.teacher_S.repeat_interleave(batch.seq_lens_S)
            rows_T = torch.where(batch.here(of_token_T == scorer.teacher), rows_T, batch.extra[stream])
        batch = batch.having(stream, rows_T)
        if stream == PROXIMAL_LOGPROBS:
            batch = without_rejected(replace(batch, proximal_version=policy.version), policy, config)
    max_tokens = config.train.max_tokens_per_microbatch
    passes = [scorer.over(max_tokens) for scorer in scorers if scorer.stream == TEACHER_LOGPROBS]
    if not passes and config.teacher.is_served:
        passes = [Pass(policy.share, max_tokens)]
        if TEACHER_LOGPROBS not in batch.extra:  # it has scored no sample at all
            batch = batch.having(TEACHER_LOGPROBS, TEACHER_LOGPROBS.new_tensor(batch.behaviour_logprobs_T.numel()))
    return taught(batch, passes, policy, config) if passes and batch.num_trained_tokens else batch


def taught(batch: Batch, passes: Sequence[Pass], policy: Learner, config: Config) -> Batch:
    """Add the teacher's advantages to the reward's, which are 0 with `advantage.kind = "teacher"`. Collective.

    Args:
        batch: has the teacher's log-probs, wherever they come from.
        passes: have each sequence once, and the batch's sequences are dealt for them.
    """
    coef = config.teacher.coef
    advantages_T = teacher_advantages(batch.extra[TEACHER_LOGPROBS], batch.behaviour_logprobs_T, coef)
    advantages_T[~batch.here(batch.sampled_T)] = 0
    sums = torch.zeros(3, dtype=torch.float64)
    for part in (part for one in passes for whole in one.minibatches(batch) for part in whole.micro_batches):
        teacher_R, mu_R = (values[part.mask_R] for values in (part.extra[TEACHER_LOGPROBS], part.behaviour_logprobs_R))
        trained_R = teacher_advantages(teacher_R, mu_R, coef)
        sums += torch.stack([trained_R.sum(), trained_R.square().sum(), is_scored(teacher_R).sum()])
    total, squares, num_scored = policy.sum_over_data_ranks(sums.to(device())).tolist()
    mean, square = (x / num_scored if num_scored else math.nan for x in (total, squares))
    spread = math.sqrt(max(square - mean**2, 0.0))
    metrics = {"teacher/kl": -mean / coef, "teacher/advantage_std": spread}
    advantages_T = (batch.advantages_T.double() + advantages_T).float()
    return replace(batch, advantages_T=advantages_T, metrics=batch.metrics | metrics)


def with_likeliest(minibatch: MiniBatch, batch: Batch, teachers: Sequence[FrozenPolicy], top_k: int) -> MiniBatch:
    """Add the `top_k` likeliest tokens of each sequence's teacher to the micro-batches of an update. Collective.

    They are of this rank's rows, and stay there, because K times a batch's tokens do not fit on every rank. Only the
    last stage, which computes the loss, has them.

    Args:
        batch: what the mini-batch is of.
    """
    if not teachers or not top_k:
        return minibatch
    numbers = range(len(teachers)) if len(teachers) > 1 else [None]
    parts = [of_teacher(minibatch, batch, n, one.share) for n, one in zip(numbers, teachers, strict=True)]
    found = [one.likeliest(part, top_k) for one, part in zip(teachers, parts, strict=True)]
    if not found[0]:
        return minibatch
    of_parts = zip(*(part.micro_batches for part in parts), strict=True)
    taught = map(_with_scores, minibatch.micro_batches, of_parts, zip(*found, strict=True))
    return replace(minibatch, micro_batches=tuple(taught))


def _with_scores(whole: MicroBatch, parts: Sequence[MicroBatch], scores: Sequence[Scores]) -> MicroBatch:
    """Return a micro-batch with the scores of its parts, which together have its rows, in any order."""
    order_R = torch.cat([part.batch_rows_R for part in parts]).argsort()[whole.batch_rows_R.argsort().argsort()]
    log_probs_R, _, classes_RX, ids_RK = (
        torch.cat([x for x in of_parts if x is not None])[order_R] for of_parts in zip(*scores, strict=True)
    )
    return replace(
        whole,
        likely_ids_RK=ids_RK,
        likely_logprobs_RX=classes_RX,
        extra={**whole.extra, TEACHER_LOGPROBS: log_probs_R},
    )


def without_rejected(batch: Batch, policy: Learner, config: Config) -> Batch:
    """Take the tokens that the loss's filter rejects out of the batch's mask: see `outside_filter`. Collective.

    So they count nowhere in the step's updates. An update of rejected tokens alone is left out: see `Pass.steps`.
    """
    options = config.loss.ratio_options
    if options is None or options.filter_level is None or options.filter_kind != "reject":
        return batch

    def rejected(whole: MiniBatch) -> list[Tensor]:
        parts = [micro_batch.to(device()) for micro_batch in whole.micro_batches]
        return [outside_filter(part, options, policy.sum_over_context) for part in parts]

    rejected_T = of_batch(batch, rejected, policy, config).cpu() > 0
    share = float(rejected_T.sum()) / batch.num_trained_tokens
    metrics = batch.metrics | {"loss/filtered_share": share}
    return replace(batch, mask_T=batch.mask_T & ~rejected_T, metrics=metrics)


def of_batch(
    batch: Batch,
    score: ScoringPass,
    model: Learner | SplitModel,
    config: Config,
    shape: tuple[int, ...] = (),
    teacher: int | None = None,
) -> Tensor:
    """Return the score of every sampled token, float64 [T, *shape], 0 on other tokens. Collective.

    Makes one pass and one all-reduce. Every rank gets all values, because each pass over the batch may give a sequence
    to another rank. The batch must have a trained token.

    Args:
        teacher: see `Pass.teacher`; other tokens have 0.
    """
    mine_T = torch.zeros(batch.sampled_T.numel(), *shape, dtype=torch.float64)
    for whole in Pass(model.share, config.train.max_tokens_per_microbatch, teacher=teacher).minibatches(batch):
        scores = score(whole)
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
        by_prompt=config.train.deal == "groups",
    )


def policy_passes(config: Config, step: int, policy: Learner, scorers: Sequence[Scorer]) -> list[Pass]:
    """Return a step's passes that score a batch, and those that train the policy."""
    max_tokens = config.train.max_tokens_per_microbatch
    passes = [scorer.over(max_tokens) for scorer in scorers]
    served = [Pass(policy.share, max_tokens)] if config.teacher.is_served else []  # counts what teachers have scored
    return [*passes, *served, policy_updates(config, step, policy.share)]


def policy_updates(config: Config, step: int, share: Share) -> Pass:
    """Return the pass of a step's policy updates; it has no epochs in steps that do not train the policy."""
    is_trained = not config.train.rollout_only and step >= config.critic.warmup_steps
    return update_pass(config, step, share, config.train.epochs_per_step if is_trained else 0)
