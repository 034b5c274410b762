"""Cut a batch into optimizer steps, data-parallel shares and packed micro-batches.

Every rank computes the same plan from the same batch and seed, and builds only its own share. Loss and statistics do
not depend on the plan: they are sums over tokens, divided by the token count of the whole optimizer step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import torch
from torch import Tensor

from bapo_megatron.types import Batch, MicroBatch, MiniBatch


def minibatches(
    batch: Batch,
    *,
    num_minibatches: int,
    num_epochs: int,
    seed: int,
    data_rank: int,
    data_size: int,
    max_tokens: int,
    pad_multiple: int = 1,
) -> Iterator[MiniBatch]:
    """The optimizer steps of one rollout batch: `num_epochs` passes of `num_minibatches` each, newly shuffled.

    Args:
        max_tokens: packed tokens in one micro-batch; a longer single sequence gets a micro-batch of its own.
        pad_multiple: micro-batches are padded to a common length that is a multiple of this.
    """
    starts_S = batch.seq_lens_S.cumsum(0) - batch.seq_lens_S
    for epoch in range(num_epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(batch.num_sequences, generator=generator)
        for part in order.tensor_split(num_minibatches):
            bins = balanced_bins(batch.seq_lens_S[part].tolist(), data_size, max_tokens)
            length = max(sum(int(batch.seq_lens_S[part[i]]) for i in b) for b in bins)
            length = max(-(-length // pad_multiple) * pad_multiple, pad_multiple)
            mine = [part[torch.tensor(sorted(b), dtype=torch.int64)] for b in bins[data_rank::data_size]]
            num_trained = sum(
                int(batch.mask_T[starts_S[s] : starts_S[s] + batch.seq_lens_S[s]].sum()) for s in part.tolist()
            )
            if num_trained == 0:
                continue  # all its responses are masked: an update would divide by nothing
            yield MiniBatch(tuple(pack(batch, starts_S, s, length) for s in mine), num_trained)


def balanced_bins(lengths: list[int], data_size: int, max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in micro-batches of at most `max_tokens`, their number a multiple of `data_size`, balanced.

    As few as packing longest first allows. A bin exceeds `max_tokens` only if it holds a single sequence; bins can be
    empty only where there are fewer sequences than bins.
    """
    assert lengths, "an optimizer step needs at least one sequence"
    per_rank = -(-sum(min(n, max_tokens) for n in lengths) // (max_tokens * data_size))
    while True:
        bins = longest_first(lengths, per_rank * data_size)
        if all(len(b) <= 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        per_rank += 1


def longest_first(lengths: list[int], num_bins: int) -> list[list[int]]:
    """Each sequence, longest first, into the emptiest bin (Graham's rule): within 4/3 of the best possible balance."""
    heap = [(0, b) for b in range(num_bins)]
    bins: list[list[int]] = [[] for _ in heap]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    return bins


def pack(batch: Batch, starts_S: Tensor, sequences: Tensor, length: int) -> MicroBatch:
    """The given sequences one after the other, and one sequence of padding up to `length` tokens."""
    lens_S = batch.seq_lens_S[sequences]
    num_padding = length - int(lens_S.sum())
    assert num_padding >= 0
    all_lens = torch.cat([lens_S, lens_S.new_tensor([num_padding] if num_padding else [])])
    cu_seqlens_S1 = torch.cat([all_lens.new_zeros(1), all_lens.cumsum(0)])
    position_ids_T = torch.arange(length) - cu_seqlens_S1[:-1].repeat_interleave(all_lens)
    source_T = starts_S[sequences].repeat_interleave(lens_S) + position_ids_T[: length - num_padding]
    token_ids_T = torch.cat([batch.token_ids_T[source_T], torch.zeros(num_padding, dtype=torch.int64)])

    prompt_lens_T = batch.prompt_lens_S[sequences].repeat_interleave(lens_S)
    response_R = (position_ids_T[: length - num_padding] >= prompt_lens_T).nonzero().squeeze(1)
    from_batch_R = source_T[response_R]
    return MicroBatch(
        token_ids_T=token_ids_T,
        position_ids_T=position_ids_T,
        cu_seqlens_S1=cu_seqlens_S1.to(torch.int32),
        rows_R=response_R - 1,
        batch_rows_R=from_batch_R,
        targets_R=token_ids_T[response_R],
        advantages_R=batch.advantages_T[from_batch_R],
        behaviour_logprobs_R=batch.behaviour_logprobs_T[from_batch_R],
        versions_R=batch.versions_T[from_batch_R],
        mask_R=batch.mask_T[from_batch_R],
        proximal_logprobs_R=None if batch.proximal_logprobs_T is None else batch.proximal_logprobs_T[from_batch_R],
    )
