"""A pack holds the prompt of several sequences once, and each token finds all tokens before it, whatever the split."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig
from test_packing import build_batch, group
from torch import Tensor

from bapo_megatron.buffer.packing import Pass, Share, one_minibatch
from bapo_megatron.learner.attention import PackedAttention, sharing_problem
from bapo_megatron.learner.packs import PackedSequences, place
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Batch, MicroBatch, TokenCounts
from tests.integration.test_learner_attention import one_at_a_time

FED = TokenStream("routes", "int64", (2,), missing=-7, on="fed")
GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=5
)


def batch_of(shapes: list[tuple[int, list[int]]], *, with_fed: bool = False) -> Batch:
    """Return a batch in which no two tokens of a sequence are equal, and prompts are the same in a group.

    With `with_fed`, the row of input i of a sequence is made from its token and the next token, as a router's may
    depend on the server that has read both.
    """
    groups = [group(i + 1, prompt, lengths) for i, (prompt, lengths) in enumerate(shapes)]
    batch = build_batch(groups)
    if not with_fed:
        return batch
    before_T = batch.token_ids_T.roll(1)
    fed_T = torch.stack([before_T, batch.token_ids_T], 1)  # lies with the next token
    assert batch.shared_lens_S is not None
    return replace(batch, extra={FED: fed_T}, shared_lens_S=(batch.shared_lens_S - 1).clamp(min=0))


def chains(mb: MicroBatch) -> dict[int, list[int]]:
    """Return the places of each sequence's tokens that has sampled ones, by the index of its first such token."""
    cu = mb.cu_seqlens_S1.tolist()
    follows = [-1] * (len(cu) - 1) if mb.follows_S is None else mb.follows_S.tolist()
    found: dict[int, list[int]] = {}
    for piece in dict.fromkeys(mb.sequence_R.tolist()):
        before = [*range(cu[follows[piece]], cu[follows[piece] + 1])] if follows[piece] >= 0 else []
        first = mb.batch_rows_R[mb.sequence_R == piece].min()
        found[int(first)] = [*before, *range(cu[piece], cu[piece + 1])]
    return found


@settings(max_examples=150, deadline=None)
@given(
    GROUPS,
    st.integers(1, 3),
    st.integers(8, 90),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.03]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 7),
)
def test_any_forest_packed_in_any_way_has_all_tokens_before_each_sampled_one(
    shapes: list,
    num_minibatches: int,
    max_tokens: int,
    data_size: int,
    cost: float,
    whole: bool,
    with_fed: bool,
    own: int,
) -> None:
    batch = batch_of(shapes, with_fed=with_fed)
    assert batch.shared_lens_S is not None
    batch.shared_lens_S[own::5] = 0  # branches that begin with words of their own
    if not batch.num_sequences:
        return
    starts = (batch.seq_lens_S.cumsum(0) - batch.seq_lens_S).tolist()
    copied = Pass(Share(), 10**6, num_minibatches=num_minibatches, seed=3, by_prompt=whole).minibatches(batch)
    wanted = [sorted(b.batch_rows_R.tolist()) for step in copied for b in step.micro_batches]
    shares = [Share(data_rank=r, data_size=data_size, pair_cost=cost, shares_prompts=True) for r in range(data_size)]
    passes = [Pass(share, max_tokens, num_minibatches=num_minibatches, seed=3, by_prompt=whole) for share in shares]
    steps = [*zip(*(list(one.minibatches(batch)) for one in passes), strict=True)]
    seen = []
    for of_ranks in steps:
        packs = [mb for step in of_ranks for mb in step.micro_batches]
        (counts,) = {step.counts for step in of_ranks}
        seen.append(sorted(int(i) for mb in packs for i in mb.batch_rows_R))
        tokens = squares = 0
        for mb in packs:
            cu = mb.cu_seqlens_S1.tolist()
            assert mb.targets_R.tolist() == batch.token_ids_T[mb.batch_rows_R].tolist()
            for first, places in chains(mb).items():
                (start,) = {s for s, n in zip(starts, batch.seq_lens_S.tolist(), strict=True) if s <= first < s + n}
                ids = batch.token_ids_T[start : start + len(places)]
                assert mb.token_ids_T[places].tolist() == ids.tolist()
                assert mb.position_ids_T[places].tolist() == [*range(len(places))]
                if with_fed:
                    rows = mb.extra[FED][places]
                    assert rows[:-1].tolist() == [[int(a), int(b)] for a, b in pairwise(ids)]
            for row, sampled, piece in zip(mb.rows_R, mb.batch_rows_R, mb.sequence_R, strict=True):
                places = next(p for p in chains(mb).values() if p[-1] == cu[int(piece) + 1] - 1)
                start = max(s for s in starts if s <= int(sampled))
                assert int(row) == places[int(sampled) - start - 1]
            is_token_T = mb.is_token_T
            assert is_token_T is not None
            tokens += int(is_token_T.sum())
            ends = [int(mb.position_ids_T[b - 1]) + 1 for b in cu[1:]]
            lens = [b - a for a, b in pairwise(cu)]
            are_real = [bool(is_token_T[a]) for a in cu[:-1]]
            squares += sum(e**2 - (e - n) ** 2 for e, n, r in zip(ends, lens, are_real, strict=True) if r)
            units = 1 if mb.follows_S is None else int((mb.follows_S < 0).sum())
            assert mb.num_tokens <= max_tokens or units == 1
        assert (counts.tokens, counts.squares) == (tokens, squares)
    assert seen == wanted
    if whole:
        for of_ranks in steps:
            prompts = {
                int(batch.token_ids_T[i]) // 1000 for s in of_ranks for b in s.micro_batches for i in b.batch_rows_R
            }
            others = {
                int(batch.token_ids_T[i]) // 1000
                for other in steps
                if other is not of_ranks
                for s in other
                for b in s.micro_batches
                for i in b.batch_rows_R
            }
            assert not prompts & others


def test_what_sharing_saves() -> None:
    """Eight responses of 8 tokens to a prompt of 8: 72 tokens, 0.56 of 128; a tree above the budget becomes two."""
    batch = batch_of([(8, [8] * 8)])
    step = one_minibatch(batch, max_tokens=100, share=Share(shares_prompts=True))
    assert [mb.num_tokens for mb in step.micro_batches] == [72]
    assert step.counts == TokenCounts(72, 8**2 + 8 * (16**2 - 8**2), 64, saved=56)
    step = one_minibatch(batch, max_tokens=40, share=Share(shares_prompts=True))
    assert sorted(mb.num_tokens for mb in step.micro_batches) == [40, 40]
    assert step.counts.saved == 48
    copies = one_minibatch(batch, max_tokens=100, share=Share())
    assert copies.counts == TokenCounts(128, 8 * 16**2, 64)
    assert copies.micro_batches[0].follows_S is None


def test_a_prompt_whose_last_row_differs_is_shared_without_its_last_token() -> None:
    batch = batch_of([(1, [2, 3]), (4, [2, 2])], with_fed=True)
    assert batch.shared_lens_S is not None
    assert batch.shared_lens_S.tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_attention_over_shared_prompts_equals_one_sequence_at_a_time(seed: int) -> None:
    """Values and gradients, in float64: a prompt's gradients add up over its responses."""
    generator = torch.Generator().manual_seed(seed)
    shapes = []
    for _ in range(4):
        prompt, size = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 6))
        shapes.append((prompt, torch.randint(1, 30, (size,), generator=generator).tolist()))
    (mb,) = one_minibatch(batch_of(shapes), max_tokens=10**6, share=Share(shares_prompts=True)).micro_batches
    inputs = [
        torch.randn(mb.num_tokens, 1, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (6, 2, 2)
    ]
    attention = PackedAttention(config=None)  # type: ignore[arg-type]  # it reads nothing from it
    packed = PackedSequences.of(mb.cu_seqlens_S1, follows_S=mb.follows_S)
    out_T1X = attention(*inputs, None, packed_seq_params=packed)
    parts, weights = [], torch.randn(out_T1X.shape, dtype=torch.float64, generator=generator)
    wanted: list[Tensor] = []
    for places in chains(mb).values():
        wanted.append(one_at_a_time(*(x[places] for x in inputs), [len(places)]))
        parts.append(places)
    for places, want_T1X in zip(parts, wanted, strict=True):
        torch.testing.assert_close(out_T1X[places], want_T1X, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(sum((out_T1X[p] * weights[p]).sum() for p in parts), inputs)
    want = torch.autograd.grad(sum((w * weights[p]).sum() for p, w in zip(parts, wanted, strict=True)), inputs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


class _LosesGradients(PackedAttention):
    """A kernel whose keys get no gradient if some are another sequence's."""

    def forward(
        self, q_T1ND: Tensor, k_T1KD: Tensor, *args: Any, packed_seq_params: PackedSequences, **_: Any
    ) -> Tensor:
        assert packed_seq_params.blocks is not None
        is_shared = any(block.visible_S1QL is not None for block in packed_seq_params.blocks)
        keys = k_T1KD.detach() + 0 * k_T1KD if is_shared else k_T1KD
        return super().forward(q_T1ND, keys, *args, packed_seq_params=packed_seq_params)


class _Refuses(PackedAttention):
    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise ValueError("no backend for this mask")


@pytest.mark.parametrize(
    ("core", "ignores_prompts", "problem"),
    [
        (PackedAttention, False, None),
        (PackedAttention, True, "whole sequences give other results"),
        (_LosesGradients, False, "whole sequences give other results: the difference is 1"),
        (_Refuses, False, "it fails with ValueError: no backend for this mask"),
    ],
    ids=["right", "no prompt", "no gradient", "refused"],
)
def test_attention_that_cannot_share_is_found(
    core: type[PackedAttention], ignores_prompts: bool, problem: str | None
) -> None:
    def describe(*pack: Any) -> PackedSequences:
        return PackedSequences.of(*pack[:3]) if ignores_prompts else PackedSequences.of(*pack)

    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=6, num_query_groups=2, params_dtype=torch.float32
    )
    found = sharing_problem(core(config), describe, config)
    assert found == problem or (problem and found and found.startswith(problem))


def test_a_row_that_is_placed_several_times_gets_all_its_gradients() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    of_B, into_B = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 1, 3, 4])
    assert torch.autograd.gradcheck(lambda y: place(y, of_B, into_B, 5, repeats=True), (x,))
