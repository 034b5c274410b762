"""Gated DeltaNet over packed sequences, on Megatron's parallel linears.

Each value head has a state, a matrix that maps keys to values. For every token the state decays, learns the difference
between the token's value and what it gives for the token's key, and answers the token's query (the gated delta rule).
State and convolution start anew with each sequence of a pack.

`delta_rule` is flash-linear-attention on GPUs and plain torch elsewhere. The latter takes the sequences chunk by chunk
and keeps, for the backward pass, only its inputs and the states between chunks. Tensor ranks split the heads.

Shape legend: T packed tokens, S sequences, H hidden, L tokens of a chunk, K key heads and N value heads of this rank, D
    dimension of a query or key, V of a value, C channels of the convolution on this rank, W its width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from bapo_megatron.hf.shape import LinearAttention
from bapo_megatron.kernels.delta_rule import rule_of_chunk, wide
from bapo_megatron.learner.packs import Chunk, PackedSequences, Ragged, Sequences, place


def delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, sequences: Sequences
) -> Tensor:
    """Return the answers [T, N, V] of the gated delta rule, in the type of v. Queries and keys are normalised here.

    Args:
        g_TN: float32, the logarithm of the state's decay before a token, at most 0.
        beta_TN: from 0 to 1, how much of the difference a state learns.
    """
    rule = fla_delta_rule if v_TNV.is_cuda else torch_delta_rule
    return rule(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, sequences)


def fla_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, sequences: Sequences
) -> Tensor:
    """Return `delta_rule` by the Triton kernels of flash-linear-attention, which must be installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out_1TNV, _ = chunk_gated_delta_rule(
        *(x[None] for x in (q_TKD, k_TKD, v_TNV, g_TN, beta_TN)),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.on_device_S1,
        cu_seqlens_cpu=sequences.cu_seqlens_S1,  # without it, the CPU waits for the lengths
    )
    out_TNV: Tensor = out_1TNV[0]
    return out_TNV


def torch_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, sequences: Sequences
) -> Tensor:
    """Return `delta_rule`, computed in float32 (float64 for float64 inputs), on any device."""
    out_TNV: Tensor = _DeltaRule.apply(sequences.chunks, q_TKD, k_TKD, v_TNV, g_TN[..., None], beta_TN[..., None])
    return out_TNV


class _DeltaRule(torch.autograd.Function):
    """The delta rule over chunks; the backward computes each chunk again, from the last one to the first."""

    @staticmethod
    def forward(ctx: Any, chunks: Sequence[Chunk], *inputs: Tensor) -> Tensor:
        q_TKD, _, v_TNV, *_ = inputs
        num_sequences = chunks[0].places.num_sequences
        state_SNDV = wide(v_TNV.new_zeros(num_sequences, v_TNV.shape[1], q_TKD.shape[-1], v_TNV.shape[-1]))
        out_TNV, states = torch.empty_like(v_TNV), []
        for chunk in chunks:
            if chunk.from_S is not None:
                state_SNDV = state_SNDV.index_select(0, chunk.from_S)
            states.append(state_SNDV)
            out_SNLV, state_SNDV = rule_of_chunk((*map(chunk.places.pad, inputs), state_SNDV))
            _write(out_TNV, chunk.places, out_SNLV)
        ctx.chunks = chunks
        ctx.save_for_backward(*inputs, *states)
        return out_TNV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TNV: Tensor) -> tuple[Tensor | None, ...]:
        inputs, states = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        grads = [torch.empty_like(x) for x in inputs]
        later: tuple[Tensor, Tensor] | None = None  # the next chunk's sequences among this chunk's, and their gradient
        for chunk, state in zip(reversed(ctx.chunks), reversed(states), strict=True):
            parts = [x.detach().requires_grad_() for x in (*map(chunk.places.pad, inputs), state)]
            with torch.enable_grad():
                results = rule_of_chunk(parts)
            grad_state = torch.zeros_like(results[1])
            if later is not None:
                grad_state.index_copy_(0, *later)
            *of_inputs, grad_state = torch.autograd.grad(results, parts, (chunk.places.pad(grad_TNV), grad_state))
            for whole, part in zip(grads, of_inputs, strict=True):
                _write(whole, chunk.places, part)
            later = (chunk.from_S, grad_state)
        return None, *grads


def _write(whole: Tensor, places: Ragged, x_SNLV: Tensor) -> None:
    """Write a chunk's tokens to their places in `whole` [T, N, V]."""
    rows = x_SNLV.transpose(1, 2).flatten(0, 1)
    if places.padded_B is not None:
        rows = rows.index_select(0, places.padded_B)
    if places.packed_B is None:
        whole.copy_(rows)
    else:
        whole.index_copy_(0, places.packed_B, rows)


def causal_convolution(x_TC: Tensor, weight_C1W: Tensor, sequences: Sequences) -> Tensor:
    """Return silu of each channel's convolution over a token and the W - 1 before it in its sequence, [T, C]."""
    num_tokens, num_channels = x_TC.shape
    num_rows = num_tokens + sequences.gap * (sequences.cu_seqlens_S1.numel() - 1)
    assert sequences.gap == weight_C1W.shape[-1] - 1, "the gaps keep sequences apart"
    padded_RC = place(x_TC, None, sequences.gapped_T, num_rows)
    out_1CR = F.conv1d(padded_RC.t()[None], weight_C1W, groups=num_channels)
    return F.silu(place(out_1CR[0].t(), sequences.gapped_T - sequences.gap, None, num_tokens))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x times silu(gate); rounded where transformers' Qwen3_5RMSNormGated rounds."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    return (weight.to(x.dtype) * normed * F.silu(gate.float())).to(x.dtype)


def _recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call a cheap function, of which autograd keeps only the inputs."""
    out: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return out


class _Weight(torch.nn.Module):
    """A weight under the name that Megatron's module for it would give it."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class GatedDeltaNet(torch.nn.Module):
    """Linear attention for a Megatron layer spec, in place of SelfAttention; needs `PackedSequences.sequences`.

    Args:
        sizes: the whole layer's; tensor ranks split its heads.
        column, row: the classes of the parallel linears.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: LinearAttention,
        column: type,
        row: type,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        self.tensor_group = pg_collection.tp
        ranks = config.tensor_model_parallel_size
        self.num_heads, keys, values = (x // ranks for x in (sizes.num_value_heads, sizes.keys, sizes.values))
        self.parts = [2 * keys + values, values, self.num_heads, self.num_heads]  # queries, keys, values; z; b; a
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tensor_group}
        self.in_proj = column(
            config.hidden_size,
            ranks * sum(self.parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.conv1d = _Weight(self._split_parameter(2 * keys + values, 1, sizes.conv_width))
        self.A_log, self.dt_bias = self._split_parameter(self.num_heads), self._split_parameter(self.num_heads)
        self.out_norm = _Weight(torch.nn.Parameter(torch.empty(sizes.value_dim, dtype=config.params_dtype)))
        self.out_proj = row(
            sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def _split_parameter(self, *size: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(*size, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self, hidden_T1H: Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return [T or T / tensor, 1, H], and no bias."""
        sequences = packed_seq_params.sequences
        assert sequences is not None, "PolicyModel.describe makes them"
        mixed_T1X, _ = self.in_proj(hidden_T1H)
        qkv_TC, z, b_TN, a_TN = mixed_T1X[:, 0].split(self.parts, dim=-1)
        convolve = partial(causal_convolution, sequences=sequences)
        qkv_TC = _recomputed(convolve, qkv_TC, self.conv1d.weight)
        keys = (self.parts[0] - self.parts[1]) // 2
        q, k, v = qkv_TC.split([keys, keys, self.parts[1]], dim=-1)
        q_TKD, k_TKD = (x.unflatten(-1, (-1, self.sizes.key_dim)) for x in (q, k))
        v_TNV, z_TNV = (x.unflatten(-1, (-1, self.sizes.value_dim)) for x in (v, z))
        g_TN = -self.A_log.float().exp() * F.softplus(a_TN.float() + self.dt_bias.float())
        out_TNV = delta_rule(q_TKD, k_TKD, v_TNV, g_TN, b_TN.sigmoid(), sequences)
        # each rank applies it to its own heads, so its gradient is a sum over the ranks
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight.float(), group=self.tensor_group)
        out_TNV = _recomputed(partial(gated_norm, eps=self.config.layernorm_epsilon), out_TNV, z_TNV, weight)
        return self.out_proj(out_TNV.flatten(1)[:, None])

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: checkpoints are written from parameters."""
        return {}
