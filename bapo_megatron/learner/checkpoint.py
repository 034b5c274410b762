"""Saving and loading the learner: the folder of `folder.py`, from and to the parts of a layout.

Everything goes through global rank 0, one tensor at a time, so any tensor, pipeline and data sizes can read it back.
That is simple and exact, at the price of a single writer: megatron's dist_checkpointing writes from all ranks at once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.hf.writer import copy_companions, write_safetensors
from bapo_megatron.learner.adam import WEIGHT
from bapo_megatron.learner.folder import MOMENTS, WEIGHTS, read_state, write_state
from bapo_megatron.learner.hf.convert import gather_weights, load_weights

if TYPE_CHECKING:
    from bapo_megatron.learner.critic import Critic
    from bapo_megatron.learner.megatron import MegatronLearner

    Trained: TypeAlias = MegatronLearner | Critic

PARTS = {WEIGHTS: WEIGHT, **{name: name for name in MOMENTS}}  # folder -> its name in AdamState


def save(learner: Trained, folder: Path) -> None:
    """Write into `folder`, which exists and is empty. Collective; returns when rank 0 has written everything."""
    is_writer = learner.layout.rank == 0
    for part, name in PARTS.items():
        named = gather_weights(learner.model, learner.shape, learner.layout, partial(learner.adam.gather, name=name))
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


def load(learner: Trained, folder: Path) -> None:
    """Read weights, Adam's moments and the version back, at any layout.

    Raises:
        CheckpointError: a part is missing or torn, or the checkpoint is of another model.
    """
    state = read_state(folder, learner.shape)
    for part, name in PARTS.items():
        fill = partial(_fill, learner, name)
        if part == WEIGHTS or state["version"] > 0 or (folder / part).exists():
            load_weights(learner.model, learner.shape, learner.layout, folder / part, fill)
        else:
            for parameter in learner.model.parameters():
                fill(parameter, torch.zeros_like(parameter))
    learner.version, learner.num_skipped_updates = state["version"], state["skipped_updates"]
    learner.adam.set_steps(learner.version - learner.num_skipped_updates)


def _fill(learner: Trained, name: str, parameter: Parameter, tensor: Tensor) -> None:
    learner.adam.fill(parameter, name, tensor)
