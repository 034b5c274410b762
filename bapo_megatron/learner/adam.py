"""Adam's state of each parameter, whole on every rank or split over data ranks (`optimizer.distributed`).

Megatron's DistributedOptimizer lays all gradients of a rank in one buffer and gives each data x context rank a slice,
regardless of the borders of parameters: a rank owns a range of some parameters, and nothing of others.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT
from bapo_megatron.hf.splits import Axis
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.parallel import ParallelLayout


class AdamState:
    """Access to one optimizer's tensors in the shape of the parameter, wherever their parts live.

    WEIGHT is the float32 weight that Adam updates: the parameter itself, or its master copy when it is bfloat16.

    Args:
        optimizer: one optimizer of Megatron's chain.
        group: the ranks that hold the same parameters; the optimizer may be split over them.
        copies: read where a tensor's storage is empty.
    """

    def __init__(self, optimizer: MegatronOptimizer, group: dist.ProcessGroup, copies: HostCopies) -> None:
        self._optimizer = optimizer
        self._is_split = isinstance(self._optimizer, DistributedOptimizer)
        if isinstance(self._optimizer.optimizer, torch.optim.Adam):  # not Transformer Engine's, nor Apex's
            for options in self._optimizer.optimizer.param_groups:
                options["fused"] = True  # one pass over weights, gradients and moments instead of ten
        self._group = group
        self._copies = copies

    def gather(self, parameter: Parameter, name: str) -> Tensor:
        """Return the tensor `name` (WEIGHT or one of MOMENTS), float32; collective over data ranks if split."""
        return self._whole(parameter, self.part(parameter, name))

    def writers(self, parameters: Sequence[Parameter]) -> list[tuple[bool, bool]]:
        """Return for each parameter whether this rank writes it, and whether it must be gathered first.

        Replicated parameters are dealt out so that all ranks write about the same amount. The rank that owns most of a
        split parameter writes it: nearly all lie within one rank's range, and only those across a border must be
        gathered. Collective over data ranks; all pass the same parameters in the same order.
        """
        num_ranks = self._group.size()
        if not self._is_split:
            loads = [0] * num_ranks
            chosen = {}
            for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
                chosen[i] = loads.index(min(loads))
                loads[chosen[i]] += parameters[i].numel()
            return [(chosen[i] == self._group.rank(), False) for i in range(len(parameters))]
        owned = [len(range(p.numel())[self._range(p)]) if self._owns(p) else 0 for p in parameters]
        mine = torch.tensor(owned, dtype=torch.int64, device=parameters[0].device)
        of_all = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(of_all, mine, group=self._group)
        most, writer = torch.stack(of_all).max(dim=0)
        mine_of = (writer == self._group.rank()).tolist()
        return [(is_mine, n < p.numel()) for is_mine, n, p in zip(mine_of, most.tolist(), parameters, strict=True)]

    def local(self, parameter: Parameter, name: str) -> Tensor:
        """Return the tensor of `gather` for a parameter that this rank owns as a whole. Not collective, no copy."""
        part = self.part(parameter, name)
        assert part is not None
        assert part.numel() == parameter.numel()
        return part.view(parameter.shape)

    def part(self, parameter: Parameter, name: str) -> Tensor | None:
        """Return this rank's part of the tensor of `gather`, flat if split; None if it has none."""
        if not self._owns(parameter):
            return None
        weight = self._weight(parameter)
        return self._copies.at(weight.detach() if name == WEIGHT else self._state(weight)[name])

    def gather_gradient(self, parameter: Parameter) -> Tensor:
        """Return the last update's gradient, float32; collective over data ranks if split."""
        gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if not self._is_split:
            return gradient
        return self._whole(parameter, gradient.view(-1)[self._range(parameter)] if self._owns(parameter) else None)

    def fill(self, name: str, parameter: Parameter, tensor: Tensor) -> None:
        """Overwrite this rank's part of a tensor that `gather` reads; for WEIGHT also the whole parameter."""
        if name == WEIGHT:
            parameter.copy_(tensor.to(parameter.dtype))  # after an update, FP8 parameters are made from bfloat16 too
        part = self.part(parameter, name)
        if part is not None:
            part.copy_(tensor.reshape(-1)[self._range(parameter)] if self._is_split else tensor)

    def set_steps(self, num_applied: int) -> None:
        """Set the number of updates behind the moments, for Adam's bias correction."""
        adam = self._optimizer.optimizer
        for group in adam.param_groups:
            for weight in group["params"]:
                self._state(weight)["step"] = torch.tensor(float(num_applied), device=weight.device)
            group["step"] = num_applied  # the fused Adam of Transformer Engine or Apex counts here after its first step

    def _owns(self, parameter: Parameter) -> bool:
        return not self._is_split or parameter in self._optimizer.model_param_group_index_map

    def _range(self, parameter: Parameter) -> slice:
        """Return this rank's range of the flattened parameter."""
        owned = self._optimizer._get_model_param_range_map(parameter)["param"]
        return slice(owned.start, owned.end)

    def _weight(self, parameter: Parameter) -> Tensor:
        if not self._is_split:
            return getattr(parameter, "main_param", parameter)
        group, index = self._optimizer.model_param_group_index_map[parameter]
        return self._optimizer.optimizer.param_groups[group]["params"][index]

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return Adam's state of one weight; before the first update, create it as Adam would."""
        state = self._optimizer.optimizer.state[weight]
        if not state:
            step = torch.tensor(0.0, device=weight.device)  # the fused kernel reads it there
            state.update({"step": step} | {name: torch.zeros_like(weight).detach() for name in MOMENTS})
        return state

    def _whole(self, parameter: Parameter, part: Tensor | None) -> Tensor:
        if not self._is_split:
            assert part is not None
            return part
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._copies.device(parameter))
        if part is not None:
            whole[self._range(parameter)] = part
        dist.all_reduce(whole, group=self._group)  # every value has one owner: x + 0 + ... is exact
        return whole.view(parameter.shape)


class ChainedAdam:
    """Adam's state of every parameter: one state for each optimizer of Megatron's chain.

    Experts that are spread over ranks have their own optimizer, because their copies are on other ranks.

    Args:
        chain: from `get_megatron_optimizer`.
        copies: see `AdamState`.
    """

    def __init__(self, chain: MegatronOptimizer, layout: ParallelLayout, copies: HostCopies) -> None:
        assert isinstance(chain, ChainedOptimizer)
        self._states: dict[Axis, AdamState] = {}
        for optimizer in chain.chained_optimizers:
            groups = optimizer.optimizer.param_groups
            axis: Axis = "expert" if any(group.get("is_expert_parallel") for group in groups) else "dense"
            assert axis not in self._states, f"two optimizers have {axis} parameters"
            self._states[axis] = AdamState(optimizer, layout.axes[axis].copies, copies)

    def _of(self, parameter: Parameter) -> AdamState:
        return self._states[_axis(parameter)]

    def gather(self, parameter: Parameter, name: str) -> Tensor:
        """See `AdamState.gather`."""
        return self._of(parameter).gather(parameter, name)

    def local(self, parameter: Parameter, name: str) -> Tensor:
        """See `AdamState.local`."""
        return self._of(parameter).local(parameter, name)

    def part(self, parameter: Parameter, name: str) -> Tensor | None:
        """See `AdamState.part`."""
        return self._of(parameter).part(parameter, name)

    def gather_gradient(self, parameter: Parameter) -> Tensor:
        """See `AdamState.gather_gradient`."""
        return self._of(parameter).gather_gradient(parameter)

    def fill(self, name: str, parameter: Parameter, tensor: Tensor) -> None:
        """See `AdamState.fill`."""
        self._of(parameter).fill(name, parameter, tensor)

    def writers(self, parameters: Sequence[Parameter]) -> list[tuple[bool, bool]]:
        """See `AdamState.writers`; the parameters may belong to any optimizer."""
        found: dict[Parameter, tuple[bool, bool]] = {}
        for axis, state in self._states.items():
            own = [parameter for parameter in parameters if _axis(parameter) == axis]
            found |= zip(own, state.writers(own), strict=True)
        return [found[parameter] for parameter in parameters]

    def set_steps(self, num_applied: int) -> None:
        """See `AdamState.set_steps`."""
        for state in self._states.values():
            state.set_steps(num_applied)


def _axis(parameter: Parameter) -> Axis:
    """Return the axis of a parameter, by the mark that makes Megatron choose its optimizer."""
    return "dense" if getattr(parameter, "allreduce", True) else "expert"
