"""Counts of parameters: in the model, on a rank, and used by one token."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.hf.shape import Experts, LayerShape, ModelShape, layer_entries, outside_entries, runs
from bapo_megatron.hf.splits import Entry, is_any, is_stored


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters that one rank holds. Example: Held(dense=395, expert=3624).total == 4019."""

    dense: int  # copied by data and context ranks
    expert: int = 0  # of experts that ranks share out: tensor, context and data ranks copy them, / parallel.expert

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def owned(self, config: Config) -> int:
        """Count the parameters whose optimizer state this rank holds."""
        if not config.optimizer.distributed:
            return self.total
        return -(-self.dense // num_copies(config.parallel)) + -(-self.expert // num_expert_copies(config.parallel))


def num_copies(p: ParallelConfig) -> int:
    """Count the ranks that hold the same part of a parameter, which sum its gradient."""
    return p.data * p.context


def num_expert_copies(p: ParallelConfig) -> int:
    """Count the ranks that hold the same expert, if ranks share out experts."""
    return p.tensor * p.context * p.data // p.expert


def _in_layers(
    shape: ModelShape, layers: Sequence[LayerShape], p: ParallelConfig, which: Callable[[Entry], bool]
) -> Held:
    """Count parameters of some layers on one rank."""
    dense = expert = 0
    for layer, number in runs(layers):
        for entry, each, times in _counted(shape, layer, p):
            if not which(entry):
                continue
            if entry.axis == "dense":
                dense += number * each * times
            else:
                expert += number * each * times
    return Held(dense, expert)


def _counted(shape: ModelShape, layer: LayerShape, p: ParallelConfig) -> Iterator[tuple[Entry, int, int]]:
    """Yield the parameters of a layer, of experts only the first one's; how many values of it the first rank holds, and
    how many such parameters."""
    for entry in layer_entries(shape, layer, experts=[0]):
        placed = entry if p.expert > 1 else entry.without_experts()
        each = placed.num_values(p.tensor if placed.axis == "dense" else p.expert)
        yield placed, each, 1 if entry.expert is None else entry.sizes["X"] // p.expert


def rank_parameters(shape: ModelShape, p: ParallelConfig, stage: int, which: Callable[[Entry], bool] = is_any) -> Held:
    """Count parameters of one rank on `stage`, the same for all tensor, context and data ranks.

    Tied embeddings exist twice if the first and the last stage are different ranks.
    """
    held = _in_layers(shape, _layers_of_stage(shape, p, stage), p, which)
    first, last = stage == 0, stage == p.pipeline - 1
    embedding, *after = outside_entries(shape)
    outside = [embedding] * (first or (last and shape.tied_embeddings)) + after * last
    return dataclasses.replace(held, dense=held.dense + sum(one.num_values(p.tensor) for one in filter(which, outside)))


def _layers_of_stage(shape: ModelShape, p: ParallelConfig, stage: int) -> list[LayerShape]:
    """Return the layers that a stage holds: chunks of layers are dealt to the stages in turn."""
    sizes = [size // p.virtual_pipeline for size in p.stage_sizes(shape.num_layers)] * p.virtual_pipeline
    ends = list(itertools.accumulate(sizes))
    mine = range(stage, len(sizes), p.pipeline)
    return [layer for chunk in mine for layer in shape.layers[ends[chunk] - sizes[chunk] : ends[chunk]]]


def largest_in_layer(shape: ModelShape, p: ParallelConfig) -> int:
    """Count the values in the largest trained parameter of a rank's layers."""
    counted = (one for layer, _ in runs(shape.layers) for one in _counted(shape, layer, p))
    return max((each for entry, each, _ in counted if entry.trained), default=0)


def largest_parameter(shape: ModelShape, p: ParallelConfig) -> int:
    """Count the values in a rank's largest trained parameter."""
    outside = (entry.num_values(p.tensor) for entry in outside_entries(shape) if entry.trained)
    return max(largest_in_layer(shape, p), *outside, 0)


def largest_adapted(shape: ModelShape, p: ParallelConfig) -> int:
    """Count the values of a rank's largest weight that has adapters; 0 if none has."""
    largest = 0
    for layer, _ in runs(shape.layers):
        sizes = {entry.megatron_name: each for entry, each, _ in _counted(shape, layer, p)}
        linears = {name.partition(".adapter.")[0] for name in sizes if ".adapter." in name}
        largest = max([largest, *(sizes[f"{linear}.weight"] for linear in linears)])
    return largest


def model_parameters(shape: ModelShape, which: Callable[[Entry], bool] = is_stored) -> int:
    """Count parameters of the model, usually those in its Hugging Face folder, which a weight sync sends."""
    outside = sum(entry.num_values(1) for entry in filter(which, outside_entries(shape)))
    return _in_layers(shape, shape.layers, ParallelConfig(), which).total + outside


def active_parameters(shape: ModelShape) -> int:
    """Count the parameters that one token uses: only the experts that are chosen for it."""
    idle = 0
    for layer, count in runs(shape.layers):
        if isinstance(mlp := layer.mlp, Experts):
            of_experts = sum(
                entry.num_values(1) for entry in layer_entries(shape, layer, experts=[0]) if entry.expert == 0
            )
            idle += count * of_experts * (mlp.num_experts - mlp.num_chosen)
    return model_parameters(shape) - idle


def largest_tensor(shape: ModelShape) -> int:
    """Count the values in the largest tensor of the checkpoint."""
    inside = (entry for layer, _ in runs(shape.layers) for entry in layer_entries(shape, layer, experts=[0]))
    stored = filter(is_stored, (*outside_entries(shape), *inside))
    return max(math.prod(size) for entry in stored for size in entry.hf_shapes)
