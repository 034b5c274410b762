"""Overlapped sums of gradients and gathering of weights: the same updates, and no weight is read too early."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from bapo_megatron.learner import split_model
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import BOUNDS, save_random_model
from tests.integration.learner_updates import Update, assert_close, make_config, pack, updates_of

Case = tuple[str, dict[str, Any], bool, dict[str, Any]]  # family, [parallel], optimizer.distributed, [train]


class SmallBuckets(DistributedDataParallelConfig):
    """A configuration that gives a tiny model several buckets, as a large model has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, bucket_size=2000)


def run(overlap: bool, root: Path, case: Case, read_between: bool = True) -> list[Update]:
    family, parallel, distributed, train = case
    parallel = {**parallel, "overlap_communication": overlap}
    learner = MegatronLearner(
        resolve(make_config(distributed=distributed, parallel=parallel, train=train), root / family)
    )
    (ddp, *_) = learner.wrapped
    assert ddp.ddp_config.overlap_grad_reduce == overlap
    assert ddp.ddp_config.overlap_param_gather == (overlap and distributed)
    if overlap and learner.layout.pipeline_rank == 0:
        assert len(ddp.bucket_groups) > 1
    return updates_of(learner, read_between=read_between)


def check(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    split_model.DistributedDataParallelConfig = SmallBuckets  # type: ignore[misc]
    for case in cases:
        plain = run(False, root, case)
        for read_between in (True, False):
            overlapped = run(True, root, case, read_between)
            for mine, other in zip(overlapped, plain, strict=True):
                if not mine.weights:
                    mine.weights, mine.gradients = other.weights, other.gradients
            assert_close(overlapped, plain, rtol=1e-5, atol=1e-6)  # the gradient norm is summed by bucket


def check_readers(rank: int, world_size: int, root: Path) -> None:
    """While the gathering is put off, a push and a snapshot still read the new weights on every rank."""
    split_model.DistributedDataParallelConfig = SmallBuckets  # type: ignore[misc]
    config = make_config(distributed=True, parallel={"data": 2, "overlap_communication": True})
    for read in (lambda learner: list(learner.weights().whole()), lambda learner: learner.snapshot()):
        learner = MegatronLearner(resolve(config, root / "qwen3"))
        learner.step(pack(learner), BOUNDS)
        stale = [p.detach().clone() for p in learner.model.parameters()]
        read(learner)
        fresh = [p.detach().clone() for p in learner.model.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(stale, fresh, strict=True)), "nothing was put off"
        for parameter in fresh:
            of_all = [torch.empty_like(parameter) for _ in range(world_size)]
            torch.distributed.all_gather(of_all, parameter)
            assert all(torch.equal(of_all[0], other) for other in of_all)
        parallel_state.destroy_model_parallel()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for family in ("qwen3", "qwen2"):
        save_random_model(family, tmp_path / family)
    return tmp_path


@pytest.mark.slow
def test_two_data_ranks(root: Path) -> None:
    """Test a separate output layer and tied embeddings, with both kinds of optimizer."""
    cases: list[Case] = [
        ("qwen3", {"data": 2}, True, {}),
        ("qwen2", {"data": 2}, True, {"schedule": "forwards_first"}),
        ("qwen2", {"data": 2}, False, {"recompute": True}),
    ]
    run_distributed(check, 2, root, cases)


def test_readers_wait_for_the_gathering(root: Path) -> None:
    run_distributed(check_readers, 2, root)


@pytest.mark.slow
def test_four_ranks(root: Path) -> None:
    cases: list[Case] = [
        ("qwen2", {"data": 2, "pipeline": 2}, True, {}),
        ("qwen3", {"data": 2, "pipeline": 2, "virtual_pipeline": 2}, True, {"recompute": True}),
        ("qwen3", {"context": 2, "tensor": 2, "sequence": True}, True, {}),
    ]
    run_distributed(check, 4, root, cases)
