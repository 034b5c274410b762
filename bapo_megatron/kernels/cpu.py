"""The operations on a CPU: in fewer passes over memory, in pieces that fit its cache, and without gloo's rings."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.kernels.base import Kernels, slices

CACHED_VALUES = 1 << 17  # 512 KiB of float32: half of a typical second-level cache, for a block and one temporary
NUM_DIRECT = 1 << 14  # most numbers that ranks send each other directly; the ring is faster from 16 times that number
_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class CPUKernels(Kernels):
    """Operations that access memory less often, and wait less for other ranks."""

    def rms_norm(self, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Return the norm: float32 in few passes over memory, other types as torch does."""
        if x.dtype != torch.float32:
            return super().rms_norm(x, weight_H, eps)
        out: Tensor = _RMSNorm.apply(x, weight_H, eps)
        return out

    def blocks(self, x_RV: Tensor) -> Iterator[slice]:
        """Split into blocks small enough to stay in the cache from the first operation to the last."""
        num_rows, num_columns = x_RV.shape
        return slices(num_rows, max(1, CACHED_VALUES // num_columns))

    def combine(
        self, table: Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Send small tables directly to all ranks, and combine them in rank order.

        gloo's all-reduce passes many messages around in turn, and takes 2 to 4 times as long (small_tables of
        docs/measured/performance.toml).
        """
        group = group or dist.group.WORLD
        assert group is not None, "there is a process group"
        if group.size() == 1 or table.numel() > NUM_DIRECT:
            return super().combine(table, group, op)
        tables = table.new_empty(group.size(), *table.shape)
        dist.all_to_all_single(tables.flatten(), table.flatten().repeat(group.size()), group=group)
        return reduce(_COMBINE[op], tables.unbind())


class _RMSNorm(torch.autograd.Function):
    """out = weight * x / rms(x), rms(x) = sqrt(mean(x^2) + eps); keeps x and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        inverse_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True)
        inverse_T1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse_T1, weight_H)
        return (x_TH * inverse_T1).mul_(weight_H).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse_T1, weight_H = ctx.saved_tensors
        width = x.shape[-1]
        grad_TH = grad.reshape(-1, width)
        normal_TH = x.reshape(-1, width) * inverse_T1
        product_TH = grad_TH * normal_TH
        grad_weight_H = product_TH.sum(0)
        dot_T1 = torch.mv(product_TH, weight_H)[:, None]
        # dx = (weight * grad - normal * mean(weight * grad * normal)) / rms
        grad_x_TH = torch.mul(grad_TH, weight_H, out=product_TH)
        grad_x_TH.addcmul_(normal_TH, dot_T1, value=-1 / width).mul_(inverse_T1)
        return grad_x_TH.view(x.shape), grad_weight_H, None
