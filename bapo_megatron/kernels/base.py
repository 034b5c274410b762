"""The operations as torch and its collectives compute them; GPUs use these."""

from collections.abc import Iterator

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Kernels:
    """torch's own operations.

    Shape legend: R rows, V columns, H width of the norm
    """

    def rms_norm(self, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Return weight_H * x / sqrt(mean(x^2) + eps), over the last dimension of x [..., H]; differentiable."""
        return F.rms_norm(x, weight_H.shape, weight_H, eps)

    def blocks(self, x_RV: Tensor) -> Iterator[slice]:
        """Split the rows of x_RV into blocks; each passes through several operations before the next one starts."""
        yield slice(0, x_RV.shape[0])

    def combine(
        self, table: Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Return the sum, maximum or minimum of a table over a group (default: all ranks), bit-identical on each rank.

        Makes one collective of the group.
        """
        table = table.clone()
        dist.all_reduce(table, op, group=group)
        return table


def slices(num_rows: int, size: int) -> Iterator[slice]:
    """Cut `num_rows` rows into slices of `size`; the last one may be shorter."""
    return (slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size))
