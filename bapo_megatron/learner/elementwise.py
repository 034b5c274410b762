"""Norm, rotary embedding and gated activation of Megatron's local layers, on any device, in few passes over memory.

torch computes the latter two one operation at a time: each operation writes a tensor for the next one, and the
intermediate tensors are kept for the backward pass. Here the activation keeps only its input, as a fused kernel does;
the rotary embedding keeps nothing.

Shape legend: T rows (all dimensions before the last), H width of the norm, F feed-forward width of this rank, D head
    dimension, X = D / 2
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo_megatron.kernels import kernels_of

_TILE_ROWS = 128  # gate, up and their gradients stay in a core's cache


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that `finalize_model_grads` sums its gradient under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.plus_one = config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Parameter has no such field)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        dtype = x.dtype
        if self.plus_one:  # in float32, as in transformers' GemmaRMSNorm: bfloat16 would round 1 + weight
            x, weight = x.float(), 1 + weight.float()
        assert self.eps is not None, "the constructor has it"
        return kernels_of(x).rms_norm(x, weight, self.eps).to(dtype)


class WholeNorm(torch.nn.Module):
    """RMSNorm over all heads together, of which each tensor-parallel rank has a part: [T, 1, heads, D]."""

    def __init__(self, config: TransformerConfig, num_heads: int) -> None:
        super().__init__()
        self.eps, self.width = config.layernorm_epsilon, num_heads * config.kv_channels
        self.is_split = config.tensor_model_parallel_size > 1
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        mine = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(mine, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.is_split:
            # each rank's outputs depend on all ranks' inputs, so that the gradient is summed over ranks, too
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normed * self.weight.float()).to(x.dtype).view_as(x)


Rotation = tuple[Tensor, Tensor]  # cosine and signed sine of every token's angles, each [T, 1, 1, D]


def rotation_of(angles_TX: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotation:
    """Return the rotation of dimensions x and x + D / 2 by angles_TX[t, x] (float32).

    Args:
        factor: scales what is rotated, and nothing else of a head.
    """
    cos_TX, sin_TX = angles_TX.cos() * factor, angles_TX.sin() * factor
    both = torch.cat((cos_TX, cos_TX), dim=-1), torch.cat((-sin_TX, sin_TX), dim=-1)
    return both[0].to(dtype)[:, None, None], both[1].to(dtype)[:, None, None]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary embeddings to x [T, 1, heads, D], or to the first dimensions of each head if angles are fewer."""
    rotated, rest = x.tensor_split([rotation[0].shape[-1]], dim=-1)
    out: Tensor = _Rotate.apply(rotated, *rotation)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = x * cos
    (out_1, out_2), (x_1, x_2), (sin_1, sin_2) = (y.chunk(2, dim=-1) for y in (out, x, sin))
    out_1.addcmul_(x_2, sin_1, value=sign)
    out_2.addcmul_(x_1, sin_2, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """Rotary embeddings; the backward rotates the gradient back by the same angles, with the same factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


class GatedActivation(torch.nn.Module):
    """activation(gate) * up of [..., 2F], the gate first: the module that Megatron's MLP calls as its activation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.is_silu = config.activation_func is F.silu  # the only other one is gelu with tanh: hf/shape.py

    def forward(self, gate_up: Tensor) -> Tensor:
        out: Tensor = _GatedActivation.apply(gate_up, self.is_silu)
        return out


def _activate(gate: Tensor, is_silu: bool, out: Tensor) -> Tensor:
    if is_silu:
        return torch.ops.aten.silu.out(gate, out=out)
    return torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)


def _differentiate(grad: Tensor, gate: Tensor, is_silu: bool, out: Tensor) -> Tensor:
    """Write grad * activation'(gate) to `out`."""
    if is_silu:
        return torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)
    return torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate="tanh", grad_input=out)


class _GatedActivation(torch.autograd.Function):
    """A gated activation that keeps only its input, and writes both halves of the gradient in place."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, is_silu: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.is_silu = is_silu
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        in_TX, out_TF = gate_up.reshape(-1, 2 * width), out.view(-1, width)
        for in_tile, out_tile in zip(in_TX.split(_TILE_ROWS), out_TF.split(_TILE_ROWS), strict=True):
            gate, up = in_tile.chunk(2, dim=-1)
            _activate(gate, is_silu, out_tile).mul_(up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        width = grad.shape[-1]
        grad_in = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        tiles = (x.split(_TILE_ROWS) for x in (gate_up.reshape(-1, 2 * width), grad.reshape(-1, width)))
        for in_tile, grad_tile, grad_in_tile in zip(*tiles, grad_in.view(-1, 2 * width).split(_TILE_ROWS), strict=True):
            (gate, up), (grad_gate, grad_up) = in_tile.chunk(2, dim=-1), grad_in_tile.chunk(2, dim=-1)
            active = _activate(gate, ctx.is_silu, torch.empty_like(grad_tile))
            torch.mul(grad_tile, active, out=grad_up)
            _differentiate(torch.mul(grad_tile, up, out=active), gate, ctx.is_silu, grad_gate)
        return grad_in, None
