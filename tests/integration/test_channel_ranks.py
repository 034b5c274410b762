"""A channel on all trainer ranks: each method ends on every rank with the same outcome or the same error."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.engines.wire import TensorSpec, in_order
from bapo_megatron.errors import EngineError, NoEngineLeftError, UserError
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.runtime.ranks import gather_json
from bapo_megatron.sync.base import RankZeroChannel, SyncStats
from tests.distributed import run_distributed
from tests.hf_models import save_model
from tests.integration.hf_roundtrip import make_config

LAYOUT = {"tensor": 2, "pipeline": 2}


class Recorder:
    """Stands in for a sender; `published` are the weights that engines would sample from."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.num_torn = 0
        self.published: dict[str, Tensor] = {}
        self.num_read = 0

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        self.manifest = manifest
        if self.problem:
            raise self.problem

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        received = {}
        self.num_read = 0
        for name, tensor in in_order(named_weights, self.manifest):
            self.num_read += 1
            if self.problem and self.num_read == 3:
                raise self.problem
            received[name] = tensor.clone()
        self.num_torn -= 1
        if self.num_torn >= 0:
            return SyncStats(is_whole=False)
        self.published = received
        return SyncStats()

    def close(self) -> None:
        if self.problem:
            raise self.problem


def check_ranks(rank: int, world_size: int, root: Path) -> None:
    learner = MegatronLearner(make_config(LAYOUT), root)
    sender = Recorder() if rank == 0 else None
    channel = RankZeroChannel(sender)
    channel.connect(learner)
    read = learner._unquantised

    for failing in range(world_size):
        num_calls = 0

        def half_way(parameter: Parameter, failing: int = failing) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if rank == failing and num_calls == 4:
                raise RuntimeError("lost its weights")
            return read(parameter)

        learner._unquantised = half_way  # type: ignore[method-assign]
        with pytest.raises(UserError) as raised:
            channel.push(learner)
        assert str(raised.value) == f"trainer rank {failing} failed: RuntimeError: lost its weights"
        assert type(raised.value) is UserError
        assert isinstance(raised.value.__cause__, RuntimeError) == (rank == failing)
        if sender:
            assert 0 < sender.num_read < len(sender.manifest), "the last weight is withheld"
            assert not sender.published

    learner._unquantised = read  # type: ignore[method-assign]
    calls = (lambda: channel.connect(learner), lambda: channel.push(learner), channel.close)
    for problem in (EngineError("http://a refuses"), NoEngineLeftError("none is left")):
        for call in calls:
            if sender:
                sender.problem = problem
            with pytest.raises(EngineError) as refused:
                call()
            assert (type(refused.value), str(refused.value)) == (type(problem), str(problem))

    if sender:
        sender.problem, sender.num_torn = None, 2
    stats = channel.push(learner)
    assert stats.is_whole
    assert not sender or sender.num_torn == -1, "pushed again until it was whole"
    channel.close()
    expected = load_file(root / "model.safetensors")
    if sender:
        assert sender.published.keys() == {spec.name for spec in learner.weight_specs()}
        for name, tensor in sender.published.items():
            assert torch.equal(tensor, expected[name]), name
    assert gather_json(rank) == list(range(world_size)), "no rank is left behind in a collective"


def test_every_rank_ends_with_the_same_outcome_or_error(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    run_distributed(check_ranks, 4, tmp_path)


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    learner = MegatronLearner(make_config({}), root)
    sender = Recorder()
    channel = RankZeroChannel(sender)
    channel.connect(learner)

    def lost(parameter: Parameter) -> Tensor:
        raise RuntimeError("lost its weights")

    learner._unquantised = lost  # type: ignore[method-assign]
    with pytest.raises(UserError, match="trainer rank 0 failed: RuntimeError: lost its weights"):
        channel.push(learner)
    assert not sender.published


def test_a_single_rank_that_fails_publishes_nothing(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    run_distributed(check_one_process, 1, tmp_path)
