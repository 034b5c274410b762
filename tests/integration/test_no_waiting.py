"""The CPU queues a whole update without reading from the GPU in between: no micro-batch waits for it."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_megatron.algorithms.mismatch import logprob_mismatch
from bapo_megatron.learner import packs, schedule
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import MicroBatch
from tests.distributed import run_distributed
from tests.integration.learner_reference import BOUNDS, HYBRID, save_random_model
from tests.integration.learner_updates import make_config, pack

aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default,  # item(), tolist(), bool(), float(), int()
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
}


COPYING = {Tensor.tolist, Tensor.cpu, Tensor.numpy}  # on a CPU tensor, these are not dispatched as operations


# torch.tensor(numbers, device=...) waits too; its copy to a GPU with non_blocking=True does not


class Copies(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPYING or (func is torch.tensor and (kwargs or {}).get("device") is not None):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """A collector of operations whose result, or its shape, the CPU has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copies = Copies(self.found)

    def __enter__(self) -> "Reads":
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.copies.__exit__(*error)

    @contextmanager
    def paused(self):
        known = len(self.found)
        yield
        del self.found[known:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if func in READING or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_instrument_sees_what_it_should() -> None:
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    for read in (lambda: x[0].item(), lambda: x.tolist(), lambda: bool(x[1]), lambda: x[mask], lambda: mask.nonzero()):
        with Reads() as reads:
            read()
        assert reads.found
    with Reads() as reads:
        torch.where(mask, x, 0.0).sum()
    assert not reads.found


@contextmanager
def watching(reads: Reads, *apart: tuple[Any, str]) -> Iterator[None]:
    """Watch the passes of learners that are built inside, except the functions `apart`, each an owner and a name."""
    choose = schedule.get_forward_backward_func

    def unwatched(function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with reads.paused():
                return function(*args, **kwargs)

        return run

    def choose_watched() -> Callable:
        run = choose()

        def watched(*args: Any, **kwargs: Any) -> Any:
            with reads:
                return run(*args, **kwargs)

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in apart:
            patch.setattr(owner, name, unwatched(getattr(owner, name)))
        patch.setattr(schedule, "get_forward_backward_func", choose_watched)
        yield


DESCRIBING = (
    (packs.PackedSequences, "of"),
    (packs.Sequences, "of"),
    (packs, "make_chunks"),
)


def check(rank: int, world_size: int, root: Path) -> None:
    """Watch passes and losses of an update, except descriptions of packs, which are made of CPU tensors (below)."""
    cases = (("qwen3", {}), ("qwen3", {"schedule": "forwards_first"}), ("qwen3", {"recompute": True}), (HYBRID, {}))
    for family, train in cases:
        config, reads = make_config(train=train, monitor={"token_profile": True}), Reads()
        with watching(reads, *DESCRIBING):
            learner = MegatronLearner(resolve(config, root / family))
            minibatch = pack(learner)
            learner.score(minibatch)
            learner.step(minibatch, BOUNDS)
        assert not reads.found, reads.found
        parallel_state.destroy_model_parallel()


def test_no_micro_batch_reads_from_the_device(tmp_path: Path) -> None:
    for family in ("qwen3", HYBRID):
        save_random_model(family, tmp_path / family)
    run_distributed(check, 1, tmp_path)


META = torch.device("meta")  # a tensor there has no values, so reading one is an error


@pytest.mark.parametrize("context", [(0, 1), (1, 2)])
def test_packs_are_described_on_the_cpu(context: tuple[int, int]) -> None:
    cu_seqlens_S1 = torch.tensor([0, 8, 20, 36], dtype=torch.int32)
    for block in packs.make_blocks(cu_seqlens_S1, *context, META):
        tensors = [block.visible_S1QL, *(x for r in (block.queries, block.keys) for x in (r.packed_B, r.padded_B))]
        assert {x.device for x in tensors if x is not None} <= {META}
    pack = packs.PackedSequences.for_transformer_engine(cu_seqlens_S1, device=META)
    assert pack.max_seqlen_q == pack.max_seqlen_kv == 16
    assert pack.cu_seqlens_q.device == META
    sequences = packs.Sequences.of(cu_seqlens_S1, 3, META)
    assert sequences.cu_seqlens_S1.tolist() == [0, 8, 20, 36]
    assert sequences.on_device_S1.device == sequences.gapped_T.device == META


def test_a_micro_batch_leaves_its_lengths_on_the_cpu() -> None:
    names = {f.name for f in dataclasses.fields(MicroBatch)} - {"extra"}
    stream = TokenStream("routes", "uint8", (2,))
    batch = MicroBatch(**{name: torch.zeros(3) for name in names}, extra={stream: torch.zeros(3, 2)})
    moved = batch.to(META)
    devices = {name: getattr(moved, name).device.type for name in names} | {"extra": moved.extra[stream].device.type}
    assert devices.pop("cu_seqlens_S1") == devices.pop("follows_S") == "cpu"
    assert set(devices.values()) == {"meta"}


def test_mismatch_does_not_count_its_tokens_on_the_cpu() -> None:
    x_R = torch.zeros(5, device=META)
    assert logprob_mismatch(x_R, x_R, x_R.bool()).sums.device == META
