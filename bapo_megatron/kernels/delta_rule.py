"""The gated delta rule of Gated DeltaNet layers in torch, in float32: a chunk of tokens, or one token, of each row.

For each token of a head: state = exp(g) * state; state += beta * k (v - k state); out = q state. Before that, queries
and keys are scaled to length 1, and queries by 1 / sqrt(D), as in transformers/models/qwen3_5.

Shape legend: S rows, L tokens of a chunk, K key heads, N value heads (each K head serves N / K neighbours), D key head
    dimension, V value head dimension
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NORM_EPS = 1e-6  # inside the root of the norms of queries and keys, as in transformers


def rule_of_chunk(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a chunk's answers [S, N, L, V], in the type of v, and the states after it; float64 inputs stay float64.

    Args:
        inputs: q and k [S, K, L, D], v [S, N, L, V], g (at most 0) and beta [S, N, L, 1], the states before
            [S, N, D, V]. A token with g and beta 0, as padding has, leaves the state as it is.

    What each token teaches depends on what the tokens before it have taught: a triangular system of equations, whose
    solution is linear in the state before the chunk. Source: Yang et al., "Gated Delta Networks" (2024), section 3.3.
    """
    q, k, v, g, beta, state = map(wide, inputs)
    q, k = (_normalised(x).repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = g.cumsum(dim=-2)  # since the start of the chunk
    lower_LL = torch.ones(g.shape[-2], g.shape[-2], dtype=g.dtype, device=g.device).tril()
    # [S, N, L, L], from column to row; added up for each pair, as a difference of large sums is coarse
    between = (lower_LL @ (g * lower_LL.tril(-1))).masked_fill(lower_LL == 0, -torch.inf).exp()
    system = (beta * (k @ k.mT) * between).tril(-1)
    right = torch.cat((beta * v, beta * decay.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    taught, recalling = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    taught = taught - recalling @ state
    out = (q * decay.exp()) @ state + (q @ k.mT * between) @ taught
    return out.to(inputs[2].dtype), decay[..., -1:, :].exp() * state + (k.mT * between[..., -1:, :]) @ taught


def rule_of_token(
    q_SKD: Tensor, k_SKD: Tensor, v_SNV: Tensor, g_SN: Tensor, beta_SN: Tensor, state_SNDV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `rule_of_chunk` of one token of each row, in fewer steps: answers [S, N, V] and the states after it."""
    q, k, v, g, beta, state = map(wide, (q_SKD, k_SKD, v_SNV, g_SN, beta_SN, state_SNDV))
    q, k = (_normalised(x).repeat_interleave(v.shape[1] // k.shape[1], dim=1)[:, :, None] for x in (q, k))
    state = g.exp()[..., None, None] * state
    taught = beta[..., None, None] * (v[:, :, None] - k @ state)
    state = state + k.mT * taught
    return (q * q.shape[-1] ** -0.5 @ state)[:, :, 0].to(v_SNV.dtype), state


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it has that type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPS)
