"""A teacher's likeliest tokens and the divergence on them, against a complete fp64 log_softmax."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from bapo_megatron.algorithms.likely import class_log_probs, divergence, likeliest
from bapo_megatron.algorithms.logprobs import VocabShard
from bapo_megatron.config.schema_loss import Divergence
from tests.distributed import run_distributed
from tests.unit.test_logprobs import peak_bytes

ROWS, HIDDEN, TEMPERATURE = 23, 6, 0.7


def model(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_RH = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden_RH.to(dtype), torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def whole(vocab: int) -> VocabShard:
    return VocabShard(group=None, start=0, size=vocab, vocab_size=vocab)


def dense(kind: Divergence, teacher: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor], k: int) -> list[Tensor]:
    """Return ids, the teacher's mass on them, and the divergence by its formula: others are summed token by token."""
    q_RV, p_RV = (torch.softmax(h_RH.double() @ w_VH.double().T / TEMPERATURE, 1) for h_RH, w_VH in (teacher, policy))
    ids_RK = q_RV.argsort(dim=1, descending=True, stable=True)[:, :k]
    is_other_RV = torch.ones_like(q_RV).scatter_(1, ids_RK, 0.0)
    q_RX, p_RX = (torch.cat([x.gather(1, ids_RK), (x * is_other_RV).sum(1, keepdim=True)], 1) for x in (q_RV, p_RV))
    of_class_RX = q_RX * (q_RX / p_RX).log() if kind == "forward" else p_RX * (p_RX / q_RX).log()
    return [ids_RK, q_RX[:, :k].sum(1), of_class_RX.sum(1)]


def weighted(values_R: Tensor) -> Tensor:
    return (torch.linspace(-1, 2, values_R.numel(), dtype=torch.float64) * values_R).sum()


def part_of(whole_VH: Tensor, shard: VocabShard, padding: float = 9.0) -> Tensor:
    """Return a shard's rows, with rows of padding that would be the likeliest."""
    rows_VH = torch.full((shard.size, HIDDEN), padding, dtype=torch.float64)
    rows_VH[: shard.num_real] = whole_VH.detach()[shard.start : shard.start + shard.num_real]
    return rows_VH


def check_shards(rank: int, world_size: int) -> None:
    """Check all splits, ranks that hold fewer than K tokens or only padding, several chunks, and no rows at all."""
    cases = [(50, 13, ROWS, 5, 7), (50, 13, ROWS, 1, 1024), (9, 3, ROWS, 5, 4), (9, 3, 0, 5, 4), (9, 3, ROWS, 8, 5)]
    for vocab, size_of_four, rows, k, chunk_tokens in cases:
        size = size_of_four * 4 // world_size
        teacher, policy = model(0, rows, vocab), model(1, rows, vocab)
        shard = VocabShard(dist.group.WORLD if world_size > 1 else None, rank * size, size, vocab)
        options = {"temperature": TEMPERATURE, "shard": shard, "chunk_tokens": chunk_tokens}

        ids_RK, teacher_RX = likeliest(teacher[0], part_of(teacher[1], shard), k, **options)
        for kind in ("forward", "reverse"):
            exact = [x.clone().requires_grad_() for x in policy]
            wanted_RK, mass_R, wanted_R = dense(kind, teacher, (exact[0], exact[1]), k)
            weighted(wanted_R).backward()
            hidden_RH, weight_VH = policy[0].clone().requires_grad_(), part_of(policy[1], shard).requires_grad_()
            policy_RX = class_log_probs(hidden_RH, weight_VH, ids_RK, **options)
            found_R = divergence(policy_RX, teacher_RX, torch.ones(rows, dtype=torch.bool), kind)
            weighted(found_R).backward()
            assert torch.equal(ids_RK, wanted_RK.int())
            found = (teacher_RX[:, :-1].exp().sum(1), found_R, hidden_RH.grad, weight_VH.grad)
            want = (mass_R, wanted_R, exact[0].grad, part_of(exact[1].grad, shard, padding=0.0))
            torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world_size", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_values_and_gradients_over_shards(world_size: int) -> None:
    run_distributed(check_shards, world_size)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_gradcheck(kind: Divergence) -> None:
    teacher, policy = model(0, 4, 11), model(1, 4, 11)
    ids_RK, teacher_RX = likeliest(*teacher, 3, temperature=TEMPERATURE, shard=whole(11), chunk_tokens=3)

    def call(hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
        policy_RX = class_log_probs(hidden_RH, weight_VH, ids_RK, shard=whole(11), chunk_tokens=3)
        return divergence(policy_RX, teacher_RX, torch.ones(4, dtype=torch.bool), kind)

    assert gradcheck(call, [x.requires_grad_() for x in policy])


def test_all_tokens_but_one_give_the_complete_divergence() -> None:
    teacher, policy = model(0, ROWS, 9), model(1, ROWS, 9)
    ids_RK, teacher_RX = likeliest(*teacher, 8, shard=whole(9))
    policy_RX, every_R = class_log_probs(*policy, ids_RK, shard=whole(9)), torch.ones(ROWS, dtype=torch.bool)
    log_q_RV, log_p_RV = (torch.log_softmax(h @ w.T, 1) for h, w in (teacher, policy))
    for kind, (a_RV, b_RV) in {"forward": (log_q_RV, log_p_RV), "reverse": (log_p_RV, log_q_RV)}.items():
        complete_R = (a_RV.exp() * (a_RV - b_RV)).sum(1)
        torch.testing.assert_close(divergence(policy_RX, teacher_RX, every_R, kind), complete_R, rtol=1e-9, atol=1e-9)


def test_equal_tokens_are_in_the_order_of_their_ids() -> None:
    hidden_RH, weight_VH = model(0, ROWS, 12)
    weight_VH[[3, 5, 8]] = weight_VH[1].clone()
    ids_RK, log_probs_RX = likeliest(hidden_RH, weight_VH, 11, shard=whole(12))
    for ids, log_probs in zip(ids_RK.tolist(), log_probs_RX[:, :-1].tolist(), strict=True):
        assert list(zip(ids, log_probs, strict=True)) == sorted(
            zip(ids, log_probs, strict=True), key=lambda one: (-one[1], one[0])
        )
        assert len({*ids}) == 11


def test_a_tail_without_digits_in_float32_has_its_value_and_gradient() -> None:
    """The K tokens have all but e^-60 of both distributions: 1 - their mass is 0 in float32, and in float64."""
    hidden_RH = torch.ones(1, 1)
    logits = {"teacher": [1.0, 0.0, -60.0, -61.0], "policy": [0.0, 1.0, -90.0, -62.0]}
    teacher_VH, policy_VH = (torch.tensor(column)[:, None] for column in logits.values())
    ids_RK, teacher_RX = likeliest(hidden_RH, teacher_VH, 2, shard=whole(4))
    policy_VH.requires_grad_()
    policy_RX = class_log_probs(hidden_RH, policy_VH, ids_RK, shard=whole(4))
    z = [math.log(math.fsum(map(math.exp, column))) for column in logits.values()]
    tails = [math.log(math.exp(-60) + math.exp(-61)) - z[0], math.log(math.exp(-90) + math.exp(-62)) - z[1]]
    assert teacher_RX[0, 2].item() == pytest.approx(tails[0], rel=1e-6)
    assert policy_RX[0, 2].item() == pytest.approx(tails[1], rel=1e-6)
    policy_RX[0, 2].backward()
    assert policy_VH.grad is not None
    assert policy_VH.grad[3].item() == pytest.approx(1 - math.exp(-62 - z[1]), rel=1e-6)


def test_masked_rows_give_0_and_no_gradient_whatever_they_hold() -> None:
    policy_RX = torch.log_softmax(torch.randn(3, 4, dtype=torch.float64), 1)
    policy_RX[1] = math.nan
    teacher_RX = torch.log_softmax(torch.randn(3, 4, dtype=torch.float64), 1)
    teacher_RX[1] = math.inf
    policy_RX.requires_grad_()
    for kind in ("forward", "reverse"):
        found_R = divergence(policy_RX, teacher_RX, torch.tensor([True, False, True]), kind)
        (gradient_RX,) = torch.autograd.grad(found_R.sum(), policy_RX)
        assert found_R[1] == 0
        assert (found_R[::2] > 0).all()
        assert not gradient_RX[1].any()
        assert gradient_RX.isfinite().all()


@pytest.mark.parametrize("hooks_need_grad", [False, True])
def test_the_weights_gradient_goes_to_main_grad(hooks_need_grad: bool) -> None:
    hidden_RH, weight_VH = (x.requires_grad_() for x in model(1, ROWS, 11, torch.bfloat16))
    ids_RK, _ = likeliest(*model(0, ROWS, 11), 3, shard=whole(11))
    main_VH = torch.zeros(11, HIDDEN)
    weight_VH.main_grad = main_VH
    weighted(
        class_log_probs(hidden_RH, weight_VH, ids_RK, shard=whole(11), hooks_need_grad=hooks_need_grad)[:, 1]
    ).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden_RH, weight_VH)]
    weighted(torch.log_softmax(exact[0] @ exact[1].T, 1).gather(1, ids_RK[:, 1:2].long())[:, 0]).backward()
    torch.testing.assert_close(main_VH.double(), exact[1].grad, rtol=1e-5, atol=1e-5)
    assert not weight_VH.grad.any() if hooks_need_grad else weight_VH.grad is None


@pytest.mark.slow
def test_the_peak_of_new_tensors_is_a_fifth_of_the_logits() -> None:
    """Of 8,192 rows, with the default chunks: ids, log-probs, gradients and one chunk of logits."""
    rows, vocab = 8192, 8192
    teacher, policy = ([x.float() for x in model(seed, rows, vocab)] for seed in (0, 1))
    hidden_RH, weight_VH = (x.requires_grad_() for x in policy)

    def run() -> None:
        ids_RK, teacher_RX = likeliest(*teacher, 64, shard=whole(vocab))
        policy_RX = class_log_probs(hidden_RH, weight_VH, ids_RK, shard=whole(vocab))
        divergence(policy_RX, teacher_RX, torch.ones(rows, dtype=torch.bool), "reverse").sum().backward()

    assert peak_bytes(run) < 0.2 * 4 * rows * vocab
