"""A teacher's likeliest tokens, and the policy's divergence from it on them.

The K likeliest tokens of the teacher, and all other tokens together, are K + 1 classes. With q_c and p_c the
probabilities of a class under the teacher and the policy, both at the rollout's temperature, a token's divergence is,
in nats (generalized knowledge distillation, arXiv 2306.13649, on the policy's own samples),

    forward    sum_c q_c log(q_c / p_c)    spreads the policy over all that the teacher finds likely
    reverse    sum_c p_c log(p_c / q_c)    keeps the policy where the teacher finds something likely

Neither is negative, or larger than the divergence over all tokens, which it reaches with K = vocabulary - 1. The class
of all others is TRL's `loss_add_tail` (`_add_tail_bucket` in
experimental/server_distillation/server_distillation_trainer.py) and verl's `forward_kl_topk_tail`
(`compute_tail_bucket_kl` in trainer/distillation/tail_kl.py), but its mass is summed over its tokens: 1 - sum_k p_k has
no digits left if the K tokens have nearly all. verl's `forward_kl_topk` leaves that class out, and can be negative;
NeMo-RL's `DistillationLossFn` (algorithms/loss_functions.py) scales the K tokens to 1, which says nothing about how
much they have together.

The vocabulary may be split over a tensor-parallel group. Logits exist for one chunk of rows at a time, and the backward
pass computes them again.

Shape legend: R rows (one per response token), H hidden size, V vocabulary rows held by this rank, C rows of a chunk,
K likeliest tokens, X = K + 1 classes, N = K x ranks candidates.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.algorithms.chunks import chunk_rows
from bapo_megatron.algorithms.logprobs import VocabShard, accumulator, matmul, operand_dtype, output_layer_gradients
from bapo_megatron.config.schema_loss import Divergence
from bapo_megatron.kernels.base import slices


def divergence(policy_RX: Tensor, teacher_RX: Tensor, mask_R: Tensor, kind: Divergence) -> Tensor:
    """Compute the divergence of the formula from log-probs of classes; 0 where masked, whatever the values."""
    # Select the inputs, not the result: a nan that is merely multiplied by 0 still spoils the gradient.
    policy_RX, teacher_RX = (torch.where(mask_R[:, None], x_RX, 0.0) for x_RX in (policy_RX, teacher_RX))
    first_RX, second_RX = (teacher_RX, policy_RX) if kind == "forward" else (policy_RX, teacher_RX)
    return (first_RX.exp() * (first_RX - second_RX)).sum(1)


def likeliest(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    shard: VocabShard,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Find each row's likeliest tokens, without gradient, with two all-gathers of K values for each chunk.

    Equally likely tokens are in the order of their ids; which of them is the K-th may depend on torch's `topk`.

    Args:
        num_tokens: K, smaller than the vocabulary.
        others: as for `token_log_probs`.

    Returns ids_RK, int32, the likeliest first, and the log-probs of these tokens and of all others together, [R, X],
    float32 (float64 for float64 inputs). Both are the same on all ranks of the group.
    """
    assert 0 < num_tokens < shard.vocab_size, f"{num_tokens} of {shard.vocab_size} tokens"
    real_VH, num_here = weight_VH[: shard.num_real], min(num_tokens, shard.num_real)
    dtype, num_rows = accumulator(hidden_RH), hidden_RH.shape[0]
    ids_RK = hidden_RH.new_empty((num_rows, num_tokens), dtype=torch.int32)
    logits_RX = hidden_RH.new_empty((num_rows, num_tokens + 1), dtype=dtype)
    for rows in slices(num_rows, chunk_tokens or chunk_rows(shard.size, on_gpu=hidden_RH.is_cuda)):
        logits_CV = matmul(hidden_RH[rows], real_VH.T).div_(temperature)
        found_CX = logits_RX.new_full((logits_CV.shape[0], num_tokens + 1), -math.inf)
        ids_CK = torch.full_like(ids_RK[rows], shard.vocab_size)  # a short shard lacks candidates
        found_CX[:, :num_here], columns_CK = logits_CV.topk(num_here, dim=1)
        ids_CK[:, :num_here] = columns_CK + shard.start
        found_CX[:, num_tokens] = logits_CV.scatter_(1, columns_CK, -math.inf).logsumexp(1)
        del logits_CV  # before the next chunk's are made
        found, ids_CN = _of_all_shards(found_CX, shard), torch.cat(_of_all_shards(ids_CK, shard), 1)
        candidates_CN = torch.cat([one_CX[:, :num_tokens] for one_CX in found], 1)
        order_CN = ids_CN.argsort(dim=1)
        order_CN = order_CN.gather(1, candidates_CN.gather(1, order_CN).argsort(dim=1, descending=True, stable=True))
        candidates_CN = candidates_CN.gather(1, order_CN)
        ids_RK[rows] = ids_CN.gather(1, order_CN[:, :num_tokens])
        logits_RX[rows, :num_tokens] = candidates_CN[:, :num_tokens]
        others = [candidates_CN[:, num_tokens:], *(one_CX[:, num_tokens:] for one_CX in found)]
        logits_RX[rows, num_tokens] = torch.cat(others, 1).logsumexp(1)
    return ids_RK, logits_RX.log_softmax(1)


def class_log_probs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    ids_RK: Tensor,
    *,
    temperature: float = 1.0,
    shard: VocabShard,
    chunk_tokens: int | None = None,
    hooks_need_grad: bool = False,
) -> Tensor:
    """Compute the log-probs of K given tokens of each row and of all others together, [R, X], in nats.

    Args:
        ids_RK: int32, tokens in [0, shard.vocab_size), different ones in a row.
        others: as for `token_log_probs`.

    Returns float32 (float64 for float64 inputs), the same on all ranks of the group, differentiable as the results of
    `token_log_probs` are. Makes two all-reduces forward and one backward.
    """
    chunk_tokens = chunk_tokens or chunk_rows(shard.size, on_gpu=hidden_RH.is_cuda)
    logits_RX = _ClassLogits.apply(hidden_RH, weight_VH, ids_RK, temperature, shard, chunk_tokens, hooks_need_grad)
    return logits_RX.log_softmax(1)


class _ClassLogits(torch.autograd.Function):
    """The logit of each given token, and the logarithm of the others' sum of exp(logit)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        ids_RK: Tensor,
        temperature: float,
        shard: VocabShard,
        chunk_tokens: int,
        hooks_need_grad: bool,
    ) -> Tensor:
        (num_rows, num_tokens), real_VH = ids_RK.shape, weight_VH[: shard.num_real]
        logits_RX = hidden_RH.new_zeros((num_rows, num_tokens + 1), dtype=accumulator(hidden_RH))
        others_R = logits_RX.new_full((num_rows,), -math.inf)
        for rows in slices(num_rows if shard.num_real else 0, chunk_tokens):
            logits_CV = matmul(hidden_RH[rows], real_VH.T).div_(temperature)
            columns_CK, is_here_CK = _columns(ids_RK[rows], shard)
            logits_RX[rows, :num_tokens] = torch.where(is_here_CK, logits_CV.gather(1, columns_CK), 0.0)
            others_R[rows] = _without(logits_CV, columns_CK, is_here_CK).logsumexp(1)
            del logits_CV  # before the next chunk's are made
        if shard.group is not None:
            largest_R = others_R.clone()
            dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=shard.group)
            logits_RX[:, num_tokens] = (others_R - largest_R).exp()
            dist.all_reduce(logits_RX, group=shard.group)
            others_R = largest_R + logits_RX[:, num_tokens].log()
        logits_RX[:, num_tokens] = others_R
        ctx.save_for_backward(hidden_RH, weight_VH, ids_RK, others_R)
        ctx.temperature, ctx.shard, ctx.chunk_tokens = temperature, shard, chunk_tokens
        ctx.hooks_need_grad = hooks_need_grad
        return logits_RX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RX: Tensor) -> tuple[Tensor | None, ...]:
        """Pull each token of the others' class by its share of that class."""
        hidden_RH, weight_VH, ids_RK, others_R = ctx.saved_tensors
        pull_RX, operand = grad_RX / ctx.temperature, operand_dtype(hidden_RH, weight_VH)

        def of_logits(rows: slice, logits_CV: Tensor) -> Tensor:
            columns_CK, is_here_CK = _columns(ids_RK[rows], ctx.shard)
            logits_CV = _without(logits_CV.div_(ctx.temperature), columns_CK, is_here_CK)
            logits_CV.sub_(others_R[rows, None]).exp_().mul_(pull_RX[rows, -1:])
            logits_CV.scatter_add_(1, columns_CK, torch.where(is_here_CK, pull_RX[rows, :-1], 0.0))
            return logits_CV.to(operand)

        return *output_layer_gradients(ctx, hidden_RH, weight_VH, of_logits), None, None, None, None, None


def _of_all_shards(table: Tensor, shard: VocabShard) -> list[Tensor]:
    """Return the table of each rank of the group, in the order of the vocabulary."""
    if shard.group is None:
        return [table]
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(tables, table, group=shard.group)
    return tables


def _columns(ids_CK: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the column of each token among this rank's real rows, and whether it is there; 0 if it is not."""
    columns_CK = ids_CK.long() - shard.start
    is_here_CK = (columns_CK >= 0) & (columns_CK < shard.num_real)
    return columns_CK * is_here_CK, is_here_CK


def _without(logits_CV: Tensor, columns_CK: Tensor, is_here_CK: Tensor) -> Tensor:
    """Set the logits of the tokens that are here to -inf, in place. Others share column 0, and add 0 to it."""
    return logits_CV.scatter_add_(1, columns_CK, torch.where(is_here_CK, -math.inf, 0.0).to(logits_CV))
