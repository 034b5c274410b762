"""Score centering in the learner: loss and gradient equal sums over the whole vocabulary, at any layout and split."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema_loss import CenteredLoss
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.tokens import sampler_streams
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import VOCAB_SIZE, load_float64, save_random_model
from tests.integration.test_likely_learner import log_softmax_TV
from tests.integration.test_mean_over_learner import config_of, mean_of
from tests.integration.test_rivals_learner import ONE_PROCESS, TOLERANCE, TWO_PROCESSES, Case, batch_of_outcomes
from tests.integration.test_schedule import SMALL
from tests.unit.test_centering import FACTORS, HIGH, LOW

# loss, mean_over, K
TERMS = [("sao", "tokens", 5), ("reinforce", "responses", 1), ("cispo", "budget", 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("centering")
    save_random_model("qwen3", root / "policy")
    return root


def sampled_elsewhere(batch: Batch, log_p_TV: Tensor, top_k: int) -> tuple[Batch, Tensor, Tensor]:
    """Return a batch whose sampler is near the model, with its likeliest tokens, its log-probs, and these tokens."""
    noise_TV = 0.5 * torch.randn(log_p_TV.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    log_q_TV = (log_p_TV.detach() + noise_TV).log_softmax(1).float().double()  # servers return float32
    ids_TK = log_q_TV.topk(top_k, dim=1).indices
    own_T = log_q_TV.gather(1, batch.token_ids_T[:, None])[:, 0]
    ids, logprobs = sampler_streams(top_k, VOCAB_SIZE)
    extra = {ids: ids_TK.int(), logprobs: log_q_TV.gather(1, ids_TK).float()}
    behaviour_T = torch.where(batch.sampled_T, own_T, 0.0).float()
    return dataclasses.replace(batch, behaviour_logprobs_T=behaviour_T, extra=extra), log_q_TV, ids_TK


def check_layout(root: Path, layout: dict[str, Any], max_tokens: int, term: tuple[str, str, int], **train: Any) -> None:
    name, mean_over, top_k = term
    given = {"name": name, "mean_over": mean_over, "center_top_k": top_k}
    given |= {} if name == "reinforce" else {"clip_low": LOW, "clip_high": HIGH}
    loss = LOSS_SECTIONS[name].model_validate(given)
    assert isinstance(loss, CenteredLoss)
    config = config_of(loss, layout, max_tokens, **train)
    model = load_float64(root / "policy")
    log_p_TV = log_softmax_TV(model, batch_of_outcomes())
    batch, log_q_TV, ids_TK = sampled_elsewhere(batch_of_outcomes(), log_p_TV, top_k)

    # The mean update of all tokens v, one by one; the sampler's tail has the policy's proportions.
    p_TV, is_tail_TV = log_p_TV.detach().exp(), torch.ones_like(log_q_TV).scatter(1, ids_TK, 0.0)
    q_TV = log_q_TV.exp()
    rho_T1 = (q_TV * is_tail_TV).sum(1, keepdim=True) / (p_TV * is_tail_TV).sum(1, keepdim=True)
    seen_TV = torch.where(is_tail_TV.bool(), rho_T1 * p_TV, q_TV)
    factor_TV = torch.tensor(
        [
            [FACTORS[name](p, q) for p, q in zip(p_V, q_V, strict=True)]
            for p_V, q_V in zip(p_TV.tolist(), seen_TV.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    own_T = log_p_TV.gather(1, batch.token_ids_T[:, None])[:, 0]
    pairs = zip(own_T.detach().exp().tolist(), batch.behaviour_logprobs_T.double().exp().tolist(), strict=True)
    factor_T = torch.tensor([FACTORS[name](p, q) for p, q in pairs], dtype=torch.float64)
    centre_T = (seen_TV * factor_TV * log_p_TV).sum(1)
    loss_T = -batch.advantages_T.double() * (factor_T * own_T - centre_T)
    mean_of(mean_over)(loss_T, batch).backward()
    q_TX, p_TX = (torch.cat([x.gather(1, ids_TK), (x * is_tail_TV).sum(1, keepdim=True)], 1) for x in (q_TV, p_TV))

    learner = MegatronLearner(resolve(config, root / "policy"))
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    metrics = learner.step(minibatch, BoundsFinder(config, learner).find(minibatch)).metrics
    means = {"loss/sampler_kl": (q_TX * (q_TX / p_TX).log()).sum(1), "loss/sampler_mass": q_TX[:, :-1].sum(1)}
    for key, values_T in means.items():
        assert metrics[key] == pytest.approx(float(values_T[batch.mask_T].mean()), rel=TOLERANCE, abs=TOLERANCE), key
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for key, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), gradients[key], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for layout, max_tokens in cases:
        for term in TERMS:
            check_layout(root, layout, max_tokens, term)
    if world_size == 1:
        for schedule in ("forwards_first", "interleaved"):
            check_layout(root, {}, SMALL, TERMS[2], schedule=schedule)


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, ONE_PROCESS)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases = [*TWO_PROCESSES, ({"data": 2, "distributed": True}, SMALL)]
    run_distributed(check_layouts, 2, folder, cases)
