"""A rank's models between its device and the machine's memory, for `rollout.placement = "turns"`.

    on the device in        training   pushing   sampling
    the policy's weights       yes       yes        no
    everything else            yes       no         no      gradients, Adam's state, critic, reference, teachers

Whole storages move. An empty storage (`resize_(0)`) keeps its tensors and their views, such as `main_grad` and the
shards of the distributed optimizer, so that nobody who holds one notices. Gradients are dropped, because an update
begins with zeros. What is never trained is copied once.

A snapshot reads the copies (host_copies.py). They do not change before the next `keep`, so training may continue while
the snapshot is written.
"""

import ctypes
import gc
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.lora import adapters_of
from bapo_megatron.learner.split_model import SplitModel, TrainedModel
from bapo_megatron.sync.turns import Part

_LIBC = ctypes.CDLL(None)


@dataclass(slots=True, eq=False)
class _Group:
    """Storages that move together."""

    part: Part
    tensors: Callable[[], Iterator[Tensor]]  # asked again each time: Adam makes its state in the first update
    how: Literal["copy", "copy once", "drop"]
    copies: HostCopies
    buffer: HostBuffer = field(default_factory=HostBuffer)
    away: list[tuple[UntypedStorage, int, Tensor | None]] | None = None  # with bytes and copy; None means on the device
    once: list[Tensor] | None = None  # the copies of "copy once"

    def leave(self) -> None:
        """Free the device's memory."""
        # Adam's step counts stay: no snapshot reads them
        found = {s._cdata: s for t in self.tensors() if t.dim() > 0 for s in [t.untyped_storage()]}
        storages = list(found.values())
        places: Collection[Tensor | None] = [None] * len(storages)
        if self.how != "drop":
            places = self.once or self.buffer.copy([_bytes_of(storage) for storage in storages])
            self.buffer.wait()
            self.once = list(places) if self.how == "copy once" else None
        self.away = [(s, s.nbytes(), place) for s, place in zip(storages, places, strict=True)]
        for storage, _, place in self.away:
            storage.resize_(0)
            if place is not None:
                self.copies.add(storage, place)

    def come_back(self) -> None:
        """Allocate the device's memory, and fill it with the copies."""
        assert self.away is not None
        for storage, num_bytes, place in self.away:
            storage.resize_(num_bytes)
            if place is not None:
                _bytes_of(storage).copy_(place, non_blocking=True)
                self.copies.remove(storage)
        self.away = None


class Offload:
    """The models of one rank. Implements `sync.turns.TrainerMemory`."""

    def __init__(self, policy: TrainedModel, critic: TrainedModel | None, *frozen: object) -> None:
        """Move reference and teachers too, the `frozen` models, unless the policy itself is the reference."""
        own = policy.copies
        groups = [
            _Group("weights", lambda: _parameters(policy, trained=True), "copy", own),
            _Group("weights", lambda: _parameters(policy, trained=False), "copy once", own),
            _Group("rest", lambda: _initial_adapters(policy), "copy once", own),
            *_training_state(policy),
        ]
        if critic is not None:
            groups += [
                _Group("rest", lambda: _parameters(critic, trained=True), "copy", critic.copies),
                *_training_state(critic),
            ]
        for one in frozen:
            if isinstance(one, SplitModel):
                held = partial(_parameters, one, trained=False)
                groups.append(_Group("rest", held, "copy once", HostCopies()))
        self._groups = groups
        trained = [model for model in (policy, critic) if model is not None]
        for model in trained:
            # Moments exist from now on: a snapshot before the first update would make them on the device
            model.adam.set_steps(model.version - model.num_skipped_updates)
        self._modules: list[Module] = [model.model for model in trained]

    def keep(self, parts: Set[Part]) -> None:
        """Free the device's memory of all other parts."""
        leaving = [group for group in self._groups if group.part not in parts and group.away is None]
        for group in leaving:
            group.leave()
        if leaving:
            self._free_caches()

    def take(self, parts: Set[Part]) -> None:
        """Bring parts back to the device."""
        coming = [group for group in self._groups if group.part in parts and group.away is not None]
        for group in coming:
            group.come_back()
        if coming and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _free_caches(self) -> None:
        """Give memory that nobody uses back to the system."""
        for module in (one for model in self._modules for one in model.modules()):
            if (workspaces := getattr(module, "_fp8_workspaces", None)) is not None:
                workspaces.clear()  # Transformer Engine makes FP8 copies of weights again
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        else:
            _LIBC.malloc_trim(0)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parameters(model: SplitModel, *, trained: bool) -> Iterator[Tensor]:
    """Yield the parameters that are trained, or those that are not."""
    return (parameter for parameter in model.model.parameters() if parameter.requires_grad == trained)


def _initial_adapters(model: TrainedModel) -> Iterator[Tensor]:
    for adapter in adapters_of(model.model):
        for matrices in adapter.initial.values():
            yield from matrices


def _training_state(model: TrainedModel) -> list[_Group]:
    """Return gradients and Adam's state."""

    def gradients() -> Iterator[Tensor]:
        for chunk in model.wrapped:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def adam() -> Iterator[Tensor]:
        """Yield moments and float32 weights, except the parameters of a float32 model and their shards."""
        own = {parameter.untyped_storage()._cdata for parameter in model.model.parameters()}
        for one in model.optimizer.chained_optimizers:
            tensors = [weight for group in one.optimizer.param_groups for weight in group["params"]]
            tensors += [value for state in one.optimizer.state.values() for value in state.values()]
            yield from (t for t in tensors if torch.is_tensor(t) and t.untyped_storage()._cdata not in own)

    return [_Group("rest", gradients, "drop", model.copies), _Group("rest", adam, "copy", model.copies)]
