"""Cut a batch into optimizer steps, data-parallel shares and packed micro-batches.

Every rank computes the same plan from the same batch and seed, and builds only its own share. Loss and statistics do
not depend on the plan: they are sums over tokens, divided by the token count of the whole optimizer step. All padding
for the layout is added here.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from bapo_megatron.types import Batch, MicroBatch, MiniBatch


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of every mini-batch, and the form that its layout needs.

    Example: Share(data_rank=1, data_size=2) holds every other pack, whole and unpadded.
    """

    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0  # context ranks hold the same packs, each a part of every sequence
    context_size: int = 1
    tokens_multiple: int = 1  # a rank's tokens of a pack are a multiple of this (sequence parallelism, FP8)
    packs_multiple: int = 1  # the number of packs is a multiple of this (virtual pipeline)
    equal_lengths: bool = False  # all packs of a data rank have one length (pipeline: stages agree on it once)

    @property
    def num_chunks(self) -> int:
        """Chunks that every sequence is cut into, two for each context rank; a padded sequence is a multiple of it."""
        return 1 if self.context_size == 1 else 2 * self.context_size

    @property
    def pack_multiple(self) -> int:
        """Tokens of a whole pack are a multiple of this."""
        return math.lcm(self.num_chunks, self.context_size * self.tokens_multiple)


def minibatches(
    batch: Batch, *, num_minibatches: int, num_epochs: int, seed: int, max_tokens: int, share: Share
) -> Iterator[MiniBatch]:
    """Yield the optimizer steps of one rollout batch: `num_epochs` passes of `num_minibatches`, newly shuffled.

    Args:
        max_tokens: tokens of one micro-batch on one rank; a longer single sequence gets a micro-batch of its own.
        share: this rank's part and its form; the other ranks call with the same arguments and their own share.
    """
    starts_S = batch.seq_lens_S.cumsum(0) - batch.seq_lens_S
    padded_lens_S = round_up(batch.seq_lens_S, share.num_chunks)
    num_bins_multiple = share.data_size * share.packs_multiple
    for epoch in range(num_epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(batch.num_sequences, generator=generator)
        for part in order.tensor_split(num_minibatches):
            bins = balanced_bins(padded_lens_S[part].tolist(), num_bins_multiple, max_tokens * share.context_size)
            mine = [part[torch.tensor(sorted(b), dtype=torch.int64)] for b in bins[share.data_rank :: share.data_size]]
            num_trained = sum(
                int(batch.mask_T[starts_S[s] : starts_S[s] + batch.seq_lens_S[s]].sum()) for s in part.tolist()
            )
            if num_trained == 0:
                continue  # all its responses are masked: an update would divide by nothing
            lengths = [max(int(padded_lens_S[s].sum()), 1) for s in mine]
            lengths = [round_up(n, share.pack_multiple) for n in lengths]
            if share.equal_lengths:
                lengths = [max(lengths)] * len(lengths)
            packs = [pack(batch, starts_S, s, length, share) for s, length in zip(mine, lengths, strict=True)]
            yield MiniBatch(tuple(packs), num_trained, batch.proximal_version)


def one_minibatch(batch: Batch, *, max_tokens: int, share: Share) -> MiniBatch:
    """Return the whole batch, which has a trained token, as one mini-batch; see `minibatches`."""
    (whole,) = minibatches(batch, num_minibatches=1, num_epochs=1, seed=0, max_tokens=max_tokens, share=share)
    return whole


def balanced_bins(lengths: list[int], multiple: int, max_tokens: int) -> list[list[int]]:
    """Return indices of `lengths` in balanced bins of at most `max_tokens`; their number divides by `multiple`.

    They are as few as packing longest first allows. A bin exceeds `max_tokens` only if it holds a single sequence; bins
    are empty only if there are fewer sequences than bins.
    """
    assert lengths, "an optimizer step needs at least one sequence"
    num_bins = round_up(-(-sum(min(n, max_tokens) for n in lengths) // max_tokens), multiple)
    while True:
        bins = longest_first(lengths, num_bins)
        if all(len(b) <= 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        num_bins += multiple


def longest_first(lengths: list[int], num_bins: int) -> list[list[int]]:
    """Put each sequence, longest first, into the emptiest bin (Graham's rule): within 4/3 of the best balance."""
    heap = [(0, b) for b in range(num_bins)]
    bins: list[list[int]] = [[] for _ in heap]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    return bins


def pack(batch: Batch, starts_S: Tensor, sequences: Tensor, length: int, share: Share) -> MicroBatch:
    """Pack the given sequences, each padded to a multiple of `share.num_chunks`, plus one sequence of padding up to
    `length` tokens; return the part of `share.context_rank`."""
    lens_S = batch.seq_lens_S[sequences]
    padded_lens_S = round_up(lens_S, share.num_chunks)
    missing = length - int(padded_lens_S.sum())
    assert missing >= 0
    padded_lens_S = torch.cat([padded_lens_S, lens_S.new_tensor([missing] if missing else [])])
    cu_seqlens_S1 = torch.cat([padded_lens_S.new_zeros(1), padded_lens_S.cumsum(0)])
    position_ids_T = torch.arange(length) - cu_seqlens_S1[:-1].repeat_interleave(padded_lens_S)

    def of_each_token(values_S: Tensor) -> Tensor:
        values_S = torch.cat([values_S, values_S.new_zeros(padded_lens_S.numel() - values_S.numel())])
        return values_S.repeat_interleave(padded_lens_S)

    is_token_T = position_ids_T < of_each_token(lens_S)
    source_T = of_each_token(starts_S[sequences]) + position_ids_T  # in the batch; meaningless on padding
    token_ids_T = torch.zeros(length, dtype=torch.int64)
    token_ids_T[is_token_T] = batch.token_ids_T[source_T[is_token_T]]
    is_response_T = is_token_T & (position_ids_T >= of_each_token(batch.prompt_lens_S[sequences]))
    response_R = is_response_T.nonzero().squeeze(1)
    mine_T = context_tokens(cu_seqlens_S1, share.context_rank, share.context_size)
    response_R = response_R[torch.isin(response_R - 1, mine_T)]  # a row belongs to the rank that holds its hidden state
    source_R = source_T[response_R]
    return MicroBatch(
        token_ids_T=token_ids_T[mine_T],
        position_ids_T=position_ids_T[mine_T],
        cu_seqlens_S1=cu_seqlens_S1.to(torch.int32),
        rows_R=torch.searchsorted(mine_T, response_R - 1),
        sequence_R=torch.searchsorted(cu_seqlens_S1, response_R, right=True) - 1,
        batch_rows_R=source_R,
        targets_R=token_ids_T[response_R],
        advantages_R=batch.advantages_T[source_R],
        behaviour_logprobs_R=batch.behaviour_logprobs_T[source_R],
        versions_R=batch.versions_T[source_R],
        mask_R=batch.mask_T[source_R],
        proximal_logprobs_R=None if batch.proximal_logprobs_T is None else batch.proximal_logprobs_T[source_R],
        reference_logprobs_R=None if batch.reference_logprobs_T is None else batch.reference_logprobs_T[source_R],
    )


def context_tokens(cu_seqlens_S1: Tensor, rank: int, size: int) -> Tensor:
    """Return the tokens of a pack that a context rank holds: int64, ascending, a `size`-th of each sequence.

    Every sequence is cut into 2 x size equal chunks, of which the rank holds chunks `rank` and 2 x size - 1 - rank: a
    causal query costs more the later its position, so this balances the ranks. Transformer Engine cuts
    packed ("thd") sequences in the same way.
    """
    lens_S = cu_seqlens_S1.diff().long()
    if size == 1:
        return torch.arange(int(lens_S.sum()), device=lens_S.device)
    num_chunks = 2 * size
    assert not (lens_S % num_chunks).any(), f"the sequences of a pack must be multiples of {num_chunks} tokens"
    position_T = torch.arange(int(lens_S.sum()), device=lens_S.device) - cu_seqlens_S1[:-1].repeat_interleave(lens_S)
    chunk_T = position_T * num_chunks // lens_S.repeat_interleave(lens_S)
    return ((chunk_T == rank) | (chunk_T == num_chunks - 1 - rank)).nonzero().squeeze(1)


Count = TypeVar("Count", int, Tensor)


def round_up(number: Count, multiple: int) -> Count:
    """Return the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple
