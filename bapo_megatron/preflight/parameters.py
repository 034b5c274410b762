"""How many parameters each trainer rank holds: exactly what Megatron builds, counted without building it.

Shape legend: H hidden, F feed-forward, V padded vocabulary, Q query heads x D, K key-value heads x D, D head dimension
"""

from __future__ import annotations

import math

from bapo_megatron.hf.shape import ModelShape, hf_tensors


def layer_parameters(shape: ModelShape, tensor: int) -> int:
    """Of one layer, on one of `tensor` ranks. Norms, and biases after a row-parallel linear, are on every rank."""
    H, F = shape.hidden_size, shape.ffn_size
    Q, K = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    split = (Q + 2 * K) * (H + shape.qkv_bias) + Q * H + 2 * F * (H + shape.mlp_bias) + F * H
    copied = H * (2 + shape.out_bias + shape.mlp_bias) + 2 * shape.head_dim * shape.qk_norm
    return split // tensor + copied


def embedding_parameters(shape: ModelShape, tensor: int) -> int:
    """Of the embedding, or of the output layer, on one of `tensor` ranks."""
    return shape.padded_vocab_size(tensor) // tensor * shape.hidden_size


def rank_parameters(shape: ModelShape, *, tensor: int, pipeline: int, stage: int) -> int:
    """Of one rank on `stage`; tensor, context and data ranks hold equally many.

    Tied embeddings exist twice where the first and the last stage are different ranks.
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
    """Of one rank's part of a critic of the policy's shape: a row of weights in place of the output layer."""
    count = rank_parameters(shape, tensor=tensor, pipeline=pipeline, stage=stage)
    if stage < pipeline - 1:
        return count
    shares_embedding = stage == 0 and shape.tied_embeddings
    return count + shape.hidden_size - (0 if shares_embedding else embedding_parameters(shape, tensor))


def largest_parameter(shape: ModelShape, tensor: int) -> int:
    """Values in the largest parameter of a rank: its gradient exists for a moment beside the buffer of all."""
    H, F = shape.hidden_size, shape.ffn_size
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * H
    return max(embedding_parameters(shape, tensor), 2 * F * H // tensor, qkv // tensor)


def model_parameters(shape: ModelShape) -> int:
    """Of the whole model, as its checkpoint holds them: what a weight sync sends."""
    return sum(math.prod(size) for size in hf_tensors(shape).values())


def largest_tensor(shape: ModelShape) -> int:
    """Values in the largest tensor of the checkpoint."""
    return max(math.prod(size) for size in hf_tensors(shape).values())
