"""Rows of a model's streams, as the embedded engine computes them: see `hf/streams.py`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.hf.streams import ModelStream, ServedTokens
from bapo_megatron.tokens import TokenStream

Streams = Mapping[TokenStream, ModelStream]


class FedRows:
    """Rows of the tokens that one forward pass reads. The model reports its layers, in order, and its end.

    Args:
        streams: only the ones on fed tokens are computed.
    """

    def __init__(self, streams: Streams, tokens: ServedTokens) -> None:
        self._tokens = tokens
        self._streams = {stream: one for stream, one in streams.items() if stream.on == "fed"}
        self._layers: dict[TokenStream, list[Tensor]] = {stream: [] for stream in self._streams}

    def see_layer(
        self, layer: int, hidden_BTE: Tensor, weights: Mapping[str, Tensor], experts_BTC: Tensor | None
    ) -> None:
        """Compute a layer's part of staged streams from the input of its MLP, and the experts that it chose."""
        tokens = replace(self._tokens, layer=layer, hidden_BTE=hidden_BTE, weights=weights, experts_BTC=experts_BTC)
        for stream, one in self._streams.items():
            if stream.to == "owner's stage":
                self._layers[stream].append(_rows(stream, one, tokens, stream.shape[1:]))

    def see_end(self, hidden_BTE: Tensor) -> None:
        """Compute the other streams from the input of the final norm."""
        tokens = replace(self._tokens, hidden_BTE=hidden_BTE)
        for stream, one in self._streams.items():
            if stream.to != "owner's stage":
                self._layers[stream].append(_rows(stream, one, tokens, stream.shape))

    def rows(self) -> dict[TokenStream, Tensor]:
        """Return the rows of all tokens, [B, T, *shape], padding included."""
        staged = {stream: parts for stream, parts in self._layers.items() if stream.to == "owner's stage"}
        return {
            stream: torch.stack(parts, 2) if stream in staged else parts[0] for stream, parts in self._layers.items()
        }


def sampled_rows(streams: Streams, tokens: ServedTokens) -> dict[TokenStream, Tensor]:
    """Return rows of sampled tokens, [B, 1, *shape], for the streams on sampled tokens."""
    on_sampled = ((stream, one) for stream, one in streams.items() if stream.on == "sampled")
    return {stream: _rows(stream, one, tokens, stream.shape) for stream, one in on_sampled}


def _rows(stream: TokenStream, one: ModelStream, tokens: ServedTokens, shape: Iterable[int]) -> Tensor:
    rows, expected = one.rows(tokens), (*tokens.token_ids_BT.shape, *shape)
    if rows.shape != expected:
        raise ValueError(
            f"stream {stream.name}: its function returned rows of shape {[*rows.shape]}, not {[*expected]}"
        )
    return rows.to(getattr(torch, stream.dtype))
