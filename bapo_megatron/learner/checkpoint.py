"""The learner's checkpoint: independent of the layout, free of pickle, and servable.

    <folder>/state.json      version, skipped updates, the model's shape
    <folder>/hf/             an ordinary Hugging Face checkpoint: weights, config.json, tokenizer
    <folder>/exp_avg/        Adam's first moment, under the names and in the shapes of the weights
    <folder>/exp_avg_sq/     Adam's second moment

Everything goes through global rank 0, one tensor at a time, so any tensor, pipeline and data sizes can read it back.
That is simple and exact, at the price of a single writer: megatron's dist_checkpointing writes from all ranks at once.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.adam import MOMENTS, WEIGHT
from bapo_megatron.learner.hf.convert import gather_weights, load_weights
from bapo_megatron.learner.hf.writer import write_safetensors

if TYPE_CHECKING:
    from bapo_megatron.learner.megatron import MegatronLearner

FORMAT = 1
STATE = "state.json"
WEIGHTS = "hf"
PARTS = {WEIGHTS: WEIGHT, **{name: name for name in MOMENTS}}  # folder -> its name in AdamState
_COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model")  # config and tokenizer, not weights


def save(learner: MegatronLearner, folder: Path) -> None:
    """Write into `folder`, which exists and is empty. Collective; returns when rank 0 has written everything."""
    is_writer = learner.layout.rank == 0
    for part, name in PARTS.items():
        named = gather_weights(learner.model, learner.shape, learner.layout, partial(learner.adam.gather, name=name))
        if is_writer:
            (folder / part).mkdir()
            write_safetensors(named, folder / part)
        else:
            for _ in named:  # takes part in the collectives
                pass
    if is_writer:
        for file in learner.hf_path.iterdir():
            if file.suffix in _COPIED_SUFFIXES and "safetensors" not in file.name:
                shutil.copy(file, folder / WEIGHTS / file.name)
        state = {
            "format": FORMAT,
            "version": learner.version,
            "skipped_updates": learner.num_skipped_updates,
            "model": dataclasses.asdict(learner.shape),
        }
        (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    dist.barrier()


def load(learner: MegatronLearner, folder: Path) -> None:
    """Read weights, Adam's moments and the version back, at any layout.

    Raises:
        CheckpointError: a part is missing or torn, or the checkpoint is of another model.
    """
    state = _read_state(folder)
    mine = dataclasses.asdict(learner.shape)
    if different := [
        f"{key} is {state['model'].get(key)}, not {mine[key]}" for key in mine if state["model"].get(key) != mine[key]
    ]:
        raise CheckpointError(f"{folder} holds another model than model.path: {', '.join(different)}")
    for part, name in PARTS.items():

        def fill(parameter: Parameter, tensor: Tensor, name: str = name) -> None:
            learner.adam.fill(parameter, name, tensor)

        load_weights(learner.model, learner.shape, learner.layout, folder / part, fill)
    learner.version, learner.num_skipped_updates = state["version"], state["skipped_updates"]
    learner.adam.set_steps(learner.version - learner.num_skipped_updates)


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a learner checkpoint: {file} is missing") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is torn: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {state.get('format')}, this version reads format {FORMAT}")
    return state
