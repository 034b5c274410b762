"""Log-probabilities and entropies of response tokens from hidden states, without keeping logits.

Logits exist for one chunk of rows at a time; the backward pass computes them again. The vocabulary may be split over a
tensor-parallel group: each call then makes two small all-reduces forward and one backward, whatever the chunk size.

Shape legend: R rows (one per response token), H hidden size, V vocabulary rows held by this rank, C rows of a chunk,
B rows of a block of the chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.algorithms.chunks import chunk_rows
from bapo_megatron.kernels import kernels_of
from bapo_megatron.kernels.base import slices

Backend = Literal["torch", "triton"]
_ADDMM_WIDENS = torch.__version__ >= "2.10"  # older addmm(out_dtype) only takes a total of the operands' 16-bit type


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the output layer on this rank.

    Example: vocabulary 50 padded to 52 on two ranks: rank 1 has VocabShard(group, start=26, size=26, vocab_size=50).
    """

    group: dist.ProcessGroup | None  # tensor-parallel group; None if this rank holds the whole vocabulary
    start: int  # vocabulary id of the first row
    size: int  # rows on this rank, padding included
    vocab_size: int  # real vocabulary; rows from here on are padding and have probability 0

    @property
    def num_real(self) -> int:
        """Rows on this rank that are not padding; padding is always at the end."""
        return min(max(self.vocab_size - self.start, 0), self.size)


def token_log_probs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    shard: VocabShard,
    chunk_tokens: int | None = None,
    with_entropy: bool = True,
    backend: Backend = "torch",
    hooks_need_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute each target's log-prob and each row's entropy under softmax(hidden @ weight.T / temperature), in nats.

    Args:
        hidden_RH: hidden states that predict the targets, the same on all ranks of the group; any float type.
        weight_VH: this rank's rows of the output layer, of the type of hidden_RH. If Megatron gave it a `main_grad`
            (float32), the backward pass adds the gradient to that, and autograd gets none.
        targets_R: int64 token ids in [0, shard.vocab_size).
        temperature: the temperature that the tokens were sampled with.
        chunk_tokens: rows whose logits exist at the same time, chunk_tokens x V values in float32; None means
            `chunk_rows`.
        with_entropy: False skips the entropy's arithmetic; the entropies returned are then zeros.
        backend: code for the passes over a chunk of logits; triton needs a GPU, and does not support float64.
        hooks_need_grad: give autograd zeros in place of the gradient that went to `main_grad`. Without a gradient,
            hooks of the weight run in another thread, and start their collectives in a different order on each rank.

    Returns log_probs_R and entropy_R, float32 (float64 for float64 inputs), the same on all ranks of the group. Both
    are differentiable: hidden_RH receives its gradient summed over the group (do not sum it again), and weight_VH the
    gradient of its own rows. An entropy that no loss uses costs nothing in the backward pass.
    """
    assert weight_VH.shape[0] == shard.size, f"{weight_VH.shape[0]} vocabulary rows, but the shard has {shard.size}"
    if chunk_tokens is None:
        chunk_tokens = chunk_rows(shard.size, on_gpu=hidden_RH.is_cuda)
    assert min(temperature, chunk_tokens) > 0, "temperature and chunk_tokens must be positive"
    return _TokenLogProbs.apply(
        hidden_RH, weight_VH, targets_R, temperature, shard, chunk_tokens, with_entropy, backend, hooks_need_grad
    )


def _kernels(backend: Backend) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]:
    """Return torch's or Triton's `row_statistics` and `logit_gradients`."""
    if backend == "torch":
        return row_statistics, logit_gradients
    from bapo_megatron.algorithms import logprobs_triton  # Triton comes only with torch's CUDA builds

    return logprobs_triton.row_statistics, logprobs_triton.logit_gradients


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        temperature: float,
        shard: VocabShard,
        chunk_tokens: int,
        with_entropy: bool,
        backend: Backend,
        hooks_need_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows, real_VH = hidden_RH.shape[0], weight_VH[: shard.num_real]
        dtype = accumulator(hidden_RH)
        max_R = hidden_RH.new_full((num_rows,), torch.finfo(dtype).min, dtype=dtype)
        sums_3R = hidden_RH.new_zeros((3, num_rows), dtype=dtype)  # exp(logit - max), the same * logit, target's logit
        statistics, _ = _kernels(backend)
        for rows in slices(num_rows if shard.num_real else 0, chunk_tokens):
            logits_CV = matmul(hidden_RH[rows], real_VH.T)
            columns_C = _local_columns(targets_R[rows], shard)
            max_R[rows], *sums = statistics(logits_CV, columns_C, temperature, with_entropy)
            del logits_CV  # before the next chunk's are made
            sums_3R[:, rows] = torch.stack(sums)

        global_max_R = max_R.clone()
        if shard.group is not None:
            dist.all_reduce(global_max_R, op=dist.ReduceOp.MAX, group=shard.group)
            sums_3R[:2] *= (max_R - global_max_R).exp()
            dist.all_reduce(sums_3R, group=shard.group)
        log_z_R = global_max_R + sums_3R[0].log()
        log_probs_R = sums_3R[2] - log_z_R
        entropy_R = log_z_R - sums_3R[1] / sums_3R[0] if with_entropy else torch.zeros_like(log_z_R)

        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, log_z_R, entropy_R)
        ctx.temperature, ctx.shard, ctx.chunk_tokens, ctx.backend = temperature, shard, chunk_tokens, backend
        ctx.hooks_need_grad = hooks_need_grad
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_R)
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_R: Tensor | None, grad_entropy_R: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p = softmax(l): d log p_y / d l_j = [j = y] - p_j, and d entropy / d l_j = -p_j (log p_j + entropy)."""
        hidden_RH, weight_VH, targets_R, log_z_R, entropy_R = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        operand = operand_dtype(hidden_RH, weight_VH)
        pull_R = torch.zeros_like(log_z_R) if grad_log_probs_R is None else grad_log_probs_R / ctx.temperature
        entropy_pull_R = None if grad_entropy_R is None else grad_entropy_R / ctx.temperature
        _, gradients = _kernels(ctx.backend)

        def of_logits(rows: slice, logits_CV: Tensor) -> Tensor:
            return gradients(
                logits_CV,
                _local_columns(targets_R[rows], shard),
                ctx.temperature,
                log_z_R[rows],
                pull_R[rows],
                entropy_R[rows],
                None if entropy_pull_R is None else entropy_pull_R[rows],
                operand,
            )

        return *output_layer_gradients(ctx, hidden_RH, weight_VH, of_logits), None, None, None, None, None, None, None


def output_layer_gradients(
    ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, of_logits: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an autograd function's first two inputs, hidden states and weight, from their logits'.

    Args:
        ctx: has the `shard`, `chunk_tokens` and `hooks_need_grad` of `token_log_probs`.
        of_logits: maps a slice of rows and their logits, which it may overwrite, to the gradient of these logits, of
            any float type.
    """
    shard: VocabShard = ctx.shard
    real_VH, dtype = weight_VH[: shard.num_real], accumulator(hidden_RH)
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grad_hidden_RH = torch.zeros_like(hidden_RH, dtype=dtype) if need_hidden else None
    main_VH: Tensor | None = getattr(weight_VH, "main_grad", None)
    grad_weight_VH = None
    if need_weight:
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if main_VH is None else main_VH
    for rows in slices(hidden_RH.shape[0] if shard.num_real else 0, ctx.chunk_tokens):
        grad_CV = of_logits(rows, matmul(hidden_RH[rows], real_VH.T))
        if grad_hidden_RH is not None:
            grad_hidden_RH[rows] = matmul(grad_CV, real_VH)
        if grad_weight_VH is not None:
            _add_matmul(grad_weight_VH[: shard.num_real], grad_CV.T, hidden_RH[rows])
        del grad_CV  # before the next chunk's are made
    if grad_hidden_RH is not None:
        if shard.group is not None:
            dist.all_reduce(grad_hidden_RH, group=shard.group)
        grad_hidden_RH = grad_hidden_RH.to(hidden_RH.dtype)
    if main_VH is not None:
        grad_weight_VH = left_for_autograd(weight_VH, ctx.hooks_need_grad) if need_weight else None
    elif grad_weight_VH is not None:
        grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
    return grad_hidden_RH, grad_weight_VH


def left_for_autograd(weight: Tensor, hooks_need_grad: bool) -> Tensor | None:
    """Return what autograd receives for a weight whose real gradient went to `main_grad`: see `token_log_probs`."""
    return torch.zeros_like(weight) if hooks_need_grad else None


def row_statistics(
    logits_CV: Tensor, columns_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce a rank's columns, and overwrite the logits.

    With l = logits / temperature, return the max of l, the sums of exp(l - max) and of exp(l - max) * l (0 without
    entropy), and the target's l (0 if it is on another rank).

    Args:
        columns_C: int64, each row's target among the columns, -1 if it is on another rank.
    """
    max_C, sum_C, weighted_C = logits_CV.new_zeros((3, logits_CV.shape[0]))
    target_C = logits_CV.gather(1, columns_C.clamp(min=0)[:, None])[:, 0].div_(temperature) * (columns_C >= 0)
    for rows in kernels_of(logits_CV).blocks(logits_CV):
        l_BV = logits_CV[rows] if temperature == 1 else logits_CV[rows].div_(temperature)
        max_C[rows] = l_BV.amax(dim=1)
        weights_BV = (l_BV - max_C[rows, None]).exp_()
        sum_C[rows] = weights_BV.sum(dim=1)
        if with_entropy:
            weighted_C[rows] = weights_BV.mul_(l_BV).sum(dim=1)
    return max_C, sum_C, weighted_C, target_C


def logit_gradients(
    logits_CV: Tensor,
    columns_C: Tensor,
    temperature: float,
    log_z_C: Tensor,
    pull_C: Tensor,
    entropy_C: Tensor,
    entropy_pull_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the loss's gradient with respect to the logits, in place if they have its type.

    Args:
        columns_C: as in `row_statistics`.
        log_z_C: logarithm of the sum of exp(logits / temperature) over all ranks.
        pull_C: gradients of the log-probs, divided by the temperature.
        entropy_pull_C: gradients of the entropies, divided by the temperature; None means zero.
        dtype: type of the gradient, rounded once for the two products that read it.
    """
    for rows in kernels_of(logits_CV).blocks(logits_CV):
        l_BV = logits_CV[rows] if temperature == 1 else logits_CV[rows].div_(temperature)
        log_p_BV = l_BV.sub_(log_z_C[rows, None])
        if entropy_pull_C is None:
            log_p_BV.exp_().mul_(-pull_C[rows, None])
        else:
            p_BV = log_p_BV.exp()
            log_p_BV.add_(entropy_C[rows, None]).mul_(entropy_pull_C[rows, None])
            log_p_BV.add_(pull_C[rows, None]).mul_(p_BV).neg_()
    logits_CV.scatter_add_(1, columns_C.clamp(min=0)[:, None], (pull_C * (columns_C >= 0))[:, None])
    return logits_CV.to(dtype)


def _local_columns(targets_C: Tensor, shard: VocabShard) -> Tensor:
    """Return the column of each target among this rank's real rows, -1 if it is on another rank."""
    column_C = targets_C - shard.start
    return torch.where((column_C >= 0) & (column_C < shard.num_real), column_C, -1)


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to float32 (or float64) `total` in place, on GPUs and for equal types without a temporary matrix."""
    dtype = operand_dtype(a, b)
    if dtype.itemsize == 2 and _ADDMM_WIDENS:
        torch.addmm(total, a.to(dtype), b.to(dtype), out_dtype=torch.float32, out=total)
    elif total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += matmul(a, b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, accumulated and returned in float32 (float64 for float64), even for 16-bit operands."""
    dtype = operand_dtype(a, b)
    if dtype.itemsize == 2:
        return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    return a.to(dtype) @ b.to(dtype)


def operand_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the type in which a product takes a and b: on a GPU the 16-bit type of either, if one has it.

    Tensor cores take 16-bit operands, and can return their float32 sums. A CPU multiplies in float32 (or float64).
    """
    low = next((x.dtype for x in (a, b) if x.dtype in (torch.bfloat16, torch.float16)), None)
    return low if low is not None and a.is_cuda else accumulator(a)
