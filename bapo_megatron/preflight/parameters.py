"""The number of parameters on each trainer rank: exactly what Megatron builds, counted without building it."""

from __future__ import annotations

import math

from bapo_megatron.hf.shape import Entry, ModelShape, hf_tensors, layer_entries


def layer_parameters(shape: ModelShape, tensor: int) -> int:
    """Count the parameters of one layer on one of `tensor` ranks; each rank holds all of those of kind "copy"."""
    return sum(_values(entry) // (1 if entry.kind == "copy" else tensor) for entry in layer_entries(shape, 0))


def _values(entry: Entry) -> int:
    return sum(math.prod(size) for size in entry.hf_shapes)


def embedding_parameters(shape: ModelShape, tensor: int) -> int:
    """Count the parameters of the embedding, or of the output layer, on one of `tensor` ranks."""
    return shape.padded_vocab_size(tensor) // tensor * shape.hidden_size


def rank_parameters(shape: ModelShape, *, tensor: int, pipeline: int, stage: int) -> int:
    """Count the parameters of one rank on `stage`; tensor, context and data ranks hold equally many.

    Tied embeddings exist twice if the first and the last stage are different ranks.
    """
    count = shape.num_layers // pipeline * layer_parameters(shape, tensor)
    first, last = stage == 0, stage == pipeline - 1
    if first:
        count += embedding_parameters(shape, tensor)
    if last:
        count += shape.hidden_size  # the final norm
        if not (first and shape.tied_embeddings):
            count += embedding_parameters(shape, tensor)
    return count


def critic_parameters(shape: ModelShape, *, tensor: int, pipeline: int, stage: int) -> int:
    """Count one rank's parameters of a critic of the policy's shape: one row of weights replaces the output layer."""
    count = rank_parameters(shape, tensor=tensor, pipeline=pipeline, stage=stage)
    if stage < pipeline - 1:
        return count
    shares_embedding = stage == 0 and shape.tied_embeddings
    return count + shape.hidden_size - (0 if shares_embedding else embedding_parameters(shape, tensor))


def largest_parameter(shape: ModelShape, tensor: int) -> int:
    """Count the values in a rank's largest parameter: its gradient briefly exists beside the buffer of gradients."""
    return max(embedding_parameters(shape, tensor), *(_values(e) // tensor for e in layer_entries(shape, 0)))


def model_parameters(shape: ModelShape) -> int:
    """Count the parameters of the whole model in its checkpoint, which a weight sync sends."""
    return sum(math.prod(size) for size in hf_tensors(shape).values())


def largest_tensor(shape: ModelShape) -> int:
    """Count the values in the largest tensor of the checkpoint."""
    return max(math.prod(size) for size in hf_tensors(shape).values())
