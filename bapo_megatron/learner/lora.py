"""LoRA on Megatron's linear layers: y + alpha / rank * B (A x). hf/adapters.py names the parameters.

    adapted(linear)       the classes of a layer's linears (policy.py)
    InitialAdapters       reads A and B as the run begins (split_model.py)
    MergedWeights         weights for engines, W + alpha / rank * B A, shard by shard (weight_source.py)
    reference_adapters    lets the model compute as it began, for the KL term

Shape legend: T tokens of this rank, H width of the input, R ranks of all adapters of a linear, O outputs of this rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from bapo_megatron.hf.adapters import Adapters
from bapo_megatron.learner.parallel import device


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a linear layer, which may stand for several of the checkpoint's, such as q, k and v."""

    outputs: dict[str, int]  # by the checkpoint's layer, in the order of the linear's rows
    num_inputs: int
    num_groups: int = 1  # the rows are interleaved: each group has an even part of every layer
    is_row: bool = False  # ranks split the inputs, not the outputs


class Adapter(Module):
    """The adapters of a linear layer."""

    def __init__(self, adapters: Adapters, config: TransformerConfig, part: Part) -> None:
        super().__init__()
        self.part, self.scale, self.sequence_parallel = part, adapters.scale, config.sequence_parallel
        self.is_reference = False  # compute as the run began
        self.initial: dict[str, tuple[Tensor, Tensor]] = {}  # A and B as the run began; empty if B was zero
        names = [name for name in part.outputs if name in adapters.targets]
        kind = {"dtype": config.params_dtype, "device": _device(config)}
        self.A = ParameterDict({name: torch.zeros(adapters.rank, part.num_inputs, **kind) for name in names})
        self.B = ParameterDict({name: torch.zeros(part.outputs[name], adapters.rank, **kind) for name in names})
        for split in (self.A if part.is_row else self.B).values():
            set_tensor_model_parallel_attributes(split, is_parallel=True, dim=1 if part.is_row else 0, stride=1)
        if part.is_row and config.sequence_parallel:
            for copy in self.B.values():
                copy.sequence_parallel = True  # it sees a part of the tokens: Megatron sums its gradient

    def forward(self, x_TH: Tensor, y_TO: Tensor) -> Tensor:
        """Return the linear's output, [T, 1, O], with the adapters' added to it."""
        if (matrices := self._matrices()) is None:
            return y_TO
        a_RH, b_RO = matrices
        if self.part.is_row:
            reduce = reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                reduce = reduce_scatter_to_sequence_parallel_region
            inner_TR = reduce(F.linear(x_TH, a_RH))
        else:
            if self.sequence_parallel:  # the gradient is whole on every rank, so that the backward pass only splits it
                x_TH = gather_from_sequence_parallel_region(x_TH, tensor_parallel_output_grad=False)
            inner_TR = copy_to_tensor_model_parallel_region(F.linear(x_TH, a_RH))
        added = torch.addmm(y_TO.flatten(0, -2), inner_TR.flatten(0, -2), b_RO, alpha=self.scale)
        return added.view(y_TO.shape)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return alpha / rank * B A for this rank's shard of the linear's weight, [O, H], float32."""
        matrices = self._matrices()
        assert matrices is not None, "of the policy, not of its reference"
        a_RH, b_RO = matrices
        return self.scale * (b_RO.float().T @ a_RH.float())

    def keep_initial(self) -> None:
        """Remember A and B as they are, for `reference_adapters`."""
        self.initial = {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self._current().items()}

    def _current(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B by the checkpoint's layers, in the order of the linear's rows (a ParameterDict sorts)."""
        return {name: (self.A[name], self.B[name]) for name in self.part.outputs if name in self.A}

    def _matrices(self) -> tuple[Tensor, Tensor] | None:
        """Return A and B of all the checkpoint's layers as one matrix each: R is the sum of their ranks.

        Each layer's outputs come from its own rows of A, so B is zero elsewhere. Its columns have the order of the
        linear's rows. Example: q, k, v of 4, 2, 2 outputs in 2 groups are [q0 q1 k0 v0 q2 q3 k1 v1].
        """
        matrices = self.initial if self.is_reference else self._current()
        if not matrices:
            return None
        a_RH = torch.cat([a for a, _ in matrices.values()])
        columns, start, rank = [], 0, len(a_RH) // len(matrices)
        for name, num in self.part.outputs.items():
            if name in matrices:
                of_layer_RO = F.pad(matrices[name][1].T, (0, 0, start, len(a_RH) - start - rank))
                start += rank
            else:
                of_layer_RO = a_RH.new_zeros(len(a_RH), num)
            columns.append(of_layer_RO.unflatten(-1, (self.part.num_groups, -1)))
        return a_RH, torch.cat(columns, -1).flatten(-2)


def adapted(linear: type, adapters: Adapters, part: Part) -> type:
    """Return a class of linears with adapters."""

    class Adapted(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.adapter = Adapter(adapters, self.config, part)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            y, bias = super().forward(x, *args, **kwargs)
            return self.adapter(x, y), bias

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{linear.__name__}"
    return Adapted


def _device(config: TransformerConfig) -> str | int:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class InitialAdapters:
    """A reader of A and B as a run begins: A is uniform within 1 / sqrt(inputs), as in PEFT, and B is zero.

    Each A is drawn whole, from a seed of its own, so that its values do not depend on the layout.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._sizes, self._seed = sizes, seed

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a slice of a tensor, float32."""
        rows, columns = self._sizes[name]
        if name.endswith("lora_B.weight"):
            return torch.zeros(rows, columns)[index]
        draw = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode()) >> 1)
        limit = 1 / math.sqrt(columns)
        return torch.empty(rows, columns).uniform_(-limit, limit, generator=draw)[index]


def adapters_of(model: Module) -> list[Adapter]:
    return [module for module in model.modules() if isinstance(module, Adapter)]


@contextmanager
def reference_adapters(model: Module) -> Iterator[None]:
    """Let a model compute as its run began, within the block."""
    adapters = adapters_of(model)
    for adapter in adapters:
        adapter.is_reference = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_reference = False


class MergedWeights:
    """Reads a linear's weight as W + alpha / rank * B A, in the weight's type; other parameters as they are.

    Counts the values that differ from W, because rounding may leave them as they were.
    """

    def __init__(self, model: Module) -> None:
        owners = [module for module in model.modules() if isinstance(getattr(module, "adapter", None), Adapter)]
        self._changed: list[Tensor] = []
        self._num_values = 0
        self._adapters: dict[Any, Any] = {owner.weight: owner.adapter for owner in owners}

    def __call__(self, parameter: Parameter) -> Tensor:
        adapter = self._adapters.get(parameter)
        if adapter is None:
            return parameter.detach()
        merged = (parameter.detach().float() + adapter.delta()).to(parameter.dtype)
        self._changed.append((merged != parameter).sum())
        self._num_values += merged.numel()
        return merged

    def changed_share(self) -> float:
        """Return the share of the values read so far, on all ranks, that the adapters have changed. Collective."""
        changed = sum(self._changed, torch.zeros((), dtype=torch.int64, device=device()))
        counts = torch.stack((changed, changed.new_tensor(self._num_values)))
        dist.all_reduce(counts)
        num_changed, num_values = counts.tolist()
        return num_changed / max(1, num_values)
