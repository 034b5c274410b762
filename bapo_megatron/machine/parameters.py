"""Counts of parameters: in the model, on a rank, and used by one token."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.hf.shape import Experts, LayerShape, ModelShape, entries, layer_entries, runs
from bapo_megatron.hf.splits import Entry


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


def _in_layers(shape: ModelShape, layers: Sequence[LayerShape], p: ParallelConfig) -> Held:
    """Count the parameters of some layers on one rank."""
    dense = expert = 0
    for layer, number in runs(layers):
        for entry, each, times in _counted(shape, layer, p):
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


def embedding_parameters(shape: ModelShape, tensor: int) -> int:
    """Count the parameters of the embedding, or of the output layer, on one of `tensor` ranks."""
    return shape.padded_vocab_size(tensor) // tensor * shape.hidden_size


def rank_parameters(shape: ModelShape, p: ParallelConfig, stage: int) -> Held:
    """Count the parameters of one rank on `stage`, the same for all tensor, context and data ranks.

    Tied embeddings exist twice if the first and the last stage are different ranks.
    """
    held = _in_layers(shape, _layers_of_stage(shape, p, stage), p)
    outside, first, last = 0, stage == 0, stage == p.pipeline - 1
    if first:
        outside += embedding_parameters(shape, p.tensor)
    if last:
        outside += shape.hidden_size  # the final norm
        if not (first and shape.tied_embeddings):
            outside += embedding_parameters(shape, p.tensor)
    return dataclasses.replace(held, dense=held.dense + outside)


def _layers_of_stage(shape: ModelShape, p: ParallelConfig, stage: int) -> list[LayerShape]:
    """Return the layers that a stage holds: chunks of layers are dealt to the stages in turn."""
    sizes = [size // p.virtual_pipeline for size in p.stage_sizes(shape.num_layers)] * p.virtual_pipeline
    ends = list(itertools.accumulate(sizes))
    mine = range(stage, len(sizes), p.pipeline)
    return [layer for chunk in mine for layer in shape.layers[ends[chunk] - sizes[chunk] : ends[chunk]]]


def critic_parameters(shape: ModelShape, p: ParallelConfig, stage: int) -> int:
    """Count one rank's parameters of a critic, whose output layer is a single row of weights."""
    count = rank_parameters(shape, p, stage).total
    if stage < p.pipeline - 1:
        return count
    shares_embedding = stage == 0 and shape.tied_embeddings
    return count + shape.hidden_size - (0 if shares_embedding else embedding_parameters(shape, p.tensor))


def largest_in_layer(shape: ModelShape, p: ParallelConfig) -> int:
    """Count the values in the largest parameter of a rank's layers."""
    return max(each for layer, _ in runs(shape.layers) for _, each, _ in _counted(shape, layer, p))


def largest_parameter(shape: ModelShape, p: ParallelConfig) -> int:
    """Count the values in a rank's largest parameter."""
    return max(embedding_parameters(shape, p.tensor), largest_in_layer(shape, p))


def model_parameters(shape: ModelShape) -> int:
    """Count the parameters in the model's checkpoint, which a weight sync sends."""
    outside = entries(dataclasses.replace(shape, layers=()))
    return _in_layers(shape, shape.layers, ParallelConfig()).total + sum(entry.num_values(1) for entry in outside)


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
    outside = entries(dataclasses.replace(shape, layers=()))
    inside = (entry for layer, _ in runs(shape.layers) for entry in layer_entries(shape, layer, experts=[0]))
    return max(math.prod(size) for entry in (*outside, *inside) for size in entry.hf_shapes)
