"""Saving and loading the learner: the folder of `folder.py`, from and to the parts of a layout.

Everything goes through global rank 0, one tensor at a time, so any tensor, pipeline and data sizes can read it back.
That is simple and exact, at the price of a single writer: megatron's dist_checkpointing writes from all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.hf.writer import copy_companions, write_safetensors
from bapo_megatron.learner.folder import MOMENTS, WEIGHTS, read_state, write_state
from bapo_megatron.learner.hf.convert import gather_weights, load_weights

if TYPE_CHECKING:
    from bapo_megatron.learner.megatron import MegatronLearner


def save(learner: MegatronLearner, folder: Path) -> None:
    """Write into `folder`, which exists and is empty. Collective; returns when rank 0 has written everything."""
    is_writer = learner.layout.rank == 0
    for part, tensor_of in _parts(learner).items():
        named = gather_weights(learner.model, learner.shape, learner.layout, tensor_of)
        if is_writer:
            (folder / part).mkdir()
            dtypes = write_safetensors(named, folder / part)
            if part == WEIGHTS:
                copy_companions(learner.hf_path, folder / WEIGHTS, dtypes)
        else:
            for _ in named:  # takes part in the collectives
                pass
    if is_writer:
        write_state(folder, learner.shape, version=learner.version, skipped_updates=learner.num_skipped_updates)
    dist.barrier()


def load(learner: MegatronLearner, folder: Path) -> None:
    """Read weights, Adam's moments and the version back, at any layout.

    Raises:
        CheckpointError: a part is missing or torn, or the checkpoint is of another model.
    """
    state = read_state(folder, learner.shape)
    for part, tensor_of in _parts(learner).items():
        if part == WEIGHTS or state["version"] > 0 or (folder / part).exists():
            load_weights(learner.model, learner.shape, learner.layout, folder / part, tensor_of)
        else:
            for parameter in learner.model.parameters():
                tensor_of(parameter).zero_()
    learner.version, learner.num_skipped_updates = state["version"], state["skipped_updates"]
    _after_load(learner)


def _parts(learner: MegatronLearner) -> dict[str, Callable[[Parameter], Tensor]]:
    """What is saved of each parameter, by the folder it goes to."""

    def moment(name: str) -> Callable[[Parameter], Tensor]:
        return lambda parameter: _adam_state(learner.optimizer.optimizer, _main(parameter))[name]

    return {WEIGHTS: lambda parameter: _main(parameter).detach(), **{name: moment(name) for name in MOMENTS}}


def _main(parameter: Parameter) -> Tensor:
    """The float32 weight that Adam updates: the parameter itself, or its master copy when it is bfloat16."""
    return getattr(parameter, "main_param", parameter)


def _adam_state(adam: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Adam's state of one weight; made here where there was no update yet, as Adam would at its first."""
    state = adam.state[weight]
    if not state:
        state.update({"step": torch.tensor(0.0)} | {name: torch.zeros_like(weight) for name in MOMENTS})
    return state


def _after_load(learner: MegatronLearner) -> None:
    """Adam's step counter, for its bias correction, and the bfloat16 weights under a float32 master copy."""
    num_applied = learner.version - learner.num_skipped_updates
    adam = learner.optimizer.optimizer
    for group in adam.param_groups:
        for weight in group["params"]:
            adam.state[weight]["step"] = torch.tensor(float(num_applied))
        if "step" in group:  # fused Adam of Transformer Engine or Apex counts per group
            group["step"] = num_applied
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.copy_(_main(parameter))
