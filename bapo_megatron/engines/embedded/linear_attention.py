"""Gated DeltaNet layers: instead of keys and values of all tokens, a row holds one state, which each token changes.

Shape legend: B rows, T new tokens per row, E hidden size, C channels of the convolution, W its width, N value heads,
D key head dimension, V value head dimension
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.hf.shape import RULE_CHUNK, LinearAttention
from bapo_megatron.kernels.delta_rule import rule_of_chunk, rule_of_token


def linear_attention(
    x_BTE: Tensor,
    weights: dict[str, Tensor],
    sizes: LinearAttention,
    norm_eps: float,
    inputs_BCW: Tensor,
    state_BNDV: Tensor,
    lengths_B: Tensor | None,
) -> Tensor:
    """Compute one layer for new tokens of each row, [B, T, E], and move the row's state past them.

    Args:
        weights: by name within the layer.
        inputs_BCW: the convolution's last W - 1 inputs, changed in place.
        state_BNDV: the delta rule's state, float32, changed in place.
        lengths_B: int64, how many of each row's tokens are not padding; None means all.
    """
    num_heads, (num_rows, num_tokens, _) = sizes.num_value_heads, x_BTE.shape
    projected = F.linear(x_BTE, weights["self_attention.in_proj.weight"])
    qkv_BTC, z, b_BTN, a_BTN = projected.split((sizes.conv_channels, sizes.values, num_heads, num_heads), -1)
    line_BCT = torch.cat((inputs_BCW, qkv_BTC.mT), -1)
    ends_B = x_BTE.new_full((num_rows,), num_tokens, dtype=torch.int64) if lengths_B is None else lengths_B
    last_BW = ends_B[:, None] + torch.arange(inputs_BCW.shape[-1])
    inputs_BCW.copy_(line_BCT.gather(2, last_BW[:, None].expand_as(inputs_BCW)))
    conv = weights["self_attention.conv1d.weight"]
    mixed_BTC = F.silu(F.conv1d(line_BCT, conv, groups=len(conv))).mT
    q, k, v = mixed_BTC.split((sizes.keys, sizes.keys, sizes.values), -1)
    q, k = (x.unflatten(-1, (-1, sizes.key_dim)) for x in (q, k))
    v, z = (x.unflatten(-1, (-1, sizes.value_dim)) for x in (v, z))
    speed_N = -weights["self_attention.A_log"].float().exp()
    decay_BTN = speed_N * F.softplus(a_BTN.float() + weights["self_attention.dt_bias"].float())
    beta_BTN = b_BTN.float().sigmoid()
    if num_tokens == 1:
        q, k, v, decay_BN, beta_BN = (x[:, 0] for x in (q, k, v, decay_BTN, beta_BTN))
        out_BNV, state = rule_of_token(q, k, v, decay_BN, beta_BN, state_BNDV)
        out_BTNV = out_BNV[:, None]
    else:
        is_padding = (torch.arange(num_tokens) >= ends_B[:, None])[..., None]
        decay_BTN, beta_BTN = (x.masked_fill(is_padding, 0) for x in (decay_BTN, beta_BTN))
        heads_first = (x.transpose(1, 2) for x in (q, k, v, decay_BTN[..., None], beta_BTN[..., None]))
        outs, state = [], state_BNDV
        for chunk in zip(*(x.split(RULE_CHUNK, dim=2) for x in heads_first), strict=True):
            out_BNLV, state = rule_of_chunk((*chunk, state))
            outs.append(out_BNLV)
        out_BTNV = torch.cat(outs, 2).transpose(1, 2)
    state_BNDV.copy_(state)
    out = out_BTNV.float()  # rounded as in transformers: the output, the norm and the product with the gate
    normed = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps)).to(x_BTE.dtype)
    gated = (weights["self_attention.out_norm.weight"] * normed * F.silu(z.float())).to(x_BTE.dtype)
    return F.linear(gated.flatten(2), weights["self_attention.out_proj.weight"])
