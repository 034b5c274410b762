"""Every rank gets the sequences that its passes need, and packs them as if it had the whole batch."""

import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bapo_megatron.buffer.packing import Pass, Share, sequences_of
from bapo_megatron.rollout import shares as dealing
from bapo_megatron.rollout.shares import BatchShares, header_of
from bapo_megatron.runtime.together import share_json
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Batch, MicroBatch
from tests.distributed import HANG_S, run_distributed

ROUTES = TokenStream("routes", "uint8", (4, 2), missing=255, on="fed", to="owner's stage")
SCORES = TokenStream("scores", "float64", (3,))
HEAVY = TokenStream("heavy", "uint8", (48, 8), on="fed")


def make_batch(num_sequences: int, *streams: TokenStream) -> Batch:
    generator = torch.Generator().manual_seed(4)
    lens_S = torch.randint(3, 30, (num_sequences,), generator=generator)
    num_tokens = int(lens_S.sum())
    sampled_T = torch.rand(num_tokens, generator=generator) < 0.7
    sampled_T[lens_S.cumsum(0) - lens_S] = False
    values_T = torch.randn(num_tokens, generator=generator)

    def rows(stream: TokenStream) -> Tensor:
        return torch.randint(0, 200, (num_tokens, *stream.shape), generator=generator).to(getattr(torch, stream.dtype))

    return Batch(
        token_ids_T=torch.arange(num_tokens),
        seq_lens_S=lens_S,
        sampled_T=sampled_T,
        advantages_T=values_T * sampled_T,
        behaviour_logprobs_T=-values_T.abs() * sampled_T,
        versions_T=torch.where(sampled_T, torch.arange(num_tokens), -1),
        mask_T=sampled_T & (values_T > -1),
        rewards_S=torch.rand(num_sequences, generator=generator),
        teacher_S=torch.arange(num_sequences) % 2,
        extra={stream: rows(stream) for stream in streams},
        metrics={"reward/mean": 0.1},
    )


def passes_of(share: Share, num_epochs: int = 2) -> list[Pass]:
    other = replace(share, pair_cost=0.1)  # for another model
    return [
        Pass(share, 40),
        Pass(other, 40),
        Pass(share, 40, teacher=1),
        Pass(share, 40, num_minibatches=2, num_epochs=num_epochs, seed=5),
    ]


def layers_of(stage: int, num_layers: int) -> list[int]:
    return list(range(stage, num_layers, 2))


def packs_on_every_rank(rank: int, world_size: int) -> None:
    """Check two data ranks with two stages and two tensor ranks each, numbered as in Megatron."""
    stage, data_rank = rank // 4, rank // 2 % 2
    whole = make_batch(13, ROUTES, SCORES)
    shares = BatchShares(data_rank, stage, layers_of, HANG_S)
    header = share_json((lambda: header_of(whole)) if rank == 0 else None, sign_of_life_s=1.0)
    passes = passes_of(Share(data_rank, 2, context_rank=0, context_size=2, equal_lengths=True))
    batch = shares.deal(whole if rank == 0 else None, header, partial(sequences_of, passes, data_size=2))
    assert batch.metrics == whole.metrics
    assert batch.rewards_S is not None
    assert whole.rewards_S is not None
    assert torch.equal(batch.rewards_S, whole.rewards_S)
    assert batch.prompt_S is None
    for one in passes:
        for got, want in zip(one.minibatches(batch), one.minibatches(whole), strict=True):
            assert (got.num_trained_tokens, got.counts) == (want.num_trained_tokens, want.counts)
            for mine, expected in zip(got.micro_batches, want.micro_batches, strict=True):
                assert_same(mine, expected, stage)


def assert_same(got: MicroBatch, want: MicroBatch, stage: int) -> None:
    for f in fields(MicroBatch):
        if f.name != "extra":
            found, expected = getattr(got, f.name), getattr(want, f.name)
            assert found is expected is None or torch.equal(found, expected), f.name
            assert found is None or found.dtype == expected.dtype
    assert got.extra.keys() == want.extra.keys() == {ROUTES, SCORES}
    assert torch.equal(got.extra[SCORES], want.extra[SCORES])
    assert torch.equal(got.extra[ROUTES], want.extra[ROUTES][:, layers_of(stage, 4)]), "its own layers alone"


def test_shares_are_packed_like_the_whole_batch() -> None:
    run_distributed(packs_on_every_rank, 8)


def sent_by_rank_0(monkeypatch: pytest.MonkeyPatch, batch: Batch, data_size: int, passes: list[Pass]) -> int:
    """Count the bytes that rank 0 sends to two tensor ranks per data rank; like gloo, n ranks take log2(n) copies."""
    sent = 0
    places = [[rank // 2, 0] for rank in range(2 * data_size)]

    def broadcast(tensor: Tensor, src: int, group: list[int] | None) -> None:
        nonlocal sent
        assert src == 0
        sent += tensor.nbytes * math.ceil(math.log2(len(places if group is None else group)))

    def send(tensor: Tensor, dst: int) -> None:
        nonlocal sent
        assert places[dst][0] != places[dst - 1][0], "the first of a data rank"
        sent += tensor.nbytes

    monkeypatch.setattr(dealing, "gather_json", lambda place: places)
    monkeypatch.setattr(dealing.dist, "new_group", lambda ranks, **options: ranks)
    monkeypatch.setattr(dealing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dealing.dist, "broadcast", broadcast)
    monkeypatch.setattr(dealing.dist, "send", send)
    shares = BatchShares(0, 0, layers_of, HANG_S)
    shares.deal(batch, header_of(batch), partial(sequences_of, passes, data_size=data_size))
    return sent


def test_a_token_takes_20_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Id, version, advantage and log-prob of four bytes each, once; what all four ranks need is two bytes, twice."""
    batch = make_batch(256)
    sent = sent_by_rank_0(monkeypatch, batch, 2, [Pass(Share(0, 2), 200)])
    assert sent == (4 * 4 + 2 * 2) * batch.sampled_T.numel() + 2 * 256 * (8 + 4 + 8)  # and lengths, rewards, teachers


@pytest.mark.parametrize("data_size", [2, 4, 8])
def test_rank_0_sends_each_sequence_to_a_data_rank_once(monkeypatch: pytest.MonkeyPatch, data_size: int) -> None:
    batch = make_batch(256, HEAVY)
    num_bytes = sum(rows.nbytes for rows in batch.values.values())
    for num_epochs in (1, 4):
        passes = [Pass(Share(0, data_size), 200, num_minibatches=2, num_epochs=num_epochs, seed=1)]
        needed = sequences_of(passes, batch, data_size)
        union = sum(int(batch.seq_lens_S[sequences].sum()) for sequences in needed) / int(batch.seq_lens_S.sum())
        sent = sent_by_rank_0(monkeypatch, batch, data_size, passes)
        assert union == 1 if num_epochs == 1 else 1 < union <= 4
        assert sent <= 1.05 * union * num_bytes
