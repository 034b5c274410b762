"""The gated delta rule of Gated DeltaNet layers, in torch and float32.

For each token of a head: state = exp(decay) * state; state += beta * k (v - k state); out = q state. Before that,
queries and keys are scaled to length 1, and queries by 1 / sqrt(D), as in transformers/models/qwen3_5.

Shape legend: B rows, T tokens, K key heads, N value heads (each K heads of q and k serve N / K neighbours), D key head
dimension, V value head dimension
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64  # tokens between two states; within them, the rule is a triangular system
_EPS = 1e-6


def delta_rule(
    q_BTKD: Tensor,
    k_BTKD: Tensor,
    v_BTNV: Tensor,
    decay_BTN: Tensor,
    beta_BTN: Tensor,
    state_BNDV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to whole rows. Tokens with decay and beta 0 leave the state as it is.

    Args:
        decay_BTN: logarithm of the state's decay, float32 and at most 0.
        state_BNDV: the state before the first token; None means zero.

    Returns: outputs float32 [B, T, N, V], and the state after the last token float32 [B, N, D, V].
    """
    num_tokens, num_heads = v_BTNV.shape[1:3]
    length = min(_CHUNK, num_tokens)

    def chunks(x: Tensor) -> Tensor:  # [B, T, N, ...] -> [chunks, B, N, length, ...]
        x = x.float().transpose(1, 2)
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, -num_tokens % length))
        return x.unflatten(2, (-1, length)).movedim(2, 0)

    q, k = (chunks(x) for x in _scaled(q_BTKD, k_BTKD, num_heads))
    v, decay, beta = chunks(v_BTNV), chunks(decay_BTN).cumsum(-1), chunks(beta_BTN)[..., None]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, float("-inf")).exp()
    grown, rest = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    # What each token writes is its own value, minus what earlier tokens of the chunk wrote along its key (`v_own`),
    # minus what the state before the chunk holds there (`k_own` times that state).
    overlap = (beta * k) @ k.mT * between
    written = torch.cat((beta * v, beta * grown * k), -1)
    v_own, k_own = torch.linalg.solve_triangular(overlap, written, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    seen, from_state, into_state = q @ k.mT * between, q * grown, (k * rest).mT
    state = q.new_zeros(*into_state.shape[1:4], v.shape[-1]) if state_BNDV is None else state_BNDV.float()
    outputs = []
    for number in range(len(q)):
        new = v_own[number] - k_own[number] @ state
        outputs.append(from_state[number] @ state + seen[number] @ new)
        state = grown[number, :, :, -1:] * state + into_state[number] @ new
    return torch.cat(outputs, 2)[:, :, :num_tokens].transpose(1, 2), state


def delta_step(
    q_BKD: Tensor, k_BKD: Tensor, v_BNV: Tensor, decay_BN: Tensor, beta_BN: Tensor, state_BNDV: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to one token of each row; see `delta_rule`.

    Returns: outputs float32 [B, N, V], and the state after the token float32 [B, N, D, V].
    """
    q_BND, k_BND = _scaled(q_BKD, k_BKD, v_BNV.shape[1])
    state = decay_BN.exp()[..., None, None] * state_BNDV
    held_BNV = (k_BND[:, :, None] @ state)[:, :, 0]
    written_BNV = beta_BN[..., None] * (v_BNV.float() - held_BNV)
    state = state + k_BND[..., None] * written_BNV[:, :, None]
    return (q_BND[:, :, None] @ state)[:, :, 0], state


def _scaled(q: Tensor, k: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Scale queries and keys [..., K, D], and repeat their heads: float32 [..., N, D]."""
    scale = q.shape[-1] ** -0.5

    def scaled(x: Tensor, scale: float) -> Tensor:
        x = x.float()
        x = x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) * scale)
        return x.repeat_interleave(num_heads // x.shape[-2], -2)

    return scaled(q, scale), scaled(k, 1.0)
