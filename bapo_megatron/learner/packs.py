"""Descriptions of a pack of sequences, made once for all layers: data, which the attentions and the routers read.

Start at `PackedSequences`: Megatron hands it to every layer.

    PackedSequences -> blocks (Ragged)     attention.py
                    -> sequences, chunks   linear_attention.py
                    -> routes              replay.py

Shape legend: T packed tokens of this rank, U tokens of the whole pack, S sequences, Q and L the lengths of the longest
    queries and keys of a block, D head dimension, K key-value heads; in routes, L layers, K experts that a token
    chooses, C experts
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bapo_megatron.buffer.packing import context_tokens
from bapo_megatron.hf.shape import RULE_CHUNK
from bapo_megatron.learner.elementwise import Rotation
from bapo_megatron.tokens import TokenStream

# an argument of Transformer Engine's attention; without it, each layer compares lengths with and without padding, which
# makes the CPU wait for the GPU
HAS_GAPS = "pad_between_seqs"
KINDS = 3  # rows that are replayed, rows without recorded experts, rows of padding


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
    keys_U: Tensor | None = None  # int64, for Transformer Engine: places of the keys; None means the tokens' own

    @classmethod
    def of(
        cls,
        cu_seqlens_S1: Tensor,
        context_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        follows_S: Tensor | None = None,
    ) -> PackedSequences:
        """Describe a pack, whose lengths are on the CPU, for `PackedAttention` on `device`.

        Args:
            follows_S: see `MicroBatch`; None with context parallelism.
        """
        rank, size = (context_group.rank(), context_group.size()) if context_group is not None else (0, 1)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens_S1,
            cu_seqlens_kv=cu_seqlens_S1,
            blocks=make_blocks(cu_seqlens_S1, rank, size, device, follows_S),
            context_group=context_group if size > 1 else None,
        )

    @classmethod
    def for_transformer_engine(
        cls,
        cu_seqlens_S1: Tensor,
        context_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        follows_S: Tensor | None = None,
    ) -> PackedSequences:
        """Describe a pack, whose lengths are on the CPU, for `TransformerEngineAttention`.

        That module has its own context group.
        """
        longest, device = int(cu_seqlens_S1.diff().max()), device or cu_seqlens_S1.device
        if follows_S is not None:
            starts_S, lengths_S = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long()
            num_before_S = torch.where(follows_S >= 0, lengths_S[follows_S], 0)
            keys = Ragged.after(starts_S[follows_S], num_before_S, starts_S, lengths_S)
            cu_keys_S1 = torch.cat([cu_seqlens_S1[:1], (num_before_S + lengths_S).cumsum(0).to(cu_seqlens_S1)])
            assert keys.packed_B is not None
            return cls(
                qkv_format="sbhd",
                cu_seqlens_q=cu_seqlens_S1.to(device, non_blocking=True),
                cu_seqlens_kv=cu_keys_S1.to(device, non_blocking=True),
                max_seqlen_q=longest,
                max_seqlen_kv=keys.length,
                keys_U=keys.packed_B.to(device, non_blocking=True),
            )
        cu_seqlens_S1 = cu_seqlens_S1.to(device, non_blocking=True)
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
        setattr(pack, HAS_GAPS, False)
        return pack

    def gather(self, k_T1KD: Tensor, v_T1KD: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values [U, K, D] of all context ranks in rank order; the backward sums over the ranks."""
        if self.context_group is None:
            return k_T1KD[:, 0], v_T1KD[:, 0]
        both = torch.cat((k_T1KD[:, 0], v_T1KD[:, 0]), dim=1)
        k_UKD, v_UKD = gather_from_sequence_parallel_region(both, group=self.context_group).chunk(2, dim=1)
        return k_UKD, v_UKD


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length, and the keys that each query sees."""

    queries: Ragged  # among this rank's tokens
    keys: Ragged  # among the gathered tokens
    visible_S1QL: Tensor | None  # bool; None means plain causal attention among the same tokens


@dataclass(frozen=True, slots=True)
class Ragged:
    """Places of some tokens of each of S sequences, in the pack and in the padded block."""

    packed_B: Tensor | None  # int64; None means all tokens of the pack, in order
    padded_B: Tensor | None  # int64, the same tokens in the block flattened to [S * length]; None means all, in order
    num_sequences: int
    length: int
    repeats: bool = False  # whether a token of the pack is in several sequences

    @classmethod
    def after(cls, before_starts_S: Tensor, before_lengths_S: Tensor, starts_S: Tensor, lengths_S: Tensor) -> Ragged:
        """Select for each s the tokens of one range, and then of another one; ranges may overlap between sequences.

        Example: starts 0 and 0 with lengths 2 and 2 before starts 2 and 3 with lengths 1 and 2 select 0 1 2 | 0 1 3 4.
        """
        totals_S = before_lengths_S + lengths_S
        length = int(totals_S.max())
        position_SL = torch.arange(length).expand(totals_S.numel(), length)
        is_token_SL = position_SL < totals_S[:, None]
        own_SL = (starts_S - before_lengths_S)[:, None] + position_SL
        packed_SL = torch.where(position_SL < before_lengths_S[:, None], before_starts_S[:, None] + position_SL, own_SL)
        padded_B = None if bool(is_token_SL.all()) else is_token_SL.flatten().nonzero()[:, 0]
        return cls(packed_SL[is_token_SL], padded_B, totals_S.numel(), length, repeats=True)

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
        padded = place(x_TND, self.packed_B, self.padded_B, self.num_sequences * self.length, repeats=self.repeats)
        return padded.unflatten(0, (self.num_sequences, self.length)).transpose(1, 2)

    def unpad(self, x_SNLD: Tensor, num_tokens: int) -> Tensor:
        """Pack [S, heads, length, D] as [T, heads * D], with zeros for tokens of other blocks."""
        x_BX = x_SNLD.transpose(1, 2).reshape(self.num_sequences * self.length, -1)
        return place(x_BX, self.padded_B, self.packed_B, num_tokens)


def make_blocks(
    cu_seqlens_S1: Tensor,
    context_rank: int = 0,
    context_size: int = 1,
    device: torch.device | None = None,
    follows_S: Tensor | None = None,
) -> list[Block]:
    """Sort sequences into blocks whose lengths differ by less than a factor of two: padding stays under half.

    With context parallelism, each of the rank's two chunks of the sequences forms its own block. Sequences that follow
    another one form blocks of their own, sorted by their keys too, which include the other one's.

    Args:
        cu_seqlens_S1: int [S + 1] on the CPU: where the whole pack's sequences start, from 0, and its number of tokens.
        device: where the tokens are; None means the CPU.
        follows_S: see `MicroBatch`; None with context parallelism.
    """
    device = device or cu_seqlens_S1.device
    starts_S, lengths_S, num_tokens = cu_seqlens_S1[:-1].long(), cu_seqlens_S1.diff().long(), int(cu_seqlens_S1[-1])
    num_chunks = 1 if context_size == 1 else 2 * context_size
    mine = (0,) if context_size == 1 else (context_rank, num_chunks - 1 - context_rank)
    gathered_U = _gathered_places(cu_seqlens_S1, context_size)
    powers_S = torch.where(lengths_S > 0, lengths_S.double().log2().floor().long(), -1)
    blocks = []
    if follows_S is not None:
        assert context_size == 1, "context parallelism takes whole sequences"
        blocks = _blocks_after(starts_S, lengths_S, powers_S, follows_S, num_tokens, device)
        powers_S = torch.where(follows_S >= 0, -1, powers_S)
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


def _blocks_after(
    starts_S: Tensor, lengths_S: Tensor, powers_S: Tensor, follows_S: Tensor, num_tokens: int, device: torch.device
) -> list[Block]:
    """Return blocks of sequences that follow another: a query sees all of that one, and its own up to itself."""
    num_before_S = lengths_S[follows_S]
    key_powers_S = (num_before_S + lengths_S).double().log2().floor().long()
    is_later_S = (follows_S >= 0) & (lengths_S > 0)
    blocks = []
    for kind in torch.stack([powers_S, key_powers_S], 1)[is_later_S].unique(dim=0):
        chosen = is_later_S & (powers_S == kind[0]) & (key_powers_S == kind[1])
        before_S, before_lengths_S = starts_S[follows_S[chosen]], num_before_S[chosen]
        queries = Ragged.of(starts_S[chosen], lengths_S[chosen], num_tokens)
        keys = Ragged.after(before_S, before_lengths_S, starts_S[chosen], lengths_S[chosen])
        visible = _visible(before_lengths_S.to(device, non_blocking=True), queries.length, keys.length)
        blocks.append(Block(queries.to(device), keys.to(device), visible))
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


def place(x: Tensor, of_B: Tensor | None, into_B: Tensor | None, num_rows: int, *, repeats: bool = False) -> Tensor:
    """Return `num_rows` rows with out[into] = x[of], zero elsewhere; None means all rows, in order.

    Args:
        repeats: a row may appear several times in `of`; otherwise, no row appears twice.
    """
    if repeats:
        assert of_B is not None
        x, of_B = x.index_select(0, of_B), None  # its backward adds up the gradients of a row
    out: Tensor = _Place.apply(x, of_B, into_B, num_rows)
    return out


def _place(x: Tensor, of_B: Tensor | None, into_B: Tensor | None, num_rows: int) -> Tensor:
    taken = x if of_B is None else x.index_select(0, of_B)
    return taken if into_B is None else x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, into_B, taken)


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


@dataclass(frozen=True)
class Sequences:
    """The sequences of a pack, described once for all layers."""

    cu_seqlens_S1: Tensor  # int64, on the CPU: where they start, and the number of tokens
    on_device_S1: Tensor  # the same where the tokens are
    gapped_T: Tensor  # int64, on the device: each token's row if `gap` rows stand before each sequence
    gap: int

    @classmethod
    def of(cls, cu_seqlens_S1: Tensor, gap: int = 0, device: torch.device | None = None) -> Sequences:
        """Describe a pack.

        Args:
            cu_seqlens_S1: int [S + 1] on the CPU, from 0; sequences may be empty.
            gap: tokens before a token that the convolution reads.
            device: where the tokens are; None means the CPU. Nothing waits for it.
        """
        cu_seqlens_S1 = cu_seqlens_S1.long().unique_consecutive()  # without empty sequences
        lengths_S = cu_seqlens_S1.diff()
        number_T = torch.arange(1, 1 + lengths_S.numel()).repeat_interleave(lengths_S)
        gapped_T = torch.arange(number_T.numel()) + gap * number_T
        device = device or cu_seqlens_S1.device
        on_device_S1, gapped_T = (x.to(device, non_blocking=True) for x in (cu_seqlens_S1, gapped_T))
        return cls(cu_seqlens_S1, on_device_S1, gapped_T, gap)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The pack cut into chunks, in the order in which `torch_delta_rule` takes them."""
        return make_chunks(self.cu_seqlens_S1, self.on_device_S1.device)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `RULE_CHUNK` tokens of all sequences that have any left."""

    places: Ragged
    from_S: Tensor | None  # int64: their numbers within the chunk before; None means the first chunk


def make_chunks(cu_seqlens_S1: Tensor, device: torch.device) -> list[Chunk]:
    """Cut a pack, described on the CPU, into chunks."""
    starts_S, lengths_S, num_tokens = cu_seqlens_S1[:-1], cu_seqlens_S1.diff(), int(cu_seqlens_S1[-1])
    chunks: list[Chunk] = []
    from_S: Tensor | None = None
    while lengths_S.numel():
        places = Ragged.of(starts_S, lengths_S.clamp(max=RULE_CHUNK), num_tokens)
        chunks.append(Chunk(places.to(device), None if from_S is None else from_S.to(device)))
        from_S = (lengths_S > RULE_CHUNK).nonzero()[:, 0]
        starts_S, lengths_S = starts_S[from_S] + RULE_CHUNK, lengths_S[from_S] - RULE_CHUNK
    return chunks


@dataclass(slots=True)
class PackRoutes:
    """The recorded experts of one pack, and which layers have taken them."""

    rows_TLK: Tensor  # the stage's layers
    is_token_T: Tensor  # bool: not padding
    stream: TokenStream
    counts_LX: Tensor  # int64, the chunk's layers: kinds, kinds when recomputed, rows with other experts, loads [C]
    taken: set[int] = field(default_factory=set)

    def experts(self, index: int, column: int, own_TK: Tensor) -> Tensor:
        """Return the experts of each token in a layer, int64 [T, K], and count them.

        Args:
            index: the layer's place in its chunk.
            column: its place among the stage's layers.
            own_TK: the router's own choice, which rows without recorded experts keep.
        """
        recorded_TK = self.rows_TLK[:, column].long()
        is_recorded_T = is_recorded(recorded_TK, self.stream)
        chosen_TK = torch.where(is_recorded_T[:, None], recorded_TK, own_TK)
        counts_X, is_token_T = self.counts_LX[index], self.is_token_T
        kinds = torch.stack([is_token_T & is_recorded_T, is_token_T & ~is_recorded_T, ~is_token_T]).sum(1)
        if index in self.taken:
            counts_X[KINDS : 2 * KINDS] += kinds
            return chosen_TK
        self.taken.add(index)
        counts_X[:KINDS] += kinds
        is_other_T = (own_TK.sort(1).values != chosen_TK.sort(1).values).any(1)
        counts_X[2 * KINDS] += (is_token_T & is_other_T).sum()
        num_rows_TK = is_token_T.long()[:, None].expand_as(chosen_TK)
        counts_X[2 * KINDS + 1 :].scatter_add_(0, chosen_TK.flatten(), num_rows_TK.flatten())
        return chosen_TK


def is_recorded(rows: Tensor, stream: TokenStream) -> Tensor:
    """Return which rows of experts hold any, bool."""
    assert stream.missing is not None
    return rows[..., 0].ne(stream.missing)
