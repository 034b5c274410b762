"""The layers of the embedded engine: a block's `engine` function computes one of its layers with a `LayerPass`.

Shape legend (suffix of a tensor's name):
    B  rows (sequences)      T  new tokens per row     E  hidden size               N  tokens of all rows
    H  query heads           K  key-value heads        D  head dimension            R  rotated dimensions of a head
    X  experts               C  experts that a token chooses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.engines.embedded.linear_attention import linear_attention
from bapo_megatron.hf.families import SHARED_GATE
from bapo_megatron.hf.shape import Experts, LayerShape, ModelShape

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer on the new tokens of some rows. A block's function calls its methods; `x + ...` is up to the block."""

    model: ModelShape
    shape: LayerShape
    weights: dict[str, Tensor]  # by the trainer's name within the layer
    angles: tuple[Tensor, Tensor]  # cosine and sine, which broadcast against [B, T, heads, R]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values [B, T, heads, D] -> [B, T, H, D]
    states: Sequence[Tensor]  # of linear attention: inputs and state of the rows, changed in place
    lengths_B: Tensor | None  # tokens of each row that are not padding, if some are
    see: Callable[[Tensor, Mapping[str, Tensor], Tensor | None], None] | None  # `FedRows.see_layer`

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Normalise over the last dimension with the weight `name`."""
        return rms_norm(x, self.weights[name], self.model)

    def attention(self, h_BTE: Tensor, *, norm_whole: bool = False) -> Tensor:
        """Compute full attention, [B, T, E].

        Args:
            norm_whole: norm queries and keys over all heads together, where `qk_norm` does so head by head.
        """
        model = self.model
        qkv = linear(h_BTE, self.weights, "self_attention.linear_qkv").unflatten(-1, (-1, model.head_dim))
        q_BTHD, k_BTKD, v_BTKD = qkv.split((qkv.shape[2] - 2 * model.num_kv_heads, *2 * [model.num_kv_heads]), dim=2)
        if model.output_gate:
            q_BTHD, gate_BTHD = q_BTHD.unflatten(2, (-1, 2)).unbind(3)
        if norm_whole:
            q_BTHD = self.norm(q_BTHD.flatten(2), "self_attention.core_attention.q_norm.weight").view_as(q_BTHD)
            k_BTKD = self.norm(k_BTKD.flatten(2), "self_attention.core_attention.k_norm.weight").view_as(k_BTKD)
        elif model.qk_norm:
            q_BTHD = self.norm(q_BTHD, "self_attention.q_layernorm.weight")
            k_BTKD = self.norm(k_BTKD, "self_attention.k_layernorm.weight")
        if self.shape.rotated:
            q_BTHD, k_BTKD = _rotate(q_BTHD, *self.angles), _rotate(k_BTKD, *self.angles)
        out_BTHD = self.attend(q_BTHD, k_BTKD, v_BTKD)
        if model.output_gate:
            out_BTHD = out_BTHD * gate_BTHD.sigmoid()
        return linear(out_BTHD.flatten(2), self.weights, "self_attention.linear_proj")

    def linear_attention(self, h_BTE: Tensor) -> Tensor:
        """Compute linear attention, [B, T, E]."""
        assert self.shape.linear is not None
        inputs, state = self.states
        return linear_attention(
            h_BTE, self.weights, self.shape.linear, self.model.norm_eps, inputs, state, self.lengths_B
        )

    def mlp(self, h_BTE: Tensor) -> Tensor:
        """Compute the gated MLP or the mixture of experts, [B, T, E], and report both to the streams of the model."""
        activation, experts_BTC = _ACTIVATIONS[self.model.activation], None
        if isinstance(mlp := self.shape.mlp, Experts):
            shares_BTC, experts_BTC = _choose(h_BTE, self.weights, mlp)
            out_BTE = _mixed(h_BTE, self.weights, shares_BTC, experts_BTC, activation)
            if mlp.shared_ffn_size:
                out_BTE = out_BTE + _shared(h_BTE, self.weights, activation)
        else:
            out_BTE = _gated(h_BTE, self.weights, "mlp.", activation)
        if self.see is not None:
            self.see(h_BTE, self.weights, experts_BTC)
        return out_BTE


def pre_norm(x_BTE: Tensor, layer: LayerPass) -> Tensor:
    """Compute a layer whose attention and MLP each read a norm of what they add to."""
    x_BTE = x_BTE + layer.attention(layer.norm(x_BTE, "input_layernorm.weight"))
    return x_BTE + layer.mlp(layer.norm(x_BTE, "pre_mlp_layernorm.weight"))


def pre_norm_linear(x_BTE: Tensor, layer: LayerPass) -> Tensor:
    """Compute the same layer with linear attention."""
    x_BTE = x_BTE + layer.linear_attention(layer.norm(x_BTE, "input_layernorm.weight"))
    return x_BTE + layer.mlp(layer.norm(x_BTE, "pre_mlp_layernorm.weight"))


def rms_norm(x: Tensor, weight: Tensor, model: ModelShape) -> Tensor:
    """Normalise as transformers does: in float32; with `norm_plus_one` the weight is applied in float32 too."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + model.norm_eps)
    if model.norm_plus_one:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def linear(x: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, layer[f"{name}.weight"], layer.get(f"{name}.bias"))


def _gated(x: Tensor, layer: dict[str, Tensor], name: str, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute a gated MLP, whose weights' names begin with `name`."""
    gate, up = linear(x, layer, f"{name}linear_fc1").chunk(2, dim=-1)
    return linear(activation(gate) * up, layer, f"{name}linear_fc2")


def _choose(x_BTE: Tensor, layer: dict[str, Tensor], mlp: Experts) -> tuple[Tensor, Tensor]:
    """Choose experts for each token; the router computes in float32, whatever the model's type, as the trainer's does.

    Returns: the experts' shares in the result float32, and their numbers int64, both [B, T, C], largest share first.
    """
    shares_BTX = F.linear(x_BTE.float(), layer["mlp.router.weight"].float()).softmax(-1)
    shares_BTC, experts_BTC = shares_BTX.topk(mlp.num_chosen, dim=-1)
    return shares_BTC / shares_BTC.sum(-1, keepdim=True) if mlp.normalised else shares_BTC, experts_BTC


def _mixed(
    x_BTE: Tensor,
    layer: dict[str, Tensor],
    shares_BTC: Tensor,
    experts_BTC: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute the sum of the chosen experts' outputs, in the order of the experts, as transformers does."""
    x_NE, experts = x_BTE.flatten(0, 1), experts_BTC.flatten()
    choices = experts.argsort(stable=True)  # sorted by expert
    tokens = choices // experts_BTC.shape[-1]
    parts = x_NE[tokens].split(experts.bincount().tolist())
    name = "mlp.experts.local_experts.{}."
    outputs = [_gated(part, layer, name.format(i), activation) for i, part in enumerate(parts) if len(part)]
    weighted = torch.cat(outputs) * shares_BTC.to(x_BTE.dtype).flatten()[choices, None]
    return torch.zeros_like(x_NE).index_add_(0, tokens, weighted).view_as(x_BTE)


def _shared(x_BTE: Tensor, layer: dict[str, Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the experts that every token passes, scaled by their gate if they have one."""
    out_BTE, gate_1E = _gated(x_BTE, layer, "mlp.shared_experts.", activation), layer.get(SHARED_GATE)
    return out_BTE if gate_1E is None else F.linear(x_BTE, gate_1E).sigmoid() * out_BTE


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions in Hugging Face's half-split layout; `sin` includes the sign of the first half."""
    rotated, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
