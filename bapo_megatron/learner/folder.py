"""The learner's part of a checkpoint, as files: independent of the layout, free of pickle, and servable.

    <folder>/state.json      version, skipped updates, the model's shape
    <folder>/hf/             an ordinary Hugging Face checkpoint: weights, config.json, tokenizer
    <folder>/exp_avg/        Adam's first moment, under the names and in the shapes of the weights
    <folder>/exp_avg_sq/     Adam's second moment

A checkpoint at version 0 may lack the moments, which are zero then. Imports no Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.hf.writer import write_durably

FORMAT = 1
STATE = "state.json"
WEIGHTS = "hf"
MOMENTS = ("exp_avg", "exp_avg_sq")


def write_state(folder: Path, shape: ModelShape, *, version: int, skipped_updates: int) -> None:
    """The file that makes a folder a learner checkpoint: to be written last.

    Raises:
        CheckpointError: the disk is full.
    """
    state = {"format": FORMAT, "version": version, "skipped_updates": skipped_updates, "model": shape.to_json()}
    write_durably(folder / STATE, json.dumps(state, indent=1))


def read_state(folder: Path, shape: ModelShape) -> dict[str, Any]:
    """What `write_state` wrote, of a model of this shape.

    Raises:
        CheckpointError: missing, torn, of another format, or of another model.
    """
    file = folder / STATE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a learner checkpoint: {file} is missing") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is torn: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{file} has format {found}, this version reads format {FORMAT}")
    saved = state["model"]
    if different := [f"{k} is {saved[k]}, not {v}" for k, v in shape.to_json().items() if saved.get(k, v) != v]:
        raise CheckpointError(f"{folder} holds another model than model.path: {', '.join(different)}")
    return state
