"""Score centering against sums over the whole vocabulary in fp64."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithms.centering import centering
from bapo_megatron.config.losses import LOSS_SECTIONS

LOW, HIGH = 0.7, 1.4
BOUNDS = SimpleNamespace(low=LOW, high=HIGH)
# loss, and its factor of one token's p and q by the formula
FACTORS: dict[str, Callable[[float, float], float]] = {
    "reinforce": lambda p, q: 1.0,
    "cispo": lambda p, q: min(max(p / q, LOW), HIGH),
    "sao": lambda p, q: p / q if LOW < p / q < HIGH else 0.0,
}


def factor_of(loss: str) -> Callable[[Tensor], Tensor]:
    return partial(LOSS_SECTIONS[loss].model_validate({"name": loss}).factor, bounds=BOUNDS)


def classes(logits_RV: Tensor, ids_RK: Tensor) -> Tensor:
    """Return the log-probs of given tokens and of all others together."""
    others_RV = torch.ones_like(logits_RV).scatter(1, ids_RK, 0.0).bool()
    others_R = logits_RV.masked_fill(~others_RV, -torch.inf).logsumexp(1)
    return torch.cat([logits_RV.gather(1, ids_RK), others_R[:, None]], 1).log_softmax(1)


def gradient_of(logits_RV: Tensor, ids_RK: Tensor, log_q_RV: Tensor, loss: str) -> Tensor:
    """Return the gradient of C by the logits."""
    logits_RV = logits_RV.clone().requires_grad_()
    every_R = torch.ones(len(logits_RV), dtype=torch.bool)
    found = centering(classes(logits_RV, ids_RK), log_q_RV.gather(1, ids_RK), every_R, factor_of(loss))
    found.centre_R.sum().backward()
    assert logits_RV.grad is not None
    return logits_RV.grad


def literal(p_RV: Tensor, q_RV: Tensor, ids_RK: Tensor, loss: str) -> Tensor:
    """Return sum_v q_v f(p_v / q_v) (e_v - p), token by token; the sampler's tail has the policy's proportions."""
    means = []
    for p_V, q_V, ids_K in zip(p_RV.tolist(), q_RV.tolist(), ids_RK.tolist(), strict=True):
        tail = [v for v in range(len(p_V)) if v not in ids_K]
        rho = sum(q_V[v] for v in tail) / sum(p_V[v] for v in tail)
        seen_V = [rho * p if v in tail else q for v, (p, q) in enumerate(zip(p_V, q_V, strict=True))]
        mass_V = [q * FACTORS[loss](p, q) for p, q in zip(p_V, seen_V, strict=True)]
        means.append([mass - sum(mass_V) * p for mass, p in zip(mass_V, p_V, strict=True)])
    return torch.tensor(means, dtype=torch.float64)


@pytest.mark.parametrize("loss", FACTORS)
def test_the_centre_equals_the_mean_score_of_the_sampler(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(400):
        rows, vocab = 3, int(torch.randint(2, 9, (), generator=generator))
        logits_RV = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
        log_q_RV = (logits_RV + 0.4 * torch.randn(rows, vocab, generator=generator).double()).log_softmax(1)
        ids_RK = log_q_RV.topk(1 + case % (vocab - 1), dim=1).indices
        wanted_RV = literal(logits_RV.softmax(1), log_q_RV.exp(), ids_RK, loss)
        found_RV = gradient_of(logits_RV, ids_RK, log_q_RV, loss)
        torch.testing.assert_close(found_RV, wanted_RV, rtol=1e-9, atol=1e-9)


def test_the_mean_update_of_a_constant_advantage_is_0() -> None:
    """The papers' example: without centering it is q - p."""
    p_RV, q_RV = (torch.tensor([row], dtype=torch.float64) for row in ([0.6, 0.4], [0.5, 0.5]))
    found_RV = gradient_of(p_RV.log(), torch.tensor([[0]]), q_RV.log(), "reinforce")
    torch.testing.assert_close(found_RV, q_RV - p_RV)
    score_AV = torch.eye(2, dtype=torch.float64) - p_RV
    torch.testing.assert_close(q_RV @ (score_AV - found_RV), torch.zeros_like(p_RV), atol=1e-12, rtol=0)


def test_equal_policies_have_no_centre_and_no_divergence() -> None:
    log_p_RV = torch.randn(4, 7, dtype=torch.float64).log_softmax(1)
    ids_RK = log_p_RV.topk(3, dim=1).indices
    every_R = torch.ones(4, dtype=torch.bool)
    for loss in FACTORS:
        torch.testing.assert_close(
            gradient_of(log_p_RV, ids_RK, log_p_RV, loss), torch.zeros_like(log_p_RV), atol=1e-12, rtol=0
        )
        found = centering(classes(log_p_RV, ids_RK), log_p_RV.gather(1, ids_RK), every_R, factor_of(loss))
        torch.testing.assert_close(found.kl_R, torch.zeros(4).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(found.mass_R, log_p_RV.gather(1, ids_RK).exp().sum(1))


@pytest.mark.parametrize("loss", FACTORS)
def test_masked_tokens_and_a_sampler_without_a_tail(loss: str) -> None:
    """A masked nan reaches neither value nor gradient; rounding may put the mass of the K tokens above 1."""
    policy_RX = torch.tensor([[-0.5, -1.0, -torch.inf], [torch.nan] * 3, [-0.1, -3.0, -4.0]], requires_grad=True)
    sampler_RK = torch.tensor([[-0.5, -0.9], [torch.nan, -1.0], [3e-7, -20.0]])
    mask_R = torch.tensor([False, False, True])
    found = centering(policy_RX, sampler_RK, mask_R, factor_of(loss))
    found.centre_R.sum().backward()
    assert policy_RX.grad is not None
    for values in (*found, policy_RX.grad):
        assert torch.isfinite(values).all()
    assert found.centre_R[:2].tolist() == [0.0, 0.0]
    assert policy_RX.grad[:2].abs().sum() == 0
    assert policy_RX.grad[2, 2] == 0, "the sampler gives other tokens nothing"


def test_a_nan_of_a_trained_token_stays() -> None:
    policy_RX, sampler_RK = torch.tensor([[torch.nan, -1.0, -2.0]]), torch.tensor([[-0.5, -1.5]])
    for loss in FACTORS:
        assert centering(policy_RX, sampler_RK, torch.tensor([True]), factor_of(loss)).centre_R.isnan().all()
