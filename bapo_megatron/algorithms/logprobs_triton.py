"""The two passes of `logprobs.py` over a chunk of logits, as Triton kernels: each reads the chunk once.

The matrix products are still cuBLAS's. In plain torch a chunk of float32 logits goes through memory about ten times
forward and backward; here it is read once forward, and read and written once backward, in the type that the products
take. The running maximum and sums follow online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867), in float32.

Shape legend: C rows of a chunk, V vocabulary rows of this rank that are not padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns that one program holds at a time
NUM_WARPS = 8


def row_statistics(
    logits_CV: Tensor, columns_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `logprobs.row_statistics`; logits are float32 and are not overwritten."""
    num_rows, num_columns = _checked(logits_CV).shape
    out_4C = logits_CV.new_empty(4, num_rows)
    statistics_kernel[(num_rows,)](
        logits_CV,
        columns_C,
        out_4C,
        num_rows,
        num_columns,
        1.0 / temperature,
        with_entropy,
        BLOCK,
        num_warps=NUM_WARPS,
    )
    max_C, sum_C, weighted_C, target_C = out_4C.unbind()
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
    """See `logprobs.logit_gradients`."""
    num_rows, num_columns = _checked(logits_CV).shape
    grid = (num_rows, triton.cdiv(num_columns, BLOCK))
    has_entropy = entropy_pull_C is not None
    rows = [x.contiguous() for x in (columns_C, log_z_C, pull_C, entropy_C, entropy_pull_C) if x is not None]
    if not has_entropy:
        rows.append(pull_C)  # a pointer that is not read
    grads_CV = logits_CV if dtype == logits_CV.dtype else torch.empty_like(logits_CV, dtype=dtype)
    gradients_kernel[grid](
        logits_CV, grads_CV, *rows, num_columns, 1.0 / temperature, has_entropy, BLOCK, num_warps=NUM_WARPS
    )
    return grads_CV


def _checked(logits_CV: Tensor) -> Tensor:
    assert logits_CV.dtype == torch.float32, f"the kernels are for float32, not {logits_CV.dtype}"
    assert logits_CV.is_contiguous(), "the kernels find a row by its number of columns"
    return logits_CV


@triton.jit
def statistics_kernel(
    logits,
    columns,
    out,
    num_rows,
    num_columns,
    scale,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    top, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, num_columns, block):
        column = start + tl.arange(0, block)
        inside = column < num_columns
        x = tl.where(inside, tl.load(logits + column, mask=inside, other=0.0) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, axis=0))
        shrink = tl.exp(top - new_top)
        p = tl.where(inside, tl.exp(x - new_top), 0.0)
        total = total * shrink + tl.sum(p, axis=0)
        if with_entropy:
            weighted = weighted * shrink + tl.sum(p * tl.where(inside, x, 0.0), axis=0)
        top = new_top
    column = tl.load(columns + row)
    target = tl.load(logits + column, mask=column >= 0, other=0.0) * scale
    tl.store(out + row, top)
    tl.store(out + num_rows + row, total)
    tl.store(out + 2 * num_rows + row, weighted)
    tl.store(out + 3 * num_rows + row, target)


@triton.jit
def gradients_kernel(
    logits,
    grads,
    columns,
    log_zs,
    pulls,
    entropies,
    entropy_pulls,
    num_columns,
    scale,
    has_entropy: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < num_columns
    place = row * num_columns + column
    log_p = tl.load(logits + place, mask=inside, other=0.0) * scale - tl.load(log_zs + row)
    pull = tl.load(pulls + row)
    slope = pull
    if has_entropy:
        slope = pull + (log_p + tl.load(entropies + row)) * tl.load(entropy_pulls + row)
    grad = -tl.exp(log_p) * slope
    grad = tl.where(column == tl.load(columns + row), grad + pull, grad)
    tl.store(grads + place, grad, mask=inside)  # rounds to the type of `grads`
