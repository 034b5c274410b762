"""Models that leave their device and come back: the same updates bit for bit, snapshots of what is away, and memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.engines.base import ALL_MEMORY, Folder, GenerateRequest
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.learner import megatron
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.offload import Offload
from bapo_megatron.learner.split_model import TrainedModel
from bapo_megatron.learner.values import ValueAdvantages
from bapo_megatron.learner.whole_batch import scorers_of, with_scores
from bapo_megatron.resolved import resolve
from bapo_megatron.sync.turns import Turns
from tests.distributed import HANG_S, run_distributed
from tests.engine_processes import started_engines
from tests.hf_models import save_randomised
from tests.integration.learner_reference import (
    ADAPTERS,
    BOUNDS,
    MIXTURE,
    random_batch,
    save_adapters,
    save_random_model,
)
from tests.integration.learner_updates import TOKENS, make_config
from tests.integration.test_critic import make_batch

MIB, NUM_UPDATES = 2**20, 2
TEACHERS = ("qwen2", "qwen3")
LORA: dict[str, Any] = {"rank": ADAPTERS.rank, "alpha": ADAPTERS.alpha}
Values = dict[tuple[str, str, str, tuple[int, ...]], Tensor]  # by model, part, name and start


@dataclass(frozen=True)
class Case:
    """The settings of one learner."""

    family: str = "qwen3"
    settings: dict[str, Any] | None = None
    init: bool = False  # from adapters of another run
    is_taught: bool = False

    def config(self, root: Path) -> Config:
        settings = dict(self.settings or {})
        if self.init:
            settings["lora"] = LORA | {"init_from": str(root / "adapters")}
        if self.is_taught:
            settings["teacher"] = {"path_by_source": {name: str(root / name) for name in TEACHERS}}
        return make_config(**settings)


SPLIT: dict[str, Any] = {"distributed": True, "parallel": {"data": 2}}
GAE: dict[str, Any] = {"advantage": {"kind": "gae"}, "critic": {"lr": 1e-3}}
KL: dict[str, Any] = {"loss": {"kl_coef": 0.1}}
BFLOAT16: dict[str, Any] = {"model": {"dtype": "bfloat16"}}
OVERLAP: dict[str, Any] = {"distributed": True, "parallel": {"data": 2, "overlap_communication": True}}
EXPERTS: dict[str, Any] = {"distributed": True, "parallel": {"data": 2, "expert": 2}}
ALONE = [Case(), Case(settings=BFLOAT16), Case(settings=KL, init=True)]
MORE_ALONE = [Case(settings={"lora": LORA}), Case(settings=GAE | KL), Case(settings=BFLOAT16, is_taught=True)]
IN_PAIRS = [
    Case("qwen2", OVERLAP),
    Case(settings=SPLIT | BFLOAT16),
    Case(settings=SPLIT | KL, init=True),
    Case(settings=SPLIT | GAE),
    Case(settings=SPLIT | KL, is_taught=True),
    Case(MIXTURE, EXPERTS),
]


class Trainer:
    """The models of one rank, with the phases of `rollout.placement = "turns"`, without servers."""

    def __init__(self, config: Config, model: Path, until_saved: Callable[[], None] = lambda: None) -> None:
        parallel_state.destroy_model_parallel()  # an earlier trainer's groups
        megatron.check_machine = lambda *_: None  # bfloat16 on a CPU
        self.config, run = config, resolve(config, model)
        servers: Any = SimpleNamespace(enter=lambda _: None)
        self.turns = Turns(
            servers if torch.distributed.get_rank() == 0 else None,
            until_saved=until_saved,
            until_free=lambda _: None,
            sign_of_life_s=1.0,
        )
        with self.turns.training():
            self.learner = MegatronLearner(run)
            self.advantages = ValueAdvantages(run, self.learner)
        self.models: dict[str, TrainedModel] = {"learner": self.learner, **self.advantages.parts}

    def offload(self) -> Offload:
        self.turns.trainer = moves = Offload(
            self.learner, self.advantages.critic, self.learner.reference, *self.learner.teachers
        )
        return moves

    def update(self) -> dict[str, float]:
        """Score a batch, and make one update of each model."""
        batch, found = random_batch(), {}
        if self.advantages.critic is not None:
            batch = self.advantages.on(make_batch(), 0)
            found = batch.metrics
        if self.learner.teachers:
            batch = replace(batch, teacher_S=torch.arange(batch.num_sequences) % len(TEACHERS))
        scorers = scorers_of(self.config, self.learner, self.learner.reference, self.learner.teachers)
        batch = with_scores(batch, scorers, self.learner, self.config)
        minibatch = one_minibatch(batch, max_tokens=TOKENS, share=self.learner.share)
        self.learner.score(minibatch)
        return found | self.learner.step(minibatch, BOUNDS).metrics

    def snapshots(self) -> dict[str, Snapshot]:
        return {name: model.snapshot() for name, model in self.models.items()}

    def values(self) -> Values:
        """Return copies of this rank's pieces."""
        return copied(self.snapshots())


def copied(snapshots: dict[str, Snapshot]) -> Values:
    return {
        (model, piece.part, piece.name, piece.start): piece.values.detach().clone()
        for model, snapshot in snapshots.items()
        for piece in snapshot.pieces
    }


def assert_equal(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


def pushed(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.learner.weights().whole()}


def check_updates(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    """Compare updates with turns between them with the same updates of models that stay, also what snapshots hold."""
    for case in cases:
        found = []
        for moves in (False, True):
            trainer = Trainer(case.config(root), root / case.family)
            if moves:
                trainer.offload()
            rows = []
            for _ in range(NUM_UPDATES):
                with trainer.turns.training() if moves else nullcontext():
                    metrics = trainer.update()
                for _ in range(1 + moves):  # again for a server that is back
                    with trainer.turns.pushing() if moves else nullcontext():
                        weights = pushed(trainer)
                    assert moves == all(p.untyped_storage().nbytes() == 0 for p in parameters(trainer))
                    rows.append((metrics, weights, trainer.values()))
            with trainer.turns.training() if moves else nullcontext():
                rows.append((metrics, weights, trainer.values()))
            found.append(rows)
        stayed, moved = found
        for row, others in zip(
            stayed, [*(moved[i : i + 2] for i in range(0, 2 * NUM_UPDATES, 2)), moved[-1:]], strict=True
        ):
            for other in others:
                assert row[0] == other[0], case
                assert_equal(other[1], row[1])
                assert_equal(other[2], row[2])


def parameters(trainer: Trainer) -> Iterator[Tensor]:
    for model in (*trainer.models.values(), trainer.learner.reference, *trainer.learner.teachers):
        yield from getattr(model, "model", torch.nn.Module()).parameters()


def check_snapshots(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    """A snapshot of models that are away stays as it is during the next update, even one before the first update."""
    for case in cases:
        trainer = Trainer(case.config(root), root / case.family)
        trainer.offload()
        for _ in range(2):
            with trainer.turns.pushing():
                pushed(trainer)
            snapshots = trainer.snapshots()
            for snapshot in snapshots.values():
                snapshot.detach()
            want = copied(snapshots)
            assert any(part != "weight" for _, part, *_ in want)
            with trainer.turns.training():
                trainer.update()
                assert any(not torch.equal(value, want[key]) for key, value in trainer.values().items())
                assert_equal(copied(snapshots), want)


def check_asynchronous(rank: int, world_size: int, root: Path, case: Case) -> None:
    """A checkpoint of models that are away is written during the next update, and is whole before they leave again."""
    may_write = threading.Event()
    saved = {kind: root / f"saved-{world_size}-{kind}" for kind in ("live", "away")}
    stores = {
        kind: CheckpointStore(path, CheckpointConfig(asynchronous=kind == "away")) for kind, path in saved.items()
    }
    write = Snapshot.write

    def write_late(snapshot: Snapshot, folder: Path) -> Any:
        assert may_write.wait(HANG_S)
        return write(snapshot, folder)

    def until_saved() -> None:
        may_write.set()
        stores["away"].close()

    trainer = Trainer(case.config(root), root / case.family, until_saved)
    with trainer.turns.training():
        trainer.update()
        stores["live"].save(1, trainer.models, {})
    trainer.offload()
    with trainer.turns.pushing():
        pushed(trainer)
    may_write.clear()
    Snapshot.write = write_late  # type: ignore[assignment, method-assign]
    stores["away"].save(1, trainer.models, {})
    with trainer.turns.pushing():  # for a server that is back
        pushed(trainer)
    with trainer.turns.training():
        trainer.update()
    with trainer.turns.pushing():
        files = {
            kind: {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.suffix == ".safetensors"}
            for kind, path in saved.items()
        }
        pushed(trainer)
    if world_size > 1:
        weights = [*trainer.learner.model.parameters()]
        assert any(is_cut for _, is_cut in trainer.learner.adam.writers(weights)), "by a border of the ranks' shards"
    assert len(files["live"]) >= world_size
    assert files["live"] == files["away"]


def check_bytes(rank: int, world_size: int, root: Path) -> None:
    """Gradients are never copied, and what is not trained is copied only when it leaves for the first time."""
    trainer = Trainer(Case(settings=KL, init=True).config(root), root / "qwen3")
    trainer.offload()
    num_copied: list[int] = []
    copy = HostBuffer.copy

    def count(buffer: HostBuffer, tensors: Any) -> list[Tensor]:
        num_copied.append(sum(tensor.nbytes for tensor in tensors))
        return copy(buffer, tensors)

    HostBuffer.copy = count  # type: ignore[assignment, method-assign]
    weights = [*parameters(trainer)]
    trained, frozen = (sum(w.nbytes for w in weights if w.requires_grad == is_trained) for is_trained in (True, False))
    for initial, base in ((trained, frozen), (0, 0), (0, 0)):
        with trainer.turns.training():
            trainer.update()
        with trainer.turns.pushing():
            assert sum(num_copied) == 2 * trained + initial, "the moments, and the adapters that the reference has"
            num_copied.clear()
        assert sum(num_copied) == trained + base
        num_copied.clear()


SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
TOLERANCE_MIB = 4.0


def resident_mib(pid: int | str = "self") -> Tensor:
    """Return a process's own memory, and what it has of shared memory."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return torch.tensor([int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem")])


def assert_mib(found: Tensor, own: float, shared: float) -> None:
    torch.testing.assert_close(found, torch.tensor([own, shared], dtype=torch.float32), rtol=0, atol=TOLERANCE_MIB)


def check_resident(rank: int, world_size: int, root: Path, settings: dict[str, Any], bytes_each: list[int]) -> None:
    """Each phase has the memory of its parts; `bytes_each` says what a parameter's gradient and Adam's state take."""
    trainer = Trainer(make_config(**settings), root / "large")
    moves = trainer.offload()

    def now_mib() -> Tensor:
        moves._free_caches()
        return resident_mib()

    parameters = [*trainer.learner.model.parameters()]
    weights = sum(parameter.nbytes for parameter in parameters) / MIB
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    gradients, state = (num_trained * each / MIB for each in bytes_each)
    with trainer.turns.training():
        trainer.update()
        before = now_mib()
    with trainer.turns.pushing():
        assert_mib(now_mib() - before, -gradients - state, state)
    assert_mib(now_mib() - before, -gradients - state - weights, state + weights)
    with trainer.turns.pushing():
        assert_mib(now_mib() - before, -gradients - state, state + weights)
    away = now_mib()
    with trainer.turns.training():
        assert_mib(now_mib() - away, state + weights, 0)  # nobody has written into the gradients yet
        trainer.update()  # gloo takes memory of its own in one of the first updates
        assert (now_mib() - away)[0] > gradients + state + weights - TOLERANCE_MIB


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offload")
    for family in ("qwen3", "qwen2", MIXTURE):
        save_random_model(family, root / family)
    save_adapters(root / "qwen3", ADAPTERS, root / "adapters")
    for family in TEACHERS:
        (root / family / "tokenizer.json").write_text("{}")  # a teacher is a complete model folder
    return root


def check_one_rank(rank: int, world_size: int, root: Path) -> None:
    check_updates(rank, world_size, root, ALONE)
    check_snapshots(rank, world_size, root, ALONE[:1])
    check_asynchronous(rank, world_size, root, ALONE[0])
    check_bytes(rank, world_size, root)


def test_one_rank(root: Path) -> None:
    run_distributed(check_one_rank, 1, root)


@pytest.mark.slow
def test_more_models_of_one_rank(root: Path) -> None:
    run_distributed(check_updates, 1, root, MORE_ALONE)
    run_distributed(check_snapshots, 1, root, [*ALONE[1:], *MORE_ALONE])


def check_two_ranks(rank: int, world_size: int, root: Path) -> None:
    check_updates(rank, world_size, root, IN_PAIRS)
    check_snapshots(rank, world_size, root, IN_PAIRS)
    check_asynchronous(rank, world_size, root, IN_PAIRS[0])


@pytest.mark.slow
def test_two_ranks(root: Path) -> None:
    run_distributed(check_two_ranks, 2, root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings", "bytes_each"),
    [(1, {}, [4, 8]), (1, {"lora": {"rank": 64}}, [4, 8]), (2, SPLIT | BFLOAT16, [4, 6])],
)
def test_resident_memory_falls_and_comes_back(
    root: Path, num_ranks: int, settings: dict[str, Any], bytes_each: list[int]
) -> None:
    save_randomised(transformers.Qwen3Config(**SIZES), root / "large")
    run_distributed(check_resident, num_ranks, root, settings, bytes_each)


@pytest.mark.slow
def test_resident_memory_of_an_engine_falls_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))  # glibc raises its own and then keeps freed tensors
    model = save_randomised(transformers.Qwen3Config(**SIZES), tmp_path / "large")
    num_rows, num_tokens = 32, 130
    weights = sum(weight.nbytes for weight in model.parameters()) / MIB
    cache = 3 * 2 * num_rows * 2 * num_tokens * 64 * 4 / MIB
    requests = [GenerateRequest(f"r-{i}", (i + 1,) * (num_tokens - 1), 1, 1.0, (), i) for i in range(num_rows)]
    options = ("--max-running", str(num_rows), "--max-context", str(num_tokens))
    with started_engines(tmp_path, 1, *options, model=tmp_path / "large") as (server,):
        loop, engine = LoopThread(), HttpEngine(server.url, request_timeout_s=HANG_S)
        loop.run(engine.generate_many(requests), HANG_S)
        loop.run(engine.pause("retract"), HANG_S)  # after it, nothing of a step is left
        start = resident_mib(server.process.pid)

        def change_mib() -> Tensor:
            return resident_mib(server.process.pid) - start

        loop.run(engine.hold(frozenset()), HANG_S)
        assert_mib(change_mib(), -weights - cache, 0)
        loop.run(engine.hold({"weights"}), HANG_S)
        loop.run(engine.transport.take(Folder(tmp_path / "large"), version=1), HANG_S)
        assert_mib(change_mib(), -cache, 0)
        loop.run(engine.hold(ALL_MEMORY), HANG_S)
        loop.run(engine.resume(), HANG_S)
        loop.run(engine.generate_many(requests), HANG_S)
        loop.run(engine.pause("retract"), HANG_S)
        assert_mib(change_mib(), 0, 0)
        loop.run(engine.close(), HANG_S)
        loop.close()


@dataclass(frozen=True)
class View:
    """A view in a storage that may end within a value. (A failed test would crash if it printed an empty storage.)"""

    dtype: torch.dtype
    sizes: list[tuple[int, int]]  # and strides
    offset: int
    num_more: int

    def make(self) -> Tensor:
        last = self.offset + sum((size - 1) * stride for size, stride in self.sizes if size > 0)
        num_bytes = (last + 1) * self.dtype.itemsize + self.num_more
        storage = torch.randint(64, (num_bytes,), dtype=torch.uint8).untyped_storage()  # no nan in any type
        shape, strides = ([pair[i] for pair in self.sizes] for i in (0, 1))
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, shape, strides)


VIEWS = st.builds(
    View,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(st.lists(st.tuples(VIEWS, st.booleans()), max_size=3))
def test_a_view_reads_the_same_bits_while_its_storage_is_away(views: list[tuple[View, bool]]) -> None:
    copies, tensors, are_away = HostCopies(), [view.make() for view, _ in views], [is_away for _, is_away in views]
    want, storages = [tensor.clone() for tensor in tensors], [tensor.untyped_storage() for tensor in tensors]
    places = HostBuffer().copy([torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages])
    for storage, place, is_away in zip(storages, places, are_away, strict=True):
        if is_away:
            copies.add(storage, place)
            storage.resize_(0)
    assert bool(copies) == any(are_away)
    for tensor, value, is_away in zip(tensors, want, are_away, strict=True):
        found = copies.at(tensor)
        assert (found is not tensor) == is_away
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(found, value)
    for tensor, storage, place, is_away in zip(tensors, storages, places, are_away, strict=True):
        if is_away:
            storage.resize_(place.nbytes)
            copies.remove(storage)
        assert copies.at(tensor) is tensor
