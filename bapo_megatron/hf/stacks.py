"""Folders that hold one tensor for the experts of a layer, in place of one for each: [experts, rows, columns].

Reading and writing of folders know them; everywhere else, each expert has tensors of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.hf.splits import Size


@dataclass(slots=True)
class Stack:
    """One parameter of all experts. An expert has the rows of its tensors, one after the other.

    Example: experts.gate_up_proj [X, 2M, E] of gate [M, E] and up [M, E].
    """

    name: str
    places: dict[str, tuple[int, slice]] = field(default_factory=dict)  # by tensor: expert and rows
    size: Size = ()


def stacks(shape: ModelShape) -> dict[str, Stack]:
    """Return a model's stacks by name; none for families that do not have any."""
    found: dict[str, Stack] = {}
    for entry in entries(shape):
        if entry.stacked is not None and entry.expert is not None:
            stack = found.setdefault(entry.stacked, Stack(entry.stacked))
            above = 0
            for name, (rows, *_) in zip(entry.hf_names, entry.hf_shapes, strict=True):
                stack.places[name] = entry.expert, slice(above, above + rows)
                above += rows
            stack.size = (entry.expert + 1, above, *entry.hf_shapes[0][1:])
    return found


def stacked(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as published: stacks in place of experts' tensors, as soon as they are whole."""
    stack_of = {name: stack for stack in stacks(shape).values() for name in stack.places}
    wholes: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in named:
        if (stack := stack_of.get(name)) is None:
            yield name, tensor
            continue
        if stack.name not in wholes:
            wholes[stack.name] = torch.empty(stack.size, dtype=tensor.dtype, device=tensor.device)
            missing[stack.name] = len(stack.places)
        expert, rows = stack.places[name]
        wholes[stack.name][expert, rows] = tensor
        missing[stack.name] -= 1
        if not missing[stack.name]:
            yield stack.name, wholes.pop(stack.name)
