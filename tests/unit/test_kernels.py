"""Operations that CPUs compute in their own ways, against torch's; and the choice between them."""

import math

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.kernels import kernels_of
from bapo_megatron.kernels.base import Kernels
from bapo_megatron.kernels.cpu import CACHED_VALUES, NUM_DIRECT, CPUKernels
from tests.distributed import run_distributed


def test_the_device_of_a_tensor_chooses() -> None:
    assert type(kernels_of(torch.empty(1))) is CPUKernels
    assert type(kernels_of(torch.empty(1, device="meta"))) is Kernels


def test_norm_is_torchs_in_value_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_H = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((40, 3, 33), (33,)))
    found = []
    for kernels in (Kernels(), CPUKernels()):
        out = kernels.rms_norm(x, weight_H, 1e-5)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, weight_H])])
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_columns", [1, 1000, CACHED_VALUES - 1, 2 * CACHED_VALUES])
def test_blocks_cover_the_rows_and_fit_the_cache(num_columns: int) -> None:
    x_RV = torch.empty(1, num_columns).expand(300, num_columns)
    for kernels in (Kernels(), CPUKernels()):
        blocks = list(kernels.blocks(x_RV))
        assert [i for rows in blocks for i in range(rows.start, rows.stop)] == list(range(300))
    assert max(rows.stop - rows.start for rows in blocks) <= max(1, CACHED_VALUES // num_columns), "on a CPU"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tables_of_all_ranks_combine(num_ranks: int) -> None:
    run_distributed(check_combine, num_ranks)


def check_combine(rank: int, world_size: int) -> None:
    """Each rank has the same bits, equal to a plain sum in rank order, whichever way the table took."""
    for shape in ((57,), (2, 3), (), (0,), (NUM_DIRECT,), (NUM_DIRECT + 1,)):
        tables = [torch.randn(shape, dtype=torch.float64, generator=_generator(i)).exp() for i in range(world_size)]
        mine = tables[rank].clone()
        stacked = torch.stack(tables)
        for op, expected in (
            (dist.ReduceOp.SUM, sum(tables)),
            (dist.ReduceOp.MAX, stacked.amax(0)),
            (dist.ReduceOp.MIN, stacked.amin(0)),
        ):
            found = CPUKernels().combine(mine, op=op)
            torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)
            of_all = [torch.empty_like(found) for _ in range(world_size)]
            dist.all_gather(of_all, found)
            assert all(torch.equal(found, other) for other in of_all), "the same bits on every rank"
        assert torch.equal(mine, tables[rank]), "the argument is unchanged"
    lost = torch.tensor([math.nan if rank == world_size - 1 else 1.0], dtype=torch.float64)
    assert CPUKernels().combine(lost).isnan().all()
    alone = dist.new_group([0])
    if rank == 0:
        assert CPUKernels().combine(torch.ones(2, dtype=torch.float64), alone).tolist() == [1.0, 1.0]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
