"""A channel on all trainer ranks: each method ends on every rank with the same outcome or the same error."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.engines.wire import TensorSpec, in_order
from bapo_megatron.errors import EngineError, NoEngineLeftError, UserError
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.weight_source import ModelWeights
from bapo_megatron.resolved import resolve
from bapo_megatron.runtime.ranks import gather_json
from bapo_megatron.runtime.together import failing_together
from bapo_megatron.sync.base import RankZeroChannel, SyncStats, WeightSource
from tests.distributed import run_distributed
from tests.hf_models import save_model
from tests.integration.hf_roundtrip import make_config

LAYOUT = {"tensor": 2, "pipeline": 2}


class Recorder:
    """A stand-in for a sender; `published` holds the weights that engines would sample from."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.num_torn = 0
        self.published: dict[str, Tensor] = {}
        self.num_read = 0

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        self.manifest = manifest
        if self.problem:
            raise self.problem

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        received = {}
        self.num_read = 0
        for name, tensor in in_order(weights, self.manifest):
            self.num_read += 1
            if self.problem and self.num_read == 3:
                raise self.problem
            received[name] = tensor.clone()
        self.num_torn -= 1
        if self.num_torn >= 0:
            return SyncStats(is_whole=False)
        self.received = received
        return SyncStats()

    def resume(self, stats: SyncStats) -> None:
        self.published = self.received

    def close(self) -> None:
        if self.problem:
            raise self.problem


class PiecesChannel:
    """A channel whose ranks send the boxes that they own; rank 0 publishes whole weights once all have ended well."""

    def __init__(self) -> None:
        self.published: dict[str, Tensor] = {}

    def push(self, source: WeightSource) -> None:
        boxes = []
        with failing_together():
            for piece in source.pieces():
                values = piece.values.reshape(piece.size).tolist()
                boxes.append((piece.name, piece.start, piece.size, values))
        gathered = gather_json(boxes)
        wholes = {spec.name: torch.full(spec.shape, torch.nan) for spec in source.manifest()}
        for name, start, size, values in itertools.chain(*gathered):
            place = wholes[name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            assert place.isnan().all(), f"two ranks send the same values of {name}"
            place.copy_(torch.tensor(values))
        self.published = wholes


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A source with another source's version and manifest."""

    inner: WeightSource

    @property
    def version(self) -> int:
        return self.inner.version

    def manifest(self) -> Sequence[TensorSpec]:
        return self.inner.manifest()


@dataclass(frozen=True, slots=True)
class Failing(Wrapping):
    """A wrapper of another source, which loses the fourth parameter that this rank reads."""

    inner: ModelWeights

    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces(self._half_way())

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        return self.inner.whole(self._half_way())

    @staticmethod
    def _half_way() -> Callable[[Parameter], Tensor]:
        num_calls = itertools.count(1)

        def read(parameter: Parameter) -> Tensor:
            if next(num_calls) == 4:
                raise RuntimeError("lost its weights")
            return parameter.detach()

        return read


@dataclass(frozen=True, slots=True)
class Doubled(Wrapping):
    """A wrapper of any other source, which changes its values as a merged adapter would."""

    def pieces(self) -> Iterator[Piece]:
        return (replace(piece, values=2 * piece.values) for piece in self.inner.pieces())

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, 2 * tensor) for name, tensor in self.inner.whole())


def check_ranks(rank: int, world_size: int, root: Path) -> None:
    learner = MegatronLearner(resolve(make_config(LAYOUT), root))
    weights = learner.weights()
    assert isinstance(weights, ModelWeights)
    sender = Recorder() if rank == 0 else None
    channel, own = RankZeroChannel(sender), PiecesChannel()
    channel.connect(weights)

    for failing in range(world_size):
        source = Failing(weights) if rank == failing else weights
        for push in (channel.push, own.push):
            with pytest.raises(UserError) as raised:
                push(source)
            assert str(raised.value) == f"trainer rank {failing} failed: RuntimeError: lost its weights"
            assert type(raised.value) is UserError
            assert isinstance(raised.value.__cause__, RuntimeError) == (rank == failing)
            assert not own.published
        if sender:
            assert 0 < sender.num_read < len(sender.manifest), "the last weight is withheld"
            assert not sender.published

    calls = (lambda: channel.connect(weights), lambda: channel.push(weights), channel.close)
    for problem in (EngineError("http://a refuses"), NoEngineLeftError("none is left")):
        for call in calls:
            if sender:
                sender.problem = problem
            with pytest.raises(EngineError) as refused:
                call()
            assert (type(refused.value), str(refused.value)) == (type(problem), str(problem))

    if sender:
        sender.problem, sender.num_torn = None, 2
    stats = channel.push(weights)
    assert stats.is_whole
    assert not sender or sender.num_torn == -1, "pushed again until it was whole"
    channel.close()
    expected = load_file(root / "model.safetensors")
    if sender:
        assert sender.published.keys() == {spec.name for spec in weights.manifest()}
        for name, tensor in sender.published.items():
            assert torch.equal(tensor, expected[name]), name
    twice = Doubled(weights)
    channel.connect(twice)
    channel.push(twice)
    own.push(twice)
    for published in (own.published, *([sender.published] if sender else [])):
        assert published.keys() == expected.keys()
        for name, tensor in published.items():
            assert torch.equal(tensor, 2 * expected[name]), name
    assert gather_json(rank) == list(range(world_size)), "no rank is left behind in a collective"


def test_every_rank_ends_with_the_same_outcome_or_error(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    run_distributed(check_ranks, 4, tmp_path)


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    weights = MegatronLearner(resolve(make_config({}), root)).weights()
    assert isinstance(weights, ModelWeights)
    sender = Recorder()
    channel = RankZeroChannel(sender)
    channel.connect(weights)
    with pytest.raises(UserError, match="trainer rank 0 failed: RuntimeError: lost its weights"):
        channel.push(Failing(weights))
    assert not sender.published


def test_a_single_rank_that_fails_publishes_nothing(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    run_distributed(check_one_process, 1, tmp_path)


def check_copies(rank: int, world_size: int, root: Path) -> None:
    """Ranks that hold the same weights share the sending."""
    weights = MegatronLearner(resolve(make_config({"pipeline": 2, "data": 2}), root)).weights()
    own = PiecesChannel()
    own.push(weights)
    assert all(gather_json(any(True for _ in weights.pieces())))
    for name, tensor in weights.whole():
        assert rank or torch.equal(own.published[name], tensor), name


def test_copies_of_weights_are_sent_once(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    run_distributed(check_copies, 4, tmp_path)
