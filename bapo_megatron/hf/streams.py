"""Streams of a model: per-token values that it computes while an engine runs it, such as a choice of experts.

A family declares them (`Family.streams`), and every engine that serves it returns them. The embedded engine computes
them with the function of the declaration.

Shape legend: B sequences, T tokens of each, E hidden size, C experts that a token chooses, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.tokens import TokenStream

ROUTES = "routes"
"""The stream of the experts that a mixture chooses. SGLang returns it in fields of its own (engines/replies.py)."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Tokens of one pass of the embedded engine, whose rows a stream computes."""

    token_ids_BT: Tensor  # int64: inputs, padded on the right; or one sampled token per sequence
    positions_BT: Tensor  # int64, from 0
    version: int  # weight version; -1 means the engine's initial weights
    layer: int | None = None  # the layer whose part of a staged stream is wanted
    hidden_BTE: Tensor | None = None  # for inputs: what the layer's MLP reads, or without a layer the final norm
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # weights of the layer, by the trainer's name within it
    experts_BTC: Tensor | None = None  # int64: the experts that the layer computes with, best first
    logits_BV: Tensor | None = None  # float32, divided by the temperature: what the tokens were sampled from


@dataclass(frozen=True, slots=True)
class ModelStream:
    """A stream of a family's models.

    Example: ModelStream(routes, chosen_experts), with the two functions below.
    """

    declare: Callable[[Any], TokenStream]
    """Takes the `ModelShape`, which is above this module: a shape is read by its family, which names its streams."""
    rows: Callable[[ServedTokens], Tensor]
    """Computes [B, T, *shape] for inputs, or for sampled tokens (T = 1). For "owner's stage" each call computes one
    layer's part, [B, T, *shape[1:]]."""


def routes(shape: Any) -> TokenStream:
    """Declare the experts that each layer of a mixture chooses for a token: [layers, chosen], in any order.

    Up to 255 experts they are bytes, and 255 means a missing row.

    Args:
        shape: the `ModelShape` of a mixture.
    """
    from bapo_megatron.tokens import TokenStream

    experts = shape.experts
    dtype, missing = ("uint8", 255) if experts.num_experts <= 255 else ("int16", -1)
    return TokenStream(
        ROUTES,
        dtype,
        (shape.num_layers, experts.num_chosen),
        missing=missing,
        on="fed",
        to="owner's stage",
        least=0,
        most=experts.num_experts - 1,
        distinct=True,
        on_request=True,
    )


def chosen_experts(tokens: ServedTokens) -> Tensor:
    """Return a layer's part of the rows of `routes`."""
    assert tokens.experts_BTC is not None, "every layer of a family with this stream is a mixture"
    return tokens.experts_BTC
