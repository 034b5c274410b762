"""Saves and loads a Megatron model with its optimizer's state, from and to the parts of any layout.

Every rank writes its own part at the same time: of a tensor that several ranks hold, one writes it (of copies in a
tensor group the first rank, of data replicas each in turn, of the distributed optimizer's ranges the largest owner).
Every rank reads only the slices that it needs. The files: `checkpoint/folder.py`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import ModuleList, Parameter

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT, Facts, Index, read_index
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Piece, Snapshot
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import OUTPUT
from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.learner.adam import AdamState
from bapo_megatron.learner.hf.convert import fill_parameters, parameters_by_global_name, raising_together
from bapo_megatron.learner.hf.names import place_shard
from bapo_megatron.learner.parallel import ParallelLayout

PARTS = (WEIGHT, *MOMENTS)


def take_snapshot(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    adam: AdamState,
    facts: dict[str, Any],
    hf_path: Path,
) -> Snapshot:
    """Return the pieces that this rank writes. Collective over data x context ranks.

    The pieces are views of the live tensors; only parameters across a border of the distributed optimizer are copied
    (to the CPU), and all that `Snapshot.detach` copies.

    Args:
        model: this rank's chunks of the model.
        facts: JSON, the same on every rank: `version`, `skipped_updates` (updates that the moments have not seen), and
            other facts about the model.
        hf_path: the Hugging Face folder whose config and tokenizer go along.
    """
    pieces = list(_pieces(model, shape, layout, adam))
    return Snapshot(pieces, facts | {"model": shape.to_json()}, rank=layout.rank, hf_path=hf_path)


@torch.no_grad()
def _pieces(model: ModuleList, shape: ModelShape, layout: ParallelLayout, adam: AdamState) -> Iterator[Piece]:
    parameters = parameters_by_global_name(model)
    present = [entry for entry in entries(shape) if entry.megatron_name in parameters]
    mine = [(entry, parameters.pop(entry.megatron_name)) for entry in present]
    if shape.tied_embeddings:
        parameters.pop(OUTPUT.name, None)  # the last stage's copy: the first stage has the same
    assert not parameters, f"the name map does not know {sorted(parameters)}"
    data_rank = dist.get_rank(layout.data_context_group)
    writers = adam.writers([parameter for _, parameter in mine])
    for (entry, parameter), (writer, is_cut) in zip(mine, writers, strict=True):
        for part in PARTS:
            whole = adam.gather(parameter, part).cpu() if is_cut else None
            if writer == data_rank and (entry.kind != "copy" or layout.tensor_rank == 0):
                tensor = adam.local(parameter, part) if whole is None else whole
                for placed in place_shard(entry, shape, tensor, layout.tensor_rank, layout.tensor_size):
                    yield Piece(part, *placed)


@torch.no_grad()
def load(model: ModuleList, shape: ModelShape, layout: ParallelLayout, adam: AdamState, folder: Path) -> Facts:
    """Load weights and optimizer state saved by any layout; return the checkpoint's facts. Collective.

    Raises:
        CheckpointError: on every rank: the folder is torn or of another format, a tensor is missing, unexpected,
            mis-shaped or not finite, or it is another model.
    """
    with raising_together():
        index = read_index(folder)
        index.check_model(shape)
        facts = index.facts
        for part in PARTS:
            if part in index.tensors or part == WEIGHT or facts["version"] > 0:
                _load_part(model, shape, layout, adam, index, part)
            else:
                for parameter in model.parameters():
                    adam.fill(parameter, part, torch.zeros(parameter.shape, device=parameter.device))
        if unknown := sorted(index.tensors.keys() - set(PARTS)):
            raise CheckpointError(f"{folder} holds {', '.join(unknown)}, which this model does not have")
    adam.set_steps(facts["version"] - facts["skipped_updates"])
    return facts


def _load_part(
    model: ModuleList, shape: ModelShape, layout: ParallelLayout, adam: AdamState, index: Index, part: str
) -> None:
    def fill(name: str, parameter: Parameter, tensor: Tensor) -> None:
        adam.fill(parameter, name, tensor)

    with ShardReader(index, part) as read:
        read.check(shape)
        fill_parameters(model, shape, layout, read, partial(fill, part))
