"""Packed attention against one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.buffer.packing import context_tokens
from bapo_megatron.learner.attention import PackedAttention, attend, needs_repeated_heads
from bapo_megatron.learner.packs import PackedSequences, make_blocks

LENGTHS = [[5], [1, 1, 1], [3, 17, 4, 100, 1, 33, 8, 7], [6, 0, 6]]


def one_at_a_time(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Return literal softmax attention in the inputs' dtype, without any library kernel."""
    outputs = []
    for q_i, k_i, v_i in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        repeats = q.shape[2] // k.shape[2]
        k_i, v_i = (x[:, 0].repeat_interleave(repeats, dim=1) for x in (k_i, v_i))
        scores = torch.einsum("qnd,knd->nqk", q_i[:, 0], k_i) / q.shape[3] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        outputs.append(torch.einsum("nqk,knd->qnd", weights, v_i).flatten(1)[:, None])
    return torch.cat(outputs)


def assert_same(out: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare values, and gradients of a random weighting of the outputs."""
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_equals_one_sequence_at_a_time(lengths: list[int]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), 1, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    packed = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0).int())
    attention = PackedAttention(config=None)  # type: ignore[arg-type]  # it reads nothing from it
    out = attention(*inputs, None, packed_seq_params=packed)
    expected = one_at_a_time(*inputs, lengths)
    assert_same(out, expected, inputs)


@pytest.mark.parametrize("is_masked", [False, True])
def test_repeated_heads_give_the_same(is_masked: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 9, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    visible = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9) if is_masked else None
    shared, repeated = (attend(*inputs, visible, 0.3, repeat_heads=repeat) for repeat in (False, True))
    assert_same(repeated, shared, inputs)


def test_heads_are_repeated_where_a_gpu_has_no_kernel_that_shares_them() -> None:
    def repeats(device_type: str, dtype: torch.dtype, *, is_masked: bool) -> bool:
        return needs_repeated_heads(device_type, dtype, is_masked)

    assert repeats("cuda", torch.float32, is_masked=False)
    assert repeats("cuda", torch.bfloat16, is_masked=True)
    assert not repeats("cuda", torch.bfloat16, is_masked=False)
    assert not repeats("cpu", torch.float32, is_masked=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_hold_every_token_once_and_are_at_least_half_full(lengths: list[int]) -> None:
    num_tokens = sum(lengths)
    number = torch.arange(1, num_tokens + 1)[:, None].double()
    seen = torch.zeros(num_tokens, dtype=torch.int64)
    for block in make_blocks(torch.tensor([0, *lengths]).cumsum(0).int()):
        assert block.visible_S1QL is None
        part = block.queries
        assert block.keys is part
        padded = part.pad(number[:, None])
        held = padded[padded > 0].long() - 1
        assert 2 * held.numel() > part.num_sequences * part.length == padded.numel()
        seen[held] += 1
        again = part.unpad(padded, num_tokens)[:, 0]
        assert torch.equal(again[held], number[held, 0])
        assert again.count_nonzero() == held.numel()
    assert (seen == 1).all()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_context_ranks_together_equal_one_sequence_at_a_time(lengths: list[int], size: int) -> None:
    """Each rank's queries meet keys and values in the order that the gather leaves: rank after rank."""
    torch.manual_seed(0)
    lengths = [2 * size * length for length in lengths]
    cu_seqlens_S1 = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = [torch.randn(sum(lengths), 1, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    q, k, v = inputs
    tokens = [context_tokens(cu_seqlens_S1, rank, size) for rank in range(size)]
    gathered = torch.cat(tokens)
    attention = PackedAttention(config=None)  # type: ignore[arg-type]  # it reads nothing from it
    out = torch.zeros(sum(lengths), 1, 48, dtype=torch.float64)
    for rank in range(size):
        packed = PackedSequences(qkv_format="sbhd", blocks=make_blocks(cu_seqlens_S1, rank, size))
        part = attention(q[tokens[rank]], k[gathered], v[gathered], None, packed_seq_params=packed)
        out = out.index_copy(0, tokens[rank], part)
    expected = one_at_a_time(*inputs, lengths)
    assert_same(out, expected, inputs)
