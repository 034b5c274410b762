"""Batches and micro-batches: every response token exactly once, aligned, whatever the split."""

import itertools
import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.buffer.batch import BatchBuilder, batch_metrics
from bapo_megatron.buffer.packing import (
    Pass,
    Share,
    balanced_bins,
    balanced_shares,
    context_tokens,
    longest_first,
    of_teacher,
    one_minibatch,
    sequences_of,
    single_units,
)
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.learner.whole_batch import Scorer, with_scores
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.tokens import PROXIMAL_LOGPROBS, TokenStream
from bapo_megatron.types import Batch, Ended, FinishReason, Group, MicroBatch, Prompt, Sample, Segment, TokenCounts


def group(prompt_id: int, prompt_len: int, lengths: list[int]) -> Group:
    """Return a group in which every token id, log-prob and version is unique, so that a misplaced one shows."""
    prompt = Prompt(prompt_id, tuple(range(prompt_id * 1000, prompt_id * 1000 + prompt_len)), "", "", "test")
    samples = []
    for i, n in enumerate(lengths):
        base = prompt_id * 1000 + 100 * (i + 1)
        cut = n // 2
        segments = tuple(
            Segment.sampled(
                base + k, 0, tuple(range(base + a, base + b)), tuple(-float(x) for x in range(base + a, base + b))
            )
            for k, (a, b) in enumerate(((0, cut), (cut, n)))
            if b > a
        )
        samples.append(Sample.of(f"{prompt_id}.{i}", prompt, segments, Ended("stop", float(i))))
    return Group(prompt, tuple(samples))


def build_batch(groups: list[Group], **settings_: object) -> Batch:
    """Build a batch whose advantages are the rewards minus their group's mean."""
    config = Config.model_validate({"advantage": {"kind": "dr_grpo"}} | settings_)
    return BatchBuilder(config).build(groups, {})


def truncated(group: Group, *lengths: int) -> Group:
    """Return the group with its responses of these lengths cut off, as `rollout.truncated` = "mask" leaves them out."""
    samples = group.samples
    reasons: list[FinishReason] = ["length" if s.num_sampled_tokens in lengths else "stop" for s in samples]
    cut = (replace(s, need=Ended(reason, s.reward)) for s, reason in zip(samples, reasons, strict=True))
    return replace(group, samples=tuple(cut))


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 40), min_size=2, max_size=4)), min_size=1, max_size=6
)


def test_build_batch_lays_out_prompt_and_response() -> None:
    batch = build_batch([group(1, 2, [3, 1])])
    assert batch.token_ids_T.tolist() == [1000, 1001, 1100, 1101, 1102, 1000, 1001, 1200]
    assert batch.seq_lens_S.tolist() == [5, 3]
    assert batch.sampled_T.tolist() == [False, False, True, True, True, False, False, True]
    assert batch.num_sampled_S.tolist() == [3, 1]
    assert batch.mask_T.tolist() == [False, False, True, True, True, False, False, True]
    assert batch.behaviour_logprobs_T.tolist() == [0, 0, -1100, -1101, -1102, 0, 0, -1200]
    assert batch.versions_T.tolist() == [-1, -1, 1100, 1101, 1101, -1, -1, 1201]
    assert batch.advantages_T.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, 0, 0.5]


def test_an_empty_response_counts_in_the_advantages_but_is_not_trained() -> None:
    batch = build_batch([group(1, 2, [0, 4])])
    assert batch.num_sequences == 1
    assert batch.rewards_S is not None
    assert batch.rewards_S.tolist() == [1], "rewards of the responses that are there"
    assert batch.advantages_T[batch.mask_T].tolist() == [0.5] * 4


def test_advantages_are_of_shaped_rewards_and_masked_responses_still_count_in_them() -> None:
    batch = build_batch(
        [truncated(group(1, 2, [1, 2, 3]), 2)],  # rewards 0, 1, 2
        reward={"scale": 9.0},
        rollout={"truncated": "mask"},
    )
    assert batch.advantages_T.tolist() == [0, 0, -9, 0, 0, 0, 0, 0, 0, 9, 9, 9]
    assert batch.mask_T.tolist() == [False, False, True, *[False] * 6, True, True, True]
    assert batch.num_trained_tokens == 4
    assert batch.rewards_S is not None
    assert batch.rewards_S.tolist() == [0, 9, 18]
    assert batch.versions_T.tolist().count(-1) == 6, "masked tokens keep their facts"


def test_a_critic_finds_rewards_instead_of_advantages() -> None:
    config = Config.model_validate({"advantage": {"kind": "gae"}, "reward": {"scale": 3.0}})
    batch = BatchBuilder(config).build([group(1, 2, [1, 2])], {})
    assert batch.rewards_S is not None
    assert batch.rewards_S.tolist() == [0, 3]
    assert not batch.advantages_T.any()


def test_masked_responses_are_forwarded_but_divide_nothing() -> None:
    batch = build_batch([truncated(group(1, 2, [3, 5]), 5)], rollout={"truncated": "mask"})
    update = one_minibatch(batch, max_tokens=100, share=Share())
    assert update.num_trained_tokens == 3
    assert sum(mb.rows_R.numel() for mb in update.micro_batches) == 8
    assert sum(int(mb.mask_R.sum()) for mb in update.micro_batches) == 3


def test_a_batch_can_be_masked_as_a_whole() -> None:
    batch = build_batch([truncated(group(1, 2, [3, 5]), 3, 5)], rollout={"truncated": "mask"})
    assert (batch.num_sequences, batch.num_trained_tokens) == (2, 0)
    scorer = Scorer(PROXIMAL_LOGPROBS, None, None)
    assert with_scores(batch, [scorer], None, Config()) is batch, "there is nothing to score"


NAMES = ("batch_rows_R", "targets_R")


@pytest.mark.parametrize(("context_size", "shares_prompts"), [(1, False), (1, True), (2, False)])
def test_each_sequence_is_scored_by_its_teacher_where_it_is_trained(context_size: int, shares_prompts: bool) -> None:
    """Three teachers, of which the last scores nothing: passes over the batch have each sequence once, and the parts of
    an update have its rows of each rank."""
    draw = random.Random(context_size)
    groups = [group(i, draw.randint(1, 9), [draw.randint(1, 30) for _ in range(3)]) for i in range(5)]
    batch = build_batch(groups)
    teacher_S = torch.tensor([0, 1, 0, 1, 1]).repeat_interleave(3)
    batch = replace(batch, teacher_S=teacher_S)
    of_row = teacher_S.repeat_interleave(batch.seq_lens_S)
    scored: list[int] = []
    for data_rank, context_rank in itertools.product(range(2), range(context_size)):
        share = Share(data_rank, 2, context_rank, context_size, shares_prompts=shares_prompts)
        for teacher in range(3):
            for whole in Pass(share, 40, teacher=teacher).minibatches(batch):
                rows_R = torch.cat([one.batch_rows_R for one in whole.micro_batches])
                assert (of_row[rows_R] == teacher).all()
                scored += rows_R.tolist()
        for update in Pass(share, 40, num_minibatches=3, seed=1).minibatches(batch):
            parts = [of_teacher(update, batch, teacher, replace(share, shares_prompts=False)) for teacher in range(3)]
            for teacher, part in enumerate(parts):
                assert all((of_row[one.batch_rows_R] == teacher).all() for one in part.micro_batches)
            for one, *mine in zip(update.micro_batches, *(part.micro_batches for part in parts), strict=True):
                rows_R, targets_R = (torch.cat([getattr(x, name) for x in mine]) for name in NAMES)
                assert rows_R.sort().values.equal(one.batch_rows_R.sort().values)
                assert targets_R.equal(batch.token_ids_T[rows_R])
    assert sorted(scored) == batch.sampled_T.nonzero().flatten().tolist()


def rows(mb: MicroBatch) -> list[tuple]:
    """Return (token before, target, advantage, log-prob, version, position) of each response row."""
    return [
        (
            int(mb.token_ids_T[r]),
            int(t),
            float(a),
            float(lp),
            int(v),
            int(mb.position_ids_T[r]),
        )
        for r, t, a, lp, v in zip(
            mb.rows_R, mb.targets_R, mb.advantages_R, mb.behaviour_logprobs_R, mb.versions_R, strict=True
        )
    ]


def reference_rows(groups: list[Group]) -> list[tuple]:
    out = []
    for g in groups:
        mean = sum(g.rewards) / len(g.rewards)
        for t in g.samples:
            ids = (*t.prompt.token_ids, *t.sampled_ids)
            for i in range(t.num_sampled_tokens):
                p = len(t.prompt.token_ids) + i
                advantage = float(torch.tensor(t.reward - mean, dtype=torch.float32))
                out.append((ids[p - 1], ids[p], advantage, t.behaviour_logprobs[i], t.versions[i], p - 1))
    return sorted(out)


LAYOUTS = st.builds(
    dict,
    data_size=st.integers(1, 3),
    context_size=st.integers(1, 3),
    tokens_multiple=st.sampled_from([1, 4]),
    packs_multiple=st.sampled_from([1, 2]),
    equal_lengths=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(1, 3), st.integers(1, 2), st.integers(8, 120), LAYOUTS)
def test_every_response_token_is_trained_exactly_once_per_epoch(
    shapes: list, num_minibatches: int, num_epochs: int, max_tokens: int, layout: dict
) -> None:
    groups = [group(i + 1, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    batch = build_batch(groups)
    shares = [
        Share(data_rank=data_rank, context_rank=context_rank, **layout)
        for data_rank in range(layout["data_size"])
        for context_rank in range(layout["context_size"])
    ]
    ranks = [
        list(Pass(share, max_tokens, num_minibatches=num_minibatches, num_epochs=num_epochs, seed=7).minibatches(batch))
        for share in shares
    ]
    seen = []
    for steps in zip(*ranks, strict=True):
        (num_packs,) = {len(s.micro_batches) for s in steps}
        assert num_packs % layout["packs_multiple"] == 0
        here = [row for s in steps for mb in s.micro_batches for row in rows(mb)]
        assert {s.num_trained_tokens for s in steps} == {len(here)}
        seen += here
        for share, step in zip(shares, steps, strict=True):
            if share.equal_lengths:
                assert len({mb.num_tokens for mb in step.micro_batches}) == 1
            for mb in step.micro_batches:
                _check_structure(mb, share, max_tokens)
    assert sorted(seen) == sorted(reference_rows(groups) * num_epochs)


FED = TokenStream("routes", "int64", (2,), missing=-7, on="fed")
SAMPLED = TokenStream("scores", "int64")


@settings(max_examples=50, deadline=None)
@given(GROUPS, st.integers(8, 120), LAYOUTS)
def test_rows_of_a_stream_lie_with_their_token_and_those_of_inputs_with_the_input(
    shapes: list, max_tokens: int, layout: dict
) -> None:
    """The rows of the batch's token i are made from i; tokens are numbered from 1, because padding is token 0."""
    batch = build_batch([group(i + 1, p, [n or 1 for n in lengths]) for i, (p, lengths) in enumerate(shapes)])
    num_tokens = batch.token_ids_T.numel()
    index_T = torch.arange(num_tokens)
    fed_T = torch.stack([index_T, 10 * index_T], 1)
    batch = replace(batch, token_ids_T=index_T + 1, extra={FED: fed_T, SAMPLED: 3 * index_T})
    starts = set((batch.seq_lens_S.cumsum(0) - batch.seq_lens_S).tolist())
    seen = []
    for data_rank in range(layout["data_size"]):
        for context_rank in range(layout["context_size"]):
            share = Share(data_rank=data_rank, context_rank=context_rank, **layout)
            for mb in one_minibatch(batch, max_tokens=max_tokens, share=share).micro_batches:
                assert torch.equal(mb.extra[SAMPLED], 3 * mb.batch_rows_R)
                for token, row in zip(mb.token_ids_T.tolist(), mb.extra[FED].tolist(), strict=True):
                    is_followed = 0 < token < num_tokens and token not in starts  # the next token has index `token`
                    assert row == ([token, 10 * token] if is_followed else [-7, -7])
                    seen += [token] if is_followed else []
    assert sorted(seen) == [i for i in range(1, num_tokens) if i not in starts]


def _check_structure(mb: MicroBatch, share: Share, max_tokens: int) -> None:
    cu = mb.cu_seqlens_S1.tolist()
    assert cu[0] == 0
    assert cu[-1] == mb.num_tokens * share.context_size
    assert mb.num_tokens % share.tokens_multiple == 0
    assert all(a < b and (b - a) % share.num_chunks == 0 for a, b in pairwise(cu))
    mine_T = context_tokens(mb.cu_seqlens_S1, share.context_rank, share.context_size)
    positions = torch.tensor([i for a, b in pairwise(cu) for i in range(b - a)])
    assert torch.equal(mb.position_ids_T, positions[mine_T])
    assert mb.rows_R.tolist() == sorted(set(mb.rows_R.tolist()))
    if share.context_size == 1:
        assert torch.equal(mb.token_ids_T[mb.rows_R + 1], mb.targets_R)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(2, 4))
def test_context_ranks_share_every_sequence_evenly_by_tokens_and_by_cost(chunks: list[int], size: int) -> None:
    lengths = [2 * size * n for n in chunks]
    cu_seqlens_S1 = torch.tensor([0, *lengths]).cumsum(0)
    parts = [context_tokens(cu_seqlens_S1, rank, size) for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(sum(lengths)))
    for start, length in zip(cu_seqlens_S1.tolist(), lengths, strict=False):
        mine = [part[(part >= start) & (part < start + length)] - start for part in parts]
        assert {m.numel() for m in mine} == {length // size}
        assert len({int((m + 1).sum()) for m in mine}) == 1, "the keys that a rank's queries see"


def test_only_padding_that_the_layout_needs() -> None:
    batch = build_batch([group(1, 2, [3, 8])])  # sequences of 5 and 10 tokens

    def lengths(**share: object) -> list[int]:
        step = one_minibatch(batch, max_tokens=12, share=Share(**share))  # type: ignore[arg-type]
        return sorted(mb.num_tokens for mb in step.micro_batches)

    assert lengths() == [5, 10]
    assert lengths(tokens_multiple=4) == [8, 12]
    assert lengths(equal_lengths=True) == [10, 10]
    assert lengths(context_size=2) == [10]  # 8 and 12 padded tokens fit into the 24 of two ranks: 10 on each
    assert lengths(packs_multiple=3) == [1, 5, 10]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4), st.integers(50, 300))
def test_bins_hold_each_sequence_once_within_the_budget(lengths: list[int], data_size: int, max_tokens: int) -> None:
    bins = balanced_bins(lengths, data_size, max_tokens)
    assert len(bins) % data_size == 0
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(len(b) <= 1 or sum(lengths[i] for i in b) <= max_tokens for b in bins)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 3), st.integers(50, 300))
def test_no_fewer_bins_would_do(lengths: list[int], data_size: int, max_tokens: int) -> None:
    num_bins = len(balanced_bins(lengths, data_size, max_tokens))
    for fewer in range(data_size, num_bins, data_size):
        bins = longest_first(lengths, fewer)
        assert any(len(b) > 1 and sum(lengths[i] for i in b) > max_tokens for b in bins)


def test_the_longest_sequence_is_placed_first() -> None:
    assert longest_first([1, 1, 2], 2) == [[2], [0, 1]]


def test_equal_sequences_are_balanced_without_waste() -> None:
    bins = balanced_bins([10] * 64, multiple=2, max_tokens=80)
    assert [len(b) for b in bins] == [8] * 8


def test_minibatches_are_shuffled_anew_each_epoch_and_reproducibly() -> None:
    batch = build_batch([group(i, 2, [4, 5, 6]) for i in range(1, 5)])

    def order(seed: int) -> list[list[int]]:
        steps = Pass(Share(), 999, num_minibatches=2, num_epochs=2, seed=seed).minibatches(batch)
        return [s.micro_batches[0].targets_R.sort().values.tolist() for s in steps]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:2] != order(1)[2:]


def test_bins_without_sequences_are_refused_early() -> None:
    with pytest.raises(AssertionError, match="at least one sequence"):
        balanced_bins([], 1, 10)


def small_plan(rng: random.Random) -> tuple[Batch, Pass, int]:
    """Return a batch that may be far smaller than its pass expects, the pass, and the number of context ranks."""
    shapes = [
        (rng.randint(1, 5), [rng.choice([0, 0, 1, 1, rng.randint(2, 30)]) for _ in range(rng.randint(1, 4))])
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    groups = [group(i + 1, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    masked = {n for _, lengths in shapes for n in lengths if rng.random() < 0.3}
    batch = build_batch([truncated(g, *masked) for g in groups], rollout={"truncated": "mask"})
    share = Share(
        data_size=rng.choice([1, 2, 4, 8]),
        context_size=rng.choice([1, 1, 2]),
        tokens_multiple=rng.choice([1, 4]),
        packs_multiple=rng.choice([1, 1, 2, 4]),
        equal_lengths=rng.random() < 0.5,
        pair_cost=rng.choice([0.0, 0.05]),
    )
    sizes = {"num_minibatches": rng.randint(1, 16), "num_epochs": rng.randint(1, 2), "seed": rng.randint(0, 99)}
    return batch, Pass(share, rng.choice([1, 4, 16, 64]), **sizes), share.context_size


@pytest.mark.parametrize("num_plans", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_batch_may_be_smaller_than_its_pass(num_plans: int) -> None:
    """All ranks agree on the updates of any batch, even an empty one, and train each token once per epoch."""
    rng = random.Random(num_plans)
    num_empty_parts = num_empty_ranks = 0
    for _ in range(num_plans):
        batch, plan, context_size = small_plan(rng)
        num_ranks = plan.share.data_size
        needed = sequences_of([plan], batch, num_ranks)
        assert any(sequences.numel() for sequences in needed) == (batch.num_trained_tokens > 0)
        ranks = []
        for data_rank, context_rank in itertools.product(range(num_ranks), range(context_size)):
            mine = batch.holding(needed[data_rank])  # and no other rows, as `rollout/shares.py` deals them
            for stream in (s for s in batch.values if s.to != "every rank"):
                mine = mine.having(stream, mine.here(batch.values[stream]))
            share = replace(plan.share, data_rank=data_rank, context_rank=context_rank)
            ranks.append((share, list(replace(plan, share=share).minibatches(mine))))
        num_empty_parts += len(ranks[0][1]) < plan.num_minibatches * plan.num_epochs
        seen: list[int] = []
        for number in range(len(ranks[0][1])):
            steps = [steps[number] for _, steps in ranks]
            assert len({(len(s.micro_batches), s.num_trained_tokens, s.counts) for s in steps}) == 1, "ranks differ"
            assert len(steps[0].micro_batches) % plan.share.packs_multiple == 0
            packs = [mb for s in steps for mb in s.micro_batches]
            assert steps[0].num_trained_tokens == sum(int(mb.mask_R.sum()) for mb in packs) > 0
            seen += [int(i) for mb in packs for i in mb.batch_rows_R[mb.mask_R]]
            num_empty_ranks += any(not any(mb.rows_R.numel() for mb in s.micro_batches) for s in steps)
            for (share, _), step in zip(ranks, steps, strict=True):
                assert not share.equal_lengths or len({mb.num_tokens for mb in step.micro_batches}) == 1
                for mb in step.micro_batches:
                    _check_structure(mb, share, plan.max_tokens)
                    assert torch.equal(mb.targets_R, batch.token_ids_T[mb.batch_rows_R])
        assert {len(steps) for _, steps in ranks} == {len(ranks[0][1])}, "a rank would wait for the others"
        assert sorted(seen) == sorted(batch.mask_T.nonzero().squeeze(1).tolist() * plan.num_epochs)
    assert min(num_empty_parts, num_empty_ranks) > num_plans / 10, "such plans should be common here"


def test_batch_type_is_what_the_broadcast_expects() -> None:
    batch = BatchBuilder(Config()).build([group(1, 1, [1, 2])], {"rollout/num_rounds": 0.5})
    assert isinstance(batch, Batch)
    assert batch.metrics == batch_metrics([group(1, 1, [1, 2])]) | {"rollout/num_rounds": 0.5}


QWEN_7B = model_shape(KNOWN_MODELS["Qwen2.5-Math-7B"])
QWEN_32B = model_shape(KNOWN_MODELS["Qwen3-32B"])


def lower_bound(costs: list[float], num_ranks: int) -> float:
    """Return a time that no split over the ranks can beat: the mean, or sequences that must share a rank."""
    falling = sorted(costs, reverse=True)
    pair = sum(falling[num_ranks - 1 : num_ranks + 1]) if len(falling) > num_ranks else 0.0
    return max(sum(costs) / num_ranks, falling[0], pair)


@given(
    seed=st.integers(0, 10**6),
    num_ranks=st.sampled_from([2, 4, 8]),
    per_rank=st.integers(8, 64),
    median=st.sampled_from([500, 4000, 12_000]),
    sigma=st.floats(0.3, 1.5),
    packs_multiple=st.sampled_from([1, 4]),
    shape=st.sampled_from([QWEN_7B, QWEN_32B]),
)
@settings(deadline=None)
def test_data_ranks_have_equal_flops(
    seed: int, num_ranks: int, per_rank: int, median: int, sigma: float, packs_multiple: int, shape: ModelShape
) -> None:
    longest = 65_536
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, num_ranks * per_rank)
    lengths = np.clip(drawn, 16, longest).astype(int).tolist()
    share = Share(data_size=num_ranks, packs_multiple=packs_multiple, pair_cost=shape.pair_cost)
    shares = balanced_shares(single_units(lengths, share), share, longest)
    assert len(shares) == num_ranks
    assert len({len(bins) for bins in shares}) == 1
    assert len(shares[0]) % packs_multiple == 0
    assert sorted(i for bins in shares for b in bins for i in b) == list(range(len(lengths)))
    assert all(len(b) <= 1 or sum(lengths[i] for i in b) <= longest for bins in shares for b in bins)
    makespan = max(sum(share.cost(lengths[i]) for b in bins for i in b) for bins in shares)
    assert makespan <= 1.1 * lower_bound([share.cost(n) for n in lengths], num_ranks)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4), st.integers(50, 300))
@settings(deadline=None)
def test_with_packs_of_one_length_padding_counts(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    """With pipeline stages, no plan is worse than the fewest bins dealt in turn."""
    share = Share(data_size=num_ranks, equal_lengths=True, pair_cost=0.01)

    def makespan(shares: list[list[list[int]]]) -> float:
        def cost(bins: list[list[int]]) -> float:
            sizes = [sum(lengths[i] for i in b) for b in bins]
            padding = [max(sizes) - size for size in sizes]
            return sum(map(share.cost, [*(lengths[i] for b in bins for i in b), *padding]))

        return max(map(cost, shares))

    shares = balanced_shares(single_units(lengths, share), share, max_tokens)
    assert sorted(i for bins in shares for b in bins for i in b) == list(range(len(lengths)))
    fewest = len(balanced_bins(lengths, num_ranks, max_tokens)) // num_ranks
    plain = balanced_shares(single_units(lengths, share), replace(share, pair_cost=0.0), max_tokens)
    assert {len(bins) for bins in plain} == {fewest}
    assert makespan(shares) <= makespan(plain) * 1.34, "dealing by cost is within Graham's 4/3"


def test_one_rank_packs_by_tokens_alone() -> None:
    lengths = [90, 80, 50, 40, 40, 30, 10]
    share = Share(pair_cost=1.0)
    assert balanced_shares(single_units(lengths, share), share, 120) == [balanced_bins(lengths, 1, 120)]


def test_a_minibatch_counts_its_tokens_on_all_ranks() -> None:
    batch = build_batch([group(1, 2, [1, 3])])
    for rank in range(2):
        minibatch = one_minibatch(batch, max_tokens=100, share=Share(rank, 2, tokens_multiple=8))
        assert minibatch.counts == TokenCounts(tokens=8, squares=9 + 25, responses=4)
