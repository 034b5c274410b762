"""The batch that rank 0 makes reaches every rank, or else its error does."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.rollout.shared import NEEDS_WEIGHTS, SharedRollouts
from bapo_megatron.rollout.shares import BatchShares
from bapo_megatron.runtime import ranks
from bapo_megatron.runtime.together import wait_together
from bapo_megatron.types import Batch, Group
from tests.distributed import HANG_S, run_distributed


def make() -> Batch:
    return Batch(
        token_ids_T=torch.tensor([1, 2, 3]),
        seq_lens_S=torch.tensor([3]),
        sampled_T=torch.tensor([False, True, True]),
        advantages_T=torch.tensor([0.0, 0.5, -0.5]),
        behaviour_logprobs_T=torch.tensor([0.0, -1.25, -2.5]),
        versions_T=torch.tensor([-1, 3, 4]),
        mask_T=torch.tensor([False, True, True]),
        rewards_S=torch.tensor([0.1]),
        metrics={"reward/mean": 0.1},
    )


def fail() -> Batch:
    raise EngineError("http://engine:1 is gone")


def once_all_have_heard(made: Callable[[], Batch]) -> Callable[[], Batch]:
    """Return a maker that waits until the other ranks have received three signs of life."""
    num_sent, are_sent, broadcast = 0, threading.Event(), dist.broadcast

    def count(tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
        nonlocal num_sent
        broadcast(tensor, src=src, group=group)
        if (num_sent := num_sent + 1) == 3:
            are_sent.set()

    dist.broadcast = count  # type: ignore[assignment] - in this process, which ends with the test

    def make_late() -> Batch:
        assert are_sent.wait(HANG_S)
        return made()

    return make_late


class Rollouts:
    """Rollouts whose batch is made, or fails to be."""

    def __init__(self, make: Callable[[], Batch]) -> None:
        self._make = make

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]]:
        return self._make(), []


def everything(batch: Batch) -> list[torch.Tensor]:
    return [torch.arange(batch.num_sequences)]


def rollouts_of(first: Any, config: Config | None = None) -> SharedRollouts:
    """Return the rollouts of ranks that all belong to one data rank."""
    shares = BatchShares(0, 0, lambda stage, num_layers: [*range(num_layers)], HANG_S)
    config = config or Config()
    parallel = config.parallel.model_copy(update={"timeout_s": 0.04})  # time for four signs of life from rank 0
    return SharedRollouts(config.model_copy(update={"parallel": parallel}), first, lambda *_: None, shares)


def on_every_rank(rank: int, world_size: int) -> None:
    is_first, expected = rank == 0, make()
    got = rollouts_of(Rollouts(once_all_have_heard(make)) if is_first else None).next_batch(0, 1, everything)
    assert got is not NEEDS_WEIGHTS
    assert torch.equal(got.seq_lens_S, expected.seq_lens_S)
    assert got.rewards_S is not None
    assert expected.rewards_S is not None
    assert torch.equal(got.rewards_S, expected.rewards_S)
    assert got.values.keys() == expected.values.keys()
    for stream, values_T in expected.values.items():
        assert torch.equal(got.values[stream], values_T), stream
        assert got.values[stream].dtype == values_T.dtype, stream
    assert got.metrics == expected.metrics
    with pytest.raises(UserError, match="http://engine:1 is gone"):
        rollouts_of(Rollouts(once_all_have_heard(fail)) if is_first else None).next_batch(0, 1, everything)


class Interrupted:
    """Rollouts whose last engine fails twice at everything."""

    def __init__(self) -> None:
        self.num_asked = 0

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]] | None:
        self.num_asked += 1
        return (make(), []) if self.num_asked % 3 == 0 else None

    def evaluate(self, version: int) -> dict[str, float] | None:
        self.num_asked += 1
        return {"eval/reward": 0.5} if self.num_asked % 3 == 0 else None


def asks_on_every_rank(rank: int, world_size: int) -> None:
    config = Config.model_validate({"eval": {"interval_steps": 2}})
    first: Any = Interrupted() if rank == 0 else None
    rollouts = rollouts_of(first, config)
    for _ in range(2):
        assert rollouts.next_batch(0, 1, everything) is NEEDS_WEIGHTS
        dist.barrier()  # a push, which every rank takes part in
    batch = rollouts.next_batch(0, 1, everything)
    assert batch is not NEEDS_WEIGHTS
    assert batch.metrics == {"reward/mean": 0.1}
    for _ in range(2):
        assert rollouts.evaluate(2, 1) is NEEDS_WEIGHTS
        dist.barrier()
    assert rollouts.evaluate(2, 1) == {"eval/reward": 0.5}
    assert rollouts.evaluate(3, 1) == {}, "none is due"


def test_every_rank_is_asked_for_a_push_until_the_batch_or_the_evaluation_is_there() -> None:
    run_distributed(asks_on_every_rank, 2)


def flags_on_every_rank(rank: int, world_size: int) -> None:
    for value in (True, False, True):
        assert ranks.share_flag(value if rank == 0 else None) is value


def test_every_rank_gets_the_flag() -> None:
    run_distributed(flags_on_every_rank, 3)


def test_every_rank_gets_the_batch_or_the_error() -> None:
    run_distributed(on_every_rank, 2)


def test_while_rank_0_samples_the_other_ranks_hear_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling may take longer than the deadline of a collective."""
    heard: list[int] = []
    sampled: Future[Any] = Future()

    def hear(flag: torch.Tensor, src: int) -> None:
        heard.append(int(flag))
        if len(heard) == 3:
            sampled.set_result(None)

    monkeypatch.setattr(dist, "broadcast", hear)
    wait_together(sampled, sign_of_life_s=0.05)
    assert heard == [0, 0, 0, 1]
