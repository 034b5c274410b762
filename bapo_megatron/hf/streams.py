"""Streams of a model: per-token values that it computes while an engine runs it, such as a choice of experts.

A family declares them (`Family.streams`), and every engine that serves it returns them. The embedded engine computes
them with the function of the declaration.

Shape legend: B sequences, T tokens of each, E hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import ModelShape, family_of, model_shape

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.hf.families import Family
    from bapo_megatron.tokens import TokenStream


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Tokens of one pass of the embedded engine, whose rows a stream computes."""

    token_ids_BT: Tensor  # int64: inputs, padded on the right; or one sampled token per sequence
    positions_BT: Tensor  # int64, from 0
    version: int  # weight version; -1 means the engine's initial weights
    layer: int | None = None  # the layer whose part of a staged stream is wanted
    hidden_BTE: Tensor | None = (
        None  # for inputs: what the layer's MLP reads; without a layer, what the final norm reads
    )
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # weights of the layer, by the trainer's name within it
    logits_BV: Tensor | None = None  # float32, divided by the temperature: what the tokens were sampled from


@dataclass(frozen=True, slots=True)
class ModelStream:
    """A stream of a family's models.

    Example: ModelStream(routes_of, chosen_experts), where routes_of(shape) returns TokenStream("routes", "uint8",
    (shape.num_layers, 8), on="fed", to="owner's stage")
    """

    declare: Callable[[ModelShape], TokenStream]
    rows: Callable[[ServedTokens], Tensor]
    """Computes [B, T, *shape] for inputs, or for sampled tokens (T = 1). For "owner's stage" each call computes one
    layer's part, [B, T, *shape[1:]]."""


def model_streams(hf_config: dict[str, Any], own: Family | None = None) -> dict[TokenStream, ModelStream]:
    """Return the streams of a model's tokens; most families have none.

    Args:
        own: see `model_shape`.

    Raises:
        CheckpointError: the model is not supported.
        UserError: a declaration contradicts itself.
    """
    family = family_of(hf_config, own)
    if family is None or not family.streams:
        return {}
    shape = model_shape(hf_config, own=own)
    found: dict[TokenStream, ModelStream] = {}
    for one in family.streams:
        try:
            stream = one.declare(shape)
            stream.check_kept([other.name for other in found])
        except ValueError as problem:
            raise UserError(f"model family {family.model_type}: {problem}") from problem
        found[stream] = one
    return found
