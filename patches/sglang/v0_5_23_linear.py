"""Operators of SGLang 0.5.23's Gated DeltaNet models (Qwen3.5, Qwen3.5-MoE) in torch, for a machine without CUDA.

Why: on a CPU, the model (srt/models/qwen3_5.py), its linear attention (srt/layers/attention/linear/gdn_backend.py and
kernels/gdn_triton.py) and its norm (kernels/ops/attention/fla/layernorm_gated.py) take these ten from SGLang's CPU
build of sgl_kernel. Its mixtures add the shared expert in a Triton kernel, also on a CPU (srt/models/qwen2_moe.py:877).

How: `register` defines operators in torch's namespace `sgl_kernel`, and `MAMBA` holds the functions of the module
`sgl_kernel.mamba`. They compute in float32, as the triton kernels do, and update the states of requests in place. The
function with the kernel is replaced before models import it.

When it can go: with the placeholder of sgl_kernel in `v0_5_23.py`.

Shape legend: T tokens of all requests, R requests, C channels of the convolution, W its width, K key heads, N value
heads, D key head dimension, V value head dimension, S slots of states
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_EPS = 1e-6


def _requests(starts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each request's number and its tokens, from the first token of each and the end [R + 1]."""
    bounds = starts.tolist()
    return enumerate(slice(first, end) for first, end in pairwise(bounds))


def causal_conv1d_fn_cpu(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve new tokens of several requests, each behind the last inputs in its slot of conv_states [S, C, W - 1]."""
    out_CT = torch.empty_like(x_CT)
    for request, tokens in _requests(query_start_loc):
        state_CW = conv_states[cache_indices[request]]
        before_CW = state_CW if has_initial_state[request] else torch.zeros_like(state_CW)
        line_CT = torch.cat((before_CW.to(x_CT.dtype), x_CT[:, tokens]), 1)
        out_CT[:, tokens] = F.conv1d(line_CT[None], weight_CW[:, None], bias_C, groups=len(x_CT))[0]
        state_CW.copy_(line_CT[:, -state_CW.shape[1] :])
    return _activated(out_CT, activation)


def causal_conv1d_update_cpu(
    x_RC: Tensor,
    conv_states: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve one new token of each request."""
    slots = conv_state_indices.long()
    line_RCW = torch.cat((conv_states[slots].to(x_RC.dtype), x_RC[..., None]), -1)
    conv_states[slots] = line_RCW[..., 1:].to(conv_states.dtype)
    return _activated(F.conv1d(line_RCW, weight_CW[:, None], bias_C, groups=len(weight_CW))[..., 0], activation)


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Apply the gated delta rule to new tokens of several requests, token by token.

    Args:
        q, k: [1, T, K, D]; v: [1, T, N, V]; g: logarithms of the decay, beta: float32 [1, T, N].
        initial_state: states [S, N, V, D].

    Returns: outputs [1, T, N, V]; SGLang uses neither of the others on a CPU.
    """
    out = torch.empty_like(v)
    for request, tokens in _requests(cu_seqlens):
        slot = initial_state[initial_state_indices[request]]
        state = slot.float()[None]
        for t in range(tokens.start, tokens.stop):
            out[0, t], state = _step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        slot.copy_(state[0])
    return out, None, None


MAMBA: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
}


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Apply the gated delta rule to one new token of each request: q, k [1, R, K, D], v [1, R, N, V], a, b [R, N]."""
    slots = initial_state_indices.long()
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, state = _step(q[0], k[0], v[0], g[0], beta[0], initial_state_source[slots].float())
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return out[None].to(v.dtype)


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and beta, float32 [1, T, N]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Normalise each head of q and k, with weights 1 + w: [T * heads, D]."""
    heads = ((q, q_weight), (k, k_weight))
    normed_q, normed_k = (
        (_normed(x.reshape(-1, head_dim), eps) * (1 + weight.float())).to(x.dtype) for x, weight in heads
    )
    return normed_q, normed_k


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take query and gate of each head apart, and normalise q and k: three times [T * heads, D]."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the input projections into q, k and v together [T, C], z [T, N, V], b and a [T, N]."""
    values = num_v_heads * v_dim
    qkv, z = qkvz.split((2 * num_k_heads * k_dim + values, values), -1)
    b, a = ba.chunk(2, -1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, v_dim).contiguous(), b.contiguous(), a.contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by the sigmoid of its gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """Normalise each head's output, and multiply it by silu(z)."""
    return (weight.float() * _normed(x, eps) * F.silu(z.float())).to(x.dtype)


def fused_gate_sigmoid_mul_add(x_TE: Tensor, gate_E: Tensor, shared_TE: Tensor, out_TE: Tensor) -> None:
    """Add the shared expert's output, times its gate, to `out_TE`. E: hidden size."""
    gate_T1 = (x_TE.float() @ gate_E.float()[:, None]).sigmoid()
    out_TE.copy_(out_TE.float() + gate_T1 * shared_TE.float())


OPERATORS: dict[Callable[..., Any], tuple[str, ...]] = {  # and the arguments that each changes
    fused_sigmoid_gating_delta_rule_update_cpu: ("initial_state_source",),
    fused_gdn_gating_cpu: (),
    fused_qk_gemma_rmsnorm_cpu: (),
    fused_qk_gemma_rmsnorm_with_gate_cpu: (),
    fused_qkvzba_split_reshape_cat_contiguous_cpu: (),
    fused_sigmoid_mul_cpu: ("x",),
    fused_rmsnorm_gated_cpu: (),
}


def register(library: torch.library.Library) -> None:
    """Define the operators in the namespace `sgl_kernel`, unless a real one has, and use the norm on any CPU."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    for function, changed in OPERATORS.items():
        name = function.__name__
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(name + torch.library.infer_schema(function, mutates_args=changed))
            library.impl(name, function, "CPU")
    layernorm_gated._use_cpu = True  # otherwise only on CPUs with AMX
    elementwise.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return F.silu(x) if activation in ("silu", "swish") else x


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length 1, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule to one token of each request: q, k [R, K, D], v [R, N, V], g, beta [R, N], state [R, N, V, D]."""
    q, k = (_unit(x).repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
    state = g.exp()[..., None, None] * state
    written = beta[..., None] * (v.float() - (state @ k[..., None])[..., 0])
    state = state + written[..., None] * k[:, :, None]
    return (state @ q[..., None])[..., 0] * q.shape[-1] ** -0.5, state
