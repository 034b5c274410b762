"""What Adam keeps of each parameter, whole on every rank or split over data ranks (`optimizer.distributed`).

Megatron's DistributedOptimizer lays all gradients of a rank in one buffer and gives each data x context rank a slice,
without regard for the borders of parameters: a rank owns a range of some parameters, and nothing of others.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.learner.folder import MOMENTS
from bapo_megatron.learner.parallel import ParallelLayout

WEIGHT = "weight"  # the float32 weight that Adam updates: the parameter itself, or its master copy when it is bfloat16


class AdamState:
    """Reads and writes whole tensors, in the shape of the parameter, whoever holds which part.

    Args:
        optimizer: what `get_megatron_optimizer` returned for a dense model: a chain of one.
    """

    def __init__(self, optimizer: MegatronOptimizer, layout: ParallelLayout) -> None:
        assert isinstance(optimizer, ChainedOptimizer)
        (self._optimizer,) = optimizer.chained_optimizers
        self._is_split = isinstance(self._optimizer, DistributedOptimizer)
        self._group = layout.data_context_group

    def gather(self, parameter: Parameter, name: str) -> Tensor:
        """The parameter's tensor `name` (WEIGHT or one of MOMENTS), float32; collective over data ranks if split."""
        return self._whole(parameter, self._part(parameter, name))

    def gather_gradient(self, parameter: Parameter) -> Tensor:
        """The last update's gradient, float32; collective over data ranks if split."""
        gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if not self._is_split:
            return gradient
        return self._whole(parameter, gradient.view(-1)[self._range(parameter)] if self._owns(parameter) else None)

    def fill(self, parameter: Parameter, name: str, tensor: Tensor) -> None:
        """Overwrite this rank's part of what `gather` reads, and of WEIGHT the parameter as a whole."""
        if name == WEIGHT:
            parameter.copy_(tensor)
        part = self._part(parameter, name)
        if part is not None:
            part.copy_(tensor.reshape(-1)[self._range(parameter)] if self._is_split else tensor)

    def set_steps(self, num_applied: int) -> None:
        """The number of updates behind the moments, for Adam's bias correction."""
        adam = self._optimizer.optimizer
        for group in adam.param_groups:
            for weight in group["params"]:
                self._state(weight)["step"] = torch.tensor(float(num_applied))
            group["step"] = num_applied  # where fused Adam of Transformer Engine or Apex counts, from its first step on

    def _owns(self, parameter: Parameter) -> bool:
        return not self._is_split or parameter in self._optimizer.model_param_group_index_map

    def _range(self, parameter: Parameter) -> slice:
        """Which values of the flattened parameter are this rank's, if any are."""
        owned = self._optimizer._get_model_param_range_map(parameter)["param"]
        return slice(owned.start, owned.end)

    def _part(self, parameter: Parameter, name: str) -> Tensor | None:
        """This rank's part, flat if split; None where it has none."""
        if not self._owns(parameter):
            return None
        weight = self._weight(parameter)
        return weight.detach() if name == WEIGHT else self._state(weight)[name]

    def _weight(self, parameter: Parameter) -> Tensor:
        if not self._is_split:
            return getattr(parameter, "main_param", parameter)
        group, index = self._optimizer.model_param_group_index_map[parameter]
        return self._optimizer.optimizer.param_groups[group]["params"][index]

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        """Adam's state of one weight; made here where there was no update yet, as Adam would at its first."""
        state = self._optimizer.optimizer.state[weight]
        if not state:
            state.update({"step": torch.tensor(0.0)} | {name: torch.zeros_like(weight).detach() for name in MOMENTS})
        return state

    def _whole(self, parameter: Parameter, part: Tensor | None) -> Tensor:
        if not self._is_split:
            assert part is not None
            return part
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            whole[self._range(parameter)] = part
        dist.all_reduce(whole, group=self._group)  # every value has one owner: x + 0 + ... is exact
        return whole.view(parameter.shape)
