"""Causal attention over packed sequences, in plain torch or with Transformer Engine's kernels.

In plain torch, sequences of similar length form padded blocks, with one call of scaled_dot_product_attention per block.
The result is exact: padding follows a sequence's tokens, which a causal query never sees.

With context parallelism each rank holds two chunks of every sequence (`buffer.packing.context_tokens`). Each layer
gathers the keys and values of all ranks once, and a mask shows each chunk of queries the keys up to its own end. This
is exact and simple; the price is one layer's keys and values of the whole pack on each rank. Transformer Engine's
attention cuts "thd" packs in the same way, but passes keys around a ring.

Shape legend: T packed tokens of this rank, U tokens of the whole pack, N query heads, K key-value heads, D head
    dimension, S sequences of a block, Q and L the lengths of their longest queries and keys
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # cannot be built without the package
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from bapo_megatron.buffer.packing import context_tokens
from bapo_megatron.learner.elementwise import Rotation, rotate

if TYPE_CHECKING:
    from bapo_megatron.learner.linear_attention import Sequences
    from bapo_megatron.learner.replay import PackRoutes

# an argument of Transformer Engine's attention; without it, each layer compares lengths with and without padding, which
# makes the CPU wait for the GPU
_HAS_GAPS = "pad_between_seqs"


@dataclass(frozen=True, slots=True)
class Ragged:
    """Places of some tokens of each of S sequences, in the pack and in the padded block."""

    packed_B: Tensor | None  # int64; None means all tokens of the pack, in order
    padded_B: Tensor | None  # int64, the same tokens in the block flattened to [S * length]; None means all, in order
    num_sequences: int
    length: int

    @classmethod
    def of(cls, starts_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Ragged:
        """Select the tokens starts_S[s] to starts_S[s] + lengths_S[s] - 1 of a pack of `num_tokens`, for each s."""
        length, num_here = int(lengths_S.max()), int(lengths_S.sum())
        position_SL = torch.arange(length, device=lengths_S.device).expand(lengths_S.numel(), length)
        is_token_SL = position_SL < lengths_S[:, None]
        packed_B = (starts_S[:, None] + position_SL)[is_token_SL]
        padded_B = is_token_SL.flatten().nonzero()[:, 0]
        is_all, is_full = num_here == num_tokens, num_here == is_token_SL.numel()
        return cls(None if is_all else packed_B, None if is_full else padded_B, lengths_S.numel(), length)

    def to(self, device: torch.device) -> Ragged:
        """Return the same places on `device`, copied without waiting for it."""
        packed_B, padded_B = (
            None if x is None else x.to(device, non_blocking=True) for x in (self.packed_B, self.padded_B)
        )
        return replace(self, packed_B=packed_B, padded_B=padded_B)

    def pad(self, x_TND: Tensor) -> Tensor:
        """Pad packed [T, heads, D] with zeros to [S, heads, length, D]."""
        padded = place(x_TND, self.packed_B, self.padded_B, self.num_sequences * self.length)
        return padded.unflatten(0, (self.num_sequences, self.length)).transpose(1, 2)

    def unpad(self, x_SNLD: Tensor, num_tokens: int) -> Tensor:
        """Pack [S, heads, length, D] as [T, heads * D], with zeros for tokens of other blocks."""
        x_BX = x_SNLD.transpose(1, 2).reshape(self.num_sequences * self.length, -1)
        return place(x_BX, self.padded_B, self.packed_B, num_tokens)


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length, and the keys that each query sees."""

    queries: Ragged  # among this rank's tokens
    keys: Ragged  # among the gathered tokens
    visible_S1QL: Tensor | None  # bool; None means plain causal attention among the same tokens


def make_blocks(
    cu_seqlens_S1: Tensor, context_rank: int = 0, context_size: int = 1, device: torch.device | None = None
) -> list[Block]:
    """Sort sequences into blocks whose lengths differ by less than a factor of two: padding stays under half.

    With context parallelism, each of the rank's two chunks of the sequences forms its own block.

    Args:
        cu_seqlens_S1: int [S + 1] on the CPU: where the whole pack's sequences start, from 0, and its number of tokens.
        device: where the tokens are; None means the CPU.
    """
    device = device or cu_seqlens_S1.device
    starts_S, lengths_S, num_tokens = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long(), int(cu_seqlens_S1[-1])
    num_chunks = 1 if context_size == 1 else 2 * context_size
    mine = (0,) if context_size == 1 else (context_rank, num_chunks - 1 - context_rank)
    gathered_U = _gathered_places(cu_seqlens_S1, context_size)
    powers_S = torch.where(lengths_S > 0, lengths_S.double().log2().floor().long(), -1)
    blocks = []
    for power in powers_S.unique().tolist():
        if power < 0:
            continue  # empty sequences have no tokens
        chosen = powers_S == power
        starts, chunk_S = starts_S[chosen], lengths_S[chosen] // num_chunks
        for slot, chunk in enumerate(mine):
            queries = Ragged.of(starts // context_size + slot * chunk_S, chunk_S, num_tokens // context_size)
            keys = queries if gathered_U is None else Ragged.of(starts, (chunk + 1) * chunk_S, num_tokens)
            first_S = (chunk * chunk_S).to(device, non_blocking=True)
            visible = None if chunk == 0 else _visible(first_S, queries.length, keys.length)
            if gathered_U is not None:
                keys = replace(keys, packed_B=gathered_U if keys.packed_B is None else gathered_U[keys.packed_B])
            on_device = queries.to(device)
            blocks.append(Block(on_device, on_device if keys is queries else keys.to(device), visible))
    return blocks


def _visible(first_S: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """Return bool [S, 1, Q, L]: the query at position first_S[s] + q of a sequence sees the keys up to that position.

    Padding queries see keys too: softmax over none would be nan.
    """
    queries_SQ = first_S[:, None] + torch.arange(num_queries, device=first_S.device)
    return (torch.arange(num_keys, device=first_S.device) <= queries_SQ[:, :, None])[:, None]


def _gathered_places(cu_seqlens_S1: Tensor, context_size: int) -> Tensor | None:
    """Return each token's place after gathering all context ranks, int64 [U]; None means its place in the pack."""
    if context_size == 1:
        return None
    return torch.cat([context_tokens(cu_seqlens_S1, rank, context_size) for rank in range(context_size)]).argsort()


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with the blocks of `PackedAttention`, built once for all layers.

    `qkv_format` is "sbhd" with a batch of one, so rotary embeddings are one multiplication over all tokens; the "thd"
    path of rope_utils.py splits and concatenates per sequence in every layer.
    """

    blocks: list[Block] | None = None
    context_group: dist.ProcessGroup | None = None  # None means that this rank holds whole sequences
    rotation: Rotation | None = None  # to apply to this rank's tokens before attention; None means Megatron has done so
    routes: PackRoutes | None = None  # recorded experts for the routers (replay.py)
    sequences: Sequences | None = None  # for layers with linear attention (linear_attention.py)

    @classmethod
    def of(
        cls,
        cu_seqlens_S1: Tensor,
        context_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> PackedSequences:
        """Describe a pack, whose lengths are on the CPU, for `PackedAttention` on `device`."""
        rank, size = (context_group.rank(), context_group.size()) if context_group is not None else (0, 1)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens_S1,
            cu_seqlens_kv=cu_seqlens_S1,
            blocks=make_blocks(cu_seqlens_S1, rank, size, device),
            context_group=context_group if size > 1 else None,
        )

    @classmethod
    def for_transformer_engine(
        cls,
        cu_seqlens_S1: Tensor,
        context_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> PackedSequences:
        """Describe a pack, whose lengths are on the CPU, for `TransformerEngineAttention`.

        That module has its own context group.
        """
        longest = int(cu_seqlens_S1.diff().max())
        cu_seqlens_S1 = cu_seqlens_S1.to(device or cu_seqlens_S1.device, non_blocking=True)
        is_split = context_group is not None and context_group.size() > 1
        padded_S1 = cu_seqlens_S1 if is_split else None  # required with context parallelism
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens_S1,
            cu_seqlens_kv=cu_seqlens_S1,
            cu_seqlens_q_padded=padded_S1,
            cu_seqlens_kv_padded=padded_S1,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def thd(self) -> PackedSeqParams:
        """Describe the same pack for Transformer Engine's attention, as [tokens, heads, head dimension]."""
        names = (field.name for field in fields(PackedSeqParams))
        pack = PackedSeqParams(**{name: getattr(self, name) for name in names} | {"qkv_format": "thd"})
        setattr(pack, _HAS_GAPS, False)
        return pack

    def gather(self, k_T1KD: Tensor, v_T1KD: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values [U, K, D] of all context ranks in rank order; the backward sums over the ranks."""
        if self.context_group is None:
            return k_T1KD[:, 0], v_T1KD[:, 0]
        both = torch.cat((k_T1KD[:, 0], v_T1KD[:, 0]), dim=1)
        k_UKD, v_UKD = gather_from_sequence_parallel_region(both, group=self.context_group).chunk(2, dim=1)
        return k_UKD, v_UKD


def _place(x: Tensor, of_B: Tensor | None, into_B: Tensor | None, num_rows: int) -> Tensor:
    taken = x if of_B is None else x.index_select(0, of_B)
    return taken if into_B is None else x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, into_B, taken)


def place(x: Tensor, of_B: Tensor | None, into_B: Tensor | None, num_rows: int) -> Tensor:
    """Return `num_rows` rows with out[into] = x[of], zero elsewhere; None means all rows, in order. No row appears
    twice."""
    out: Tensor = _Place.apply(x, of_B, into_B, num_rows)
    return out


class _Place(torch.autograd.Function):
    """`place`; as no row appears twice, the backward is the same operation with `of` and `into` swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_B: Tensor | None, into_B: Tensor | None, num_rows: int) -> Tensor:
        ctx.save_for_backward(of_B, into_B)
        ctx.num_rows = x.shape[0]
        return _place(x, of_B, into_B, num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        of_B, into_B = ctx.saved_tensors
        return _place(grad, into_B, of_B, ctx.num_rows), None, None, None


def needs_repeated_heads(device_type: str, dtype: torch.dtype, is_masked: bool) -> bool:
    """Return whether torch's fused attention needs as many key-value heads as query heads.

    On a GPU, only its flash kernel shares them between query heads, and it takes neither float32 nor a mask. Its
    memory-efficient kernel takes both. Without repeated heads, torch would fall back to computing and keeping the
    weights of all pairs of tokens (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return device_type == "cuda" and (dtype == torch.float32 or is_masked)


def attend(
    q_SNQD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    visible_S1QL: Tensor | None,
    scale: float | None,
    *,
    repeat_heads: bool,
) -> Tensor:
    """Return attention [S, N, Q, D]; without a mask it is causal.

    K divides N: each key-value head serves N / K query heads.

    Args:
        repeat_heads: copy keys and values for each query head, instead of letting the kernel share them.
    """
    if repeat_heads:
        copies = q_SNQD.shape[1] // k_SKLD.shape[1]
        k_SKLD, v_SKLD = (x.repeat_interleave(copies, dim=1) for x in (k_SKLD, v_SKLD))
    return F.scaled_dot_product_attention(
        q_SNQD,
        k_SKLD,
        v_SKLD,
        attn_mask=visible_S1QL,
        is_causal=visible_S1QL is None,
        scale=scale,
        enable_gqa=not repeat_heads,
    )


class _CoreAttention(torch.nn.Module):
    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: attention has no parameters."""
        return {}


class PackedAttention(_CoreAttention):
    """Core attention for a Megatron layer spec, with the arguments of DotProductAttention and `PackedSequences`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None means 1 / sqrt(head dimension)

    def forward(
        self,
        q_T1ND: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        *_: Any,
        packed_seq_params: PackedSequences,
        **__: Any,
    ) -> Tensor:
        """Return [T, 1, N * D]."""
        assert packed_seq_params.blocks is not None, "use PackedSequences.of"
        num_tokens = q_T1ND.shape[0]
        if (rotation := packed_seq_params.rotation) is not None:
            q_T1ND, k_T1KD = rotate(q_T1ND, rotation), rotate(k_T1KD, rotation)
        k_UKD, v_UKD = packed_seq_params.gather(k_T1KD, v_T1KD)
        out_TX = None
        for block in packed_seq_params.blocks:
            out_SNQD = attend(
                block.queries.pad(q_T1ND[:, 0]),
                block.keys.pad(k_UKD),
                block.keys.pad(v_UKD),
                block.visible_S1QL,
                self.scale,
                repeat_heads=needs_repeated_heads(q_T1ND.device.type, q_T1ND.dtype, block.visible_S1QL is not None),
            )
            part_TX = block.queries.unpad(out_SNQD, num_tokens)
            out_TX = part_TX if out_TX is None else out_TX + part_TX
        assert out_TX is not None, "a pack holds at least one token"
        return out_TX[:, None]


class TransformerEngineAttention(_CoreAttention):
    """Transformer Engine's core attention, for bfloat16 on GPUs; needs `PackedSequences.for_transformer_engine`.

    It is wrapped because the pack stays "sbhd" outside of core attention (see `PackedSequences`).
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__()
        self.core = TEDotProductAttention(config=config, **kwargs)
        self.core.kept_packed_seq_params.add(_HAS_GAPS)

    def forward(
        self,
        q_T1ND: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        *args: Any,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> Tensor:
        """Return [T, 1, N * D]."""
        if (rotation := packed_seq_params.rotation) is not None:
            q_T1ND, k_T1KD = rotate(q_T1ND, rotation), rotate(k_T1KD, rotation)
        packed = (x[:, 0] for x in (q_T1ND, k_T1KD, v_T1KD))
        out = self.core(*packed, *args, packed_seq_params=packed_seq_params.thd(), **kwargs)
        return out.reshape(q_T1ND.shape[0], 1, -1)
