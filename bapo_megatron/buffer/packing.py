"""Cuts a batch into optimizer steps, data-parallel shares and packed micro-batches.

Every rank computes the same plan from the same batch and seed, and builds only its own share. Loss and statistics do
not depend on the plan: they are sums over tokens, divided by counts of the whole optimizer step. All padding
for the layout is added here.

Micro-batches hold as many tokens as fit in memory. Data ranks get about the same number of FLOPs, because each update
waits for the slowest. A sequence of n tokens costs n + pair_cost * n**2: because of attention, one sequence of 64k
tokens costs more than eight of 8k.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bapo_megatron.config.schema import MAX_KEYS_PER_TOKEN
from bapo_megatron.tokens import CORE_STREAMS, TOKEN_IDS, TokenStream
from bapo_megatron.types import Batch, MicroBatch, MiniBatch, TokenCounts


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of every mini-batch, and how its layout needs it packed.

    Example: Share(data_rank=1, data_size=2) holds every other pack, whole and unpadded.
    """

    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0  # context ranks hold the same packs, and each holds a part of every sequence
    context_size: int = 1
    tokens_multiple: int = 1  # a rank's tokens of a pack are a multiple of this (sequence parallelism, FP8)
    packs_multiple: int = 1  # the number of packs is a multiple of this (virtual pipeline)
    equal_lengths: bool = False  # all packs of a data rank have the same length (pipeline: stages agree on it once)
    pair_cost: float = 0.0  # the model's `ModelShape.pair_cost`
    shares_prompts: bool = False  # a pack holds the prompt of several sequences once

    def cost(self, length: int, prompt: int = 0) -> float:
        """Return the FLOPs of a sequence after its first `prompt` tokens, in units of one token's in matrices."""
        return length - prompt + self.pair_cost * (length**2 - prompt**2)

    @property
    def num_chunks(self) -> int:
        """Chunks per sequence, two for each context rank; a padded sequence's length is a multiple of it."""
        return 1 if self.context_size == 1 else 2 * self.context_size

    @property
    def pack_multiple(self) -> int:
        """The number that must divide a whole pack's tokens."""
        return math.lcm(self.num_chunks, self.context_size * self.tokens_multiple)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over a batch: all its sequences `num_epochs` times, each time reshuffled into `num_minibatches`."""

    share: Share  # this rank's; the other ranks have the same pass with their own share
    max_tokens: int  # limit of one micro-batch on one rank; a longer sequence gets its own micro-batch
    num_minibatches: int = 1
    num_epochs: int = 1
    seed: int = 0
    by_prompt: bool = False  # all sequences of a prompt go into the same step
    teacher: int | None = None  # if set, of each step only the sequences that this teacher scores

    def steps(self, batch: Batch) -> Iterator[tuple[Tensor, list[list[Tensor]]]]:
        """Yield the sequences of each optimizer step, and how they are split into each data rank's micro-batches.

        A batch may hold fewer sequences than there are steps. A step without a sequence, or with masked responses only,
        is left out: an update would divide by zero. Reads lengths, masks and teachers.
        """
        num_trained_S = batch.count_S(batch.mask_T)
        for epoch in range(self.num_epochs):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            for part in self._parts(batch, generator):
                if not num_trained_S[part].any():
                    continue
                if self.teacher is not None:
                    part = part[_is_of(self.teacher, batch)[part]]
                    if not len(part):
                        continue
                max_tokens = self.max_tokens * self.share.context_size
                units = make_units(batch, part, self.share, max_tokens)
                shares = balanced_shares(units, self.share, max_tokens)
                yield part, [[_sequences(part, [units[i] for i in b]) for b in bins] for bins in shares]

    def _parts(self, batch: Batch, generator: torch.Generator) -> Sequence[Tensor]:
        """Return the sequences of each step, int64, in random order."""
        if not self.by_prompt or batch.prompt_S is None:
            return torch.randperm(batch.num_sequences, generator=generator).tensor_split(self.num_minibatches)
        _, number_S = batch.prompt_S.unique(return_inverse=True)
        num_prompts = int(number_S.max()) + 1
        place_S = torch.randperm(num_prompts, generator=generator)[number_S]
        starts = [int(part[0]) for part in torch.arange(num_prompts).tensor_split(self.num_minibatches) if len(part)]
        order, step_S = place_S.argsort(stable=True), torch.bucketize(place_S, torch.tensor(starts[1:]), right=True)
        return [order[step_S[order] == step] for step in range(len(starts))]

    def minibatches(self, batch: Batch) -> Iterator[MiniBatch]:
        """Yield this rank's part of the optimizer steps."""
        share = self.share
        num_trained_S, num_sampled_S = batch.count_S(batch.mask_T), batch.num_sampled_S
        for part, shares in self.steps(batch):
            mine = shares[share.data_rank]
            lens_S = batch.seq_lens_S[part]
            saved = [n for packs in shares for s in packs for n in copied_prompts(batch, s, share)]
            tokens, squares = int(lens_S.sum()) - sum(saved), int((lens_S**2).sum()) - sum(n**2 for n in saved)
            counts = TokenCounts(tokens, squares, int(num_sampled_S[part].sum()), sum(saved))
            num_tokens, num_responses = int(num_trained_S[part].sum()), int((num_trained_S[part] > 0).sum())
            packs = packs_of(batch, mine, share)
            yield MiniBatch(packs, num_tokens, batch.proximal_version, counts, num_responses, tuple(mine))


def packs_of(batch: Batch, sequences: Sequence[Tensor], share: Share) -> tuple[MicroBatch, ...]:
    """Return a rank's micro-batches of these sequences, padded as the layout needs them."""
    mine = [Pieces.of(batch, s, share) for s in sequences]
    lengths = [max(int(round_up(one.lens_S, share.num_chunks).sum()), 1) for one in mine]
    lengths = [round_up(n, share.pack_multiple) for n in lengths]
    if share.equal_lengths:
        lengths = [max(lengths)] * len(lengths)
    return tuple(pack(batch, one, length, share) for one, length in zip(mine, lengths, strict=True))


def of_teacher(minibatch: MiniBatch, batch: Batch, teacher: int | None, share: Share) -> MiniBatch:
    """Return the sequences that a teacher scores, in as many micro-batches, some of them perhaps without any.

    Args:
        batch: what the mini-batch is of.
        teacher: None means that it scores all.
        share: the teacher's, which may need them packed otherwise than the policy does.
    """
    sequences = minibatch.sequences
    if teacher is not None:
        is_mine_S = _is_of(teacher, batch)
        sequences = tuple(s[is_mine_S[s]] for s in sequences)
    return replace(minibatch, micro_batches=packs_of(batch, sequences, share), sequences=sequences)


def _is_of(teacher: int, batch: Batch) -> Tensor:
    """Return whether a teacher scores each sequence, bool [S]."""
    assert batch.teacher_S is not None, "a batch of several teachers knows which one scores each sequence"
    return batch.teacher_S == teacher


def one_minibatch(batch: Batch, *, max_tokens: int, share: Share) -> MiniBatch:
    """Return the whole batch, which must have a trained token, as one mini-batch."""
    (whole,) = Pass(share, max_tokens).minibatches(batch)
    return whole


def sequences_of(passes: Sequence[Pass], batch: Batch, data_size: int) -> list[Tensor]:
    """Return the sequences that each data rank needs in these passes, int64, ascending; see `Pass.steps`."""
    needed = [torch.zeros(batch.num_sequences, dtype=torch.bool) for _ in range(data_size)]
    for one in passes:
        for _, shares in one.steps(batch):
            for is_needed_S, packs in zip(needed, shares, strict=True):
                is_needed_S[torch.cat(packs)] = True
    return [is_needed_S.nonzero().squeeze(1) for is_needed_S in needed]


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences of a step that go into the same micro-batch: one, or several that share a prompt."""

    indices: tuple[int, ...]  # among the step's sequences
    length: int  # tokens, with padding and with a shared prompt once
    cost: float  # FLOPs, see `Share.cost`


def make_units(batch: Batch, part: Tensor, share: Share, max_tokens: int) -> list[Unit]:
    """Return a step's sequences as units. Sequences that share a prompt are cut into units of at most `max_tokens`, and
    of at most `MAX_KEYS_PER_TOKEN` times as many keys: attention gathers the prompt's for each of its sequences.

    Args:
        part: the step's sequences, int64.
    """
    lengths: list[int] = round_up(batch.seq_lens_S[part], share.num_chunks).tolist()
    if not share.shares_prompts or batch.prompt_S is None or batch.shared_lens_S is None:
        return single_units(lengths, share)
    prompts, shared = batch.prompt_S[part].tolist(), batch.shared_lens_S[part].tolist()
    units: list[Unit] = []
    growing: dict[int, tuple[int, int]] = {}  # by prompt, the place of its last unit, and the keys in that
    for i, (prompt, num_shared, length) in enumerate(zip(prompts, shared, lengths, strict=True)):
        if num_shared and prompt in growing:
            place, num_keys = growing[prompt]
            unit, longer = units[place], units[place].length + length - num_shared
            if longer <= max_tokens and num_keys + length <= MAX_KEYS_PER_TOKEN * longer:
                units[place] = Unit((*unit.indices, i), longer, unit.cost + share.cost(length, num_shared))
                growing[prompt] = place, num_keys + length
                continue
        if num_shared:
            growing[prompt] = len(units), length
        units.append(Unit((i,), length, share.cost(length)))
    return units


def single_units(lengths: Sequence[int], share: Share) -> list[Unit]:
    """Return each sequence as a unit of its own."""
    return [Unit((i,), length, share.cost(length)) for i, length in enumerate(lengths)]


def _sequences(part: Tensor, units: Sequence[Unit]) -> Tensor:
    """Return the sequences of the batch that some units hold, int64, in the order of the step."""
    return part[torch.tensor(sorted(i for unit in units for i in unit.indices), dtype=torch.int64)]


def balanced_shares(units: Sequence[Unit], share: Share, max_tokens: int) -> list[list[list[int]]]:
    """Return each data rank's bins of indices of `units`: the same number for every rank, of at most `max_tokens`.

    Two plans compete: the fewest bins, dealt by cost; and sequences dealt by cost, then packed. The plan whose
    costliest rank has less to do wins. The second may need more bins, which cost padding if they have equal lengths.
    """
    num_ranks, lengths, costs = share.data_size, [u.length for u in units], [u.cost for u in units]
    bins = balanced_bins(lengths, num_ranks * share.packs_multiple, max_tokens)
    if num_ranks == 1 or not share.pair_cost:
        return [bins[rank::num_ranks] for rank in range(num_ranks)]
    num_bins = len(bins) // num_ranks
    dealt = longest_first([sum(costs[i] for i in b) for b in bins], num_ranks, max_items=num_bins)
    plans = [[[bins[b] for b in mine] for mine in dealt]]
    sequences = longest_first(costs, num_ranks)
    while len(plans) == 1:
        packed = [longest_first([lengths[i] for i in mine], num_bins) for mine in sequences]
        shares = [[[mine[j] for j in b] for b in bins] for mine, bins in zip(sequences, packed, strict=True)]
        if all(_fit(bins, lengths, max_tokens) for bins in shares):
            plans.append(shares)
        num_bins += share.packs_multiple
    return min(plans, key=lambda shares: max(_cost(bins, units, share) for bins in shares))


def _cost(bins: list[list[int]], units: Sequence[Unit], share: Share) -> float:
    """Return the cost of a rank's bins, including the padding for `share.equal_lengths`."""
    sizes = [sum(units[i].length for i in b) for b in bins]
    padding = [max(sizes) - size for size in sizes] if share.equal_lengths else []
    return sum([*(units[i].cost for b in bins for i in b), *map(share.cost, padding)])


def _fit(bins: list[list[int]], lengths: list[int], max_tokens: int) -> bool:
    return all(len(b) <= 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins)


def balanced_bins(lengths: list[int], multiple: int, max_tokens: int) -> list[list[int]]:
    """Return indices of `lengths` in balanced bins of at most `max_tokens`; their number is a multiple of `multiple`.

    It is the smallest number that packing longest first allows. A bin exceeds `max_tokens` only if it holds a single
    sequence; bins are empty only if there are fewer sequences than bins.
    """
    assert lengths, "an optimizer step needs at least one sequence"
    num_bins = round_up(-(-sum(min(n, max_tokens) for n in lengths) // max_tokens), multiple)
    while True:
        bins = longest_first(lengths, num_bins)
        if _fit(bins, lengths, max_tokens):
            return bins
        num_bins += multiple


def longest_first(lengths: Sequence[float], num_bins: int, max_items: int | None = None) -> list[list[int]]:
    """Put each sequence, longest first, into the emptiest bin (Graham's rule): within 4/3 of the best balance.

    Args:
        max_items: the most sequences in one bin; None means no limit. All sequences together must fit.
    """
    heap = [(0.0, b) for b in range(num_bins)]
    bins: list[list[int]] = [[] for _ in heap]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        if len(bins[b]) != max_items:
            heapq.heappush(heap, (load + lengths[i], b))
    return bins


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of a pack in their order: whole sequences, shared prompts and the tokens after each prompt.

    Example: of sequences 4 = "abc", 6 = "abxy" and 7 = "z", the first two share the prompt "ab". The pieces are "ab",
    "c", "xy" and "z": of_S = [4 4 6 7], first_S = [0 2 2 0], lens_S = [2 1 2 1], follows_S = [-1 0 0 -1].
    """

    of_S: Tensor  # int64: the sequence of the batch that has these tokens
    first_S: Tensor  # int64: their first place in it
    lens_S: Tensor  # int64
    follows_S: Tensor  # int64: the piece that the tokens before these are in, or -1

    @classmethod
    def of(cls, batch: Batch, sequences: Tensor, share: Share) -> Pieces:
        """Return the pieces of a pack of sequences."""
        lens_S = batch.seq_lens_S[sequences]
        if not (trees := _trees(batch, sequences, share)):
            nothing_S = torch.zeros_like(lens_S)
            return cls(sequences, nothing_S, lens_S, nothing_S - 1)
        length_of = dict(zip(sequences.tolist(), lens_S.tolist(), strict=True))
        pieces: list[tuple[int, int, int, int]] = []
        for tree, num_shared in trees:
            before = len(pieces) if num_shared else -1
            pieces += [(tree[0], 0, num_shared, -1)] if num_shared else []
            pieces += [(one, num_shared, length_of[one] - num_shared, before) for one in tree]
        return cls(*torch.tensor(pieces, dtype=torch.int64).reshape(-1, 4).T.contiguous())


def _trees(batch: Batch, sequences: Tensor, share: Share) -> list[tuple[list[int], int]]:
    """Return the sequences of a pack by what they share: some of them, and the tokens of their prompt, or one and 0.

    Empty if nothing is shared.
    """
    if not share.shares_prompts or batch.prompt_S is None or batch.shared_lens_S is None:
        return []
    trees: dict[int, tuple[list[int], int]] = {}  # a single sequence has a negative key
    facts = (x_S[sequences].tolist() for x_S in (batch.prompt_S, batch.shared_lens_S))
    for sequence, prompt, num_shared in zip(sequences.tolist(), *facts, strict=True):
        trees.setdefault(prompt if num_shared else -1 - sequence, ([], num_shared))[0].append(sequence)
    found = [(tree, num_shared if len(tree) > 1 else 0) for tree, num_shared in trees.values()]
    return found if any(num_shared for _, num_shared in found) else []


def copied_prompts(batch: Batch, sequences: Tensor, share: Share) -> list[int]:
    """Return the lengths of the prompts that a pack of these sequences does not repeat."""
    trees = _trees(batch, sequences, share)
    return [num_shared for tree, num_shared in trees for _ in tree[1:] if num_shared]


def pack(batch: Batch, pieces: Pieces, length: int, share: Share) -> MicroBatch:
    """Pack the given pieces, and return the part of `share.context_rank`.

    Each piece is padded to a multiple of `share.num_chunks`; one more piece of padding fills up to `length`.
    """
    lens_S = pieces.lens_S
    padded_lens_S = round_up(lens_S, share.num_chunks)
    missing = length - int(padded_lens_S.sum())
    assert missing >= 0
    padded_lens_S = torch.cat([padded_lens_S, lens_S.new_tensor([missing] if missing else [])])
    cu_seqlens_S1 = torch.cat([padded_lens_S.new_zeros(1), padded_lens_S.cumsum(0)])
    offset_T = torch.arange(length) - cu_seqlens_S1[:-1].repeat_interleave(padded_lens_S)

    def of_each_token(values_S: Tensor) -> Tensor:
        values_S = torch.cat([values_S, values_S.new_zeros(padded_lens_S.numel() - values_S.numel())])
        return values_S.repeat_interleave(padded_lens_S)

    is_token_T = offset_T < of_each_token(lens_S)
    position_ids_T = offset_T + of_each_token(pieces.first_S)
    starts_S = batch.seq_lens_S.cumsum(0) - batch.seq_lens_S
    source_T = of_each_token(starts_S[pieces.of_S]) + position_ids_T  # place in the batch; meaningless on padding
    here_T = of_each_token(batch.first_here_S[pieces.of_S]) + position_ids_T  # place among the rows that this rank has
    before_T = torch.arange(length) - 1  # the place of the token before each one; meaningless for the first of all
    later_S = (pieces.follows_S >= 0).nonzero().squeeze(1)
    before_T[cu_seqlens_S1[later_S]] = cu_seqlens_S1[pieces.follows_S[later_S] + 1] - 1
    token_T = is_token_T.nonzero().squeeze(1)
    sampled_R = token_T[batch.sampled_T[source_T[token_T]]]
    mine_T = context_tokens(cu_seqlens_S1, share.context_rank, share.context_size)
    is_mine_R = torch.isin(before_T[sampled_R], mine_T)  # a row belongs to the rank that holds its hidden state
    sampled_R = sampled_R[is_mine_R]
    source_R = source_T[sampled_R]

    def on_tokens(values_T: Tensor, stream: TokenStream) -> Tensor:
        """Return the stream's rows for all tokens of the pack; `values_T` has a fed token's row at the next token."""
        rows_T = values_T.new_full((length, *values_T.shape[1:]), stream.filler)
        at_T = token_T[position_ids_T[token_T] > 0] if stream.on == "fed" else token_T
        rows_T[before_T[at_T] if stream.on == "fed" else at_T] = values_T[place_T(stream)[at_T]]
        return rows_T

    def place_T(stream: TokenStream) -> Tensor:
        return source_T if stream.to == "every rank" else here_T

    token_ids_T = on_tokens(batch.token_ids_T, TOKEN_IDS)
    of_sampled: dict[str, Any] = {}  # by attribute name
    extra: dict[TokenStream, Tensor] = {}
    for stream, values_T in batch.values.items():
        if stream.on == "sampled":
            values_R = values_T[place_T(stream)[sampled_R]]
            if stream in CORE_STREAMS:
                of_sampled[f"{stream.name}_R"] = values_R
            else:
                extra[stream] = values_R
        elif stream not in CORE_STREAMS:
            extra[stream] = on_tokens(values_T, stream)[mine_T]
    return MicroBatch(
        token_ids_T=token_ids_T[mine_T],
        position_ids_T=position_ids_T[mine_T],
        cu_seqlens_S1=cu_seqlens_S1.to(torch.int32),
        rows_R=torch.searchsorted(mine_T, before_T[sampled_R]),
        sequence_R=torch.searchsorted(cu_seqlens_S1, sampled_R, right=True) - 1,
        batch_rows_R=source_R,
        targets_R=token_ids_T[sampled_R],
        is_token_T=is_token_T[mine_T],
        follows_S=_with_padding(pieces.follows_S, padded_lens_S.numel()) if later_S.numel() else None,
        extra=extra,
        **of_sampled,
    )


def _with_padding(follows_S: Tensor, num_pieces: int) -> Tensor:
    return torch.cat([follows_S, follows_S.new_full((num_pieces - follows_S.numel(),), -1)])


def context_tokens(cu_seqlens_S1: Tensor, rank: int, size: int) -> Tensor:
    """Return the tokens of a pack that a context rank holds: int64, ascending, 1 / size of each sequence.

    Every sequence is cut into 2 x size equal chunks, and the rank holds chunks `rank` and 2 x size - 1 - rank. A causal
    query costs more the later its position, so this balances the ranks. Transformer Engine cuts packed ("thd")
    sequences in the same way.
    """
    lens_S = cu_seqlens_S1.diff().long()
    if size == 1:
        return torch.arange(int(lens_S.sum()), device=lens_S.device)
    num_chunks = 2 * size
    assert not (lens_S % num_chunks).any(), f"the sequences of a pack must be multiples of {num_chunks} tokens"
    position_T = torch.arange(int(lens_S.sum()), device=lens_S.device) - cu_seqlens_S1[:-1].repeat_interleave(lens_S)
    chunk_T = position_T * num_chunks // lens_S.repeat_interleave(lens_S)
    return ((chunk_T == rank) | (chunk_T == num_chunks - 1 - rank)).nonzero().squeeze(1)


_Number = TypeVar("_Number", int, Tensor)


def round_up(number: _Number, multiple: int) -> _Number:
    """Return the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple
