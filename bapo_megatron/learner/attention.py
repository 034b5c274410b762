"""Causal attention over packed sequences in plain torch, for machines without Transformer Engine.

Sequences of similar length are laid side by side in padded blocks, one call of scaled_dot_product_attention per block.
Padding stands at the end of a sequence, where a causal query never looks, so the result is exact.

Shape legend: T packed tokens, N query heads, K key-value heads, D head dimension, S sequences of a block, L its length
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length: where their tokens are in the pack, and where in the padded block."""

    packed_B: Tensor  # int64, tokens of these sequences in the pack
    padded_B: Tensor  # int64, the same tokens in the block, flattened to [S * L]
    num_sequences: int
    length: int


def make_blocks(cu_seqlens_S1: Tensor) -> list[Block]:
    """Sort sequences into blocks whose lengths differ by less than a factor of two, so padding stays under half.

    Args:
        cu_seqlens_S1: int [S + 1], starts with 0, ends with the number of packed tokens.
    """
    starts_S, lengths_S = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long()
    powers_S = torch.where(lengths_S > 0, lengths_S.double().log2().floor().long(), -1)
    blocks = []
    for power in powers_S.unique().tolist():
        if power < 0:
            continue  # empty sequences have no tokens
        chosen = powers_S == power
        starts, lengths = starts_S[chosen], lengths_S[chosen]
        longest = int(lengths.max())
        position_SL = torch.arange(longest, device=lengths.device).expand(lengths.numel(), longest)
        is_token_SL = position_SL < lengths[:, None]
        packed_B = (starts[:, None] + position_SL)[is_token_SL]
        blocks.append(Block(packed_B, is_token_SL.flatten().nonzero()[:, 0], lengths.numel(), longest))
    return blocks


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with the blocks that `PackedAttention` works on, built once for all layers.

    `qkv_format` is "sbhd" with a batch of one: rotary embeddings then apply as one multiplication over all tokens,
    where the "thd" path of rope_utils.py splits and concatenates per sequence in every layer.
    """

    blocks: list[Block] | None = None

    @classmethod
    def of(cls, cu_seqlens_S1: Tensor) -> PackedSequences:
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens_S1,
            cu_seqlens_kv=cu_seqlens_S1,
            blocks=make_blocks(cu_seqlens_S1),
        )


class _Place(torch.autograd.Function):
    """out[into] = x[of], zero elsewhere; no row appears twice, so the backward is the same with both swapped."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, of_B: Tensor, into_B: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(of_B, into_B)
        ctx.num_rows = x.shape[0]  # type: ignore[attr-defined]
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, into_B, x.index_select(0, of_B))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        of_B, into_B = ctx.saved_tensors
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return out.index_copy_(0, of_B, grad.index_select(0, into_B)), None, None, None


class PackedAttention(torch.nn.Module):
    """Core attention for a Megatron layer spec; takes what DotProductAttention takes, needs `PackedSequences`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None: 1 / sqrt(head dimension)

    def forward(
        self,
        q_T1ND: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Returns [T, 1, N * D]."""
        assert packed_seq_params is not None, "this attention is for packed sequences only"
        assert packed_seq_params.blocks is not None, "use PackedSequences.of"
        num_tokens = q_T1ND.shape[0]
        out_T = None
        for block in packed_seq_params.blocks:
            q, k, v = (self._pad(x[:, 0], block) for x in (q_T1ND, k_T1KD, v_T1KD))
            out_SNLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            out_BX = out_SNLD.transpose(1, 2).reshape(block.num_sequences * block.length, -1)
            part_T = _Place.apply(out_BX, block.padded_B, block.packed_B, num_tokens)
            out_T = part_T if out_T is None else out_T + part_T
        assert out_T is not None, "a pack holds at least one token"
        return out_T[:, None]

    @staticmethod
    def _pad(x_TND: Tensor, block: Block) -> Tensor:
        """Packed [T, heads, D] to the block's [S, heads, L, D]."""
        padded = _Place.apply(x_TND, block.packed_B, block.padded_B, block.num_sequences * block.length)
        return padded.unflatten(0, (block.num_sequences, block.length)).transpose(1, 2)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save: attention has no parameters."""
        return {}
