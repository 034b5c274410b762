"""The token embedding, whose gradient goes straight to the rows of Megatron's float32 buffer.

Autograd would make a gradient of the whole vocabulary for each micro-batch, zero except in the rows of its tokens, and
Megatron would add all of it to the buffer: several GiB written for a few MiB.

Shape legend: T packed tokens, V vocabulary rows of this rank, H hidden
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.algorithms.logprobs import left_for_autograd


def embed(layer: VocabParallelEmbedding, token_ids_1T: Tensor, *, hooks_need_grad: bool) -> Tensor:
    """Return what Megatron's `VocabParallelEmbedding.forward` returns: [1, T, H], or [T / tensor, 1, H] with sequence
    parallelism.

    Args:
        hooks_need_grad: give autograd zeros in place of the gradient that went to `main_grad`; see `token_log_probs`.
    """
    rows_1T, elsewhere_1T = token_ids_1T, None
    if layer.tp_group.size() > 1:
        rows_1T = token_ids_1T - layer.vocab_start_index
        elsewhere_1T = (rows_1T < 0) | (rows_1T >= layer.num_embeddings_per_partition)
        rows_1T = rows_1T.masked_fill(elsewhere_1T, 0)
    hidden_1TH = Lookup.apply(layer.weight, rows_1T, elsewhere_1T, hooks_need_grad)
    if layer.reduce_scatter_embeddings:
        hidden_T1H = hidden_1TH.transpose(0, 1).contiguous()
        return reduce_scatter_to_sequence_parallel_region(hidden_T1H, group=layer.tp_group)
    return reduce_from_tensor_model_parallel_region(hidden_1TH, group=layer.tp_group)


class Lookup(torch.autograd.Function):
    """weight_VH[rows_1T], zero for the tokens of other ranks."""

    @staticmethod
    def forward(
        ctx: Any, weight_VH: Tensor, rows_1T: Tensor, elsewhere_1T: Tensor | None, hooks_need_grad: bool
    ) -> Tensor:
        ctx.save_for_backward(weight_VH, rows_1T, elsewhere_1T)
        ctx.hooks_need_grad = hooks_need_grad
        hidden_1TH = torch.nn.functional.embedding(rows_1T, weight_VH)
        return hidden_1TH if elsewhere_1T is None else hidden_1TH.masked_fill_(elsewhere_1T[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1TH: Tensor) -> tuple[Tensor | None, None, None, None]:
        weight_VH, rows_1T, elsewhere_1T = ctx.saved_tensors
        is_main = hasattr(weight_VH, "main_grad")
        grad_VH = weight_VH.main_grad if is_main else torch.zeros_like(weight_VH)
        if elsewhere_1T is not None:
            grad_1TH = grad_1TH.masked_fill(elsewhere_1T[..., None], 0)
        rows_T, grad_TH = rows_1T.flatten(), grad_1TH.flatten(0, 1).to(grad_VH.dtype)
        grad_VH.index_add_(0, rows_T, grad_TH)  # on GPUs in a fixed order only with `run.deterministic`
        return left_for_autograd(weight_VH, ctx.hooks_need_grad) if is_main else grad_VH, None, None, None
