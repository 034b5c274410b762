"""Mismatch and the decoupled objective on the Megatron learner: correct, and the same for every layout and split."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.algorithms.mismatch import Mismatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import proximal_scorer, with_scores
from bapo_megatron.monitor.record import UpdateMetrics
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    ADAM_EPS,
    BOUNDS,
    LR,
    SEARCH,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_learner import assert_close, make_config, make_minibatch

CAP = 1.5
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint; float64 log-probs of `random_batch` with its weights, and after a literal decoupled update."""
    root = tmp_path_factory.mktemp("mismatch")
    save_random_model("qwen3", root / "qwen3")
    model = load_float64(root / "qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0)
    first = reference_update(model, random_batch())
    updates, want = [], first
    for _ in range(2):
        loss, gradients = decoupled_update(model, optimizer, first.log_probs_T)
        updates.append({"loss": loss, "gradients": gradients, "log_probs_T": want.log_probs_T})
        want = reference_update(model, random_batch())
    torch.save(updates, root / "updates.pt")
    return root


def decoupled_update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, proximal_T: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Do one Adam step on - mean over trained tokens of w min(r A, clip(r, low, high) A), token by token."""
    batch, total, start = random_batch(), torch.zeros((), dtype=torch.float64), 0
    for length in batch.seq_lens_S.tolist():
        ids = batch.token_ids_T[start : start + length]
        log_p = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)
        for i in range(1, length):
            t = start + i
            if batch.mask_T[t]:
                advantage = batch.advantages_T[t].double()
                weight = (proximal_T[t] - batch.behaviour_logprobs_T[t].double()).exp().clamp(max=CAP)
                ratio = (log_p[i - 1, ids[i]] - proximal_T[t]).exp()
                clipped = ratio.clamp(BOUNDS.low, BOUNDS.high)
                total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
        start += length
    loss = total / int(batch.mask_T.sum())
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return loss.item(), gradients


def decoupled_config(layout: dict[str, Any], max_tokens: int) -> Config:
    config = make_config(layout, max_tokens_per_microbatch=max_tokens)
    loss = config.loss.model_copy(update={"proximal": "learner", "importance_cap": CAP})
    return config.model_copy(update={"loss": loss})


def some_of_age_0(batch: Batch) -> Batch:
    """Return the batch with two of three tokens sampled by version 0, the rest older."""
    index_T = torch.arange(batch.versions_T.numel())
    return dataclasses.replace(batch, versions_T=torch.where(index_T % 3 > 0, 0, -2))


def literal_mismatch(batch: Batch, log_probs_T: Tensor) -> tuple[int, float, float, float, float]:
    """Return tokens, mean, largest, KL and exact 99th percentile, from their definitions."""
    counted_T = batch.mask_T & (batch.versions_T == 0)
    difference = (log_probs_T - batch.behaviour_logprobs_T.double())[counted_T]
    size = difference.abs()
    kl = (difference.exp() - 1 - difference).mean()
    p99 = torch.quantile(size, 0.99, interpolation="higher")
    return size.numel(), float(size.mean()), float(size.max()), float(kl), float(p99)


def check_layout(folder: Path, layout: dict[str, Any], max_tokens: int) -> None:
    updates = torch.load(folder / "updates.pt", weights_only=True)
    config = decoupled_config(layout, max_tokens)
    learner = MegatronLearner(resolve(config, folder / "qwen3"))
    batch = some_of_age_0(random_batch())
    scored = with_scores(batch, [proximal_scorer(learner)], learner, config)
    is_response_T = batch.behaviour_logprobs_T != 0
    proximal_T = scored.proximal_logprobs_T
    assert proximal_T is not None
    assert_close(proximal_T[is_response_T], updates[0]["log_probs_T"][is_response_T], "proximal log-probs")
    assert not proximal_T[~is_response_T].any()
    minibatch = make_minibatch(learner, max_tokens, scored)
    check_search(learner, config, scored, updates[0]["log_probs_T"])

    for version, want in enumerate(updates):
        result = learner.step(minibatch, BOUNDS)
        assert result.metrics["loss/policy"] == pytest.approx(want["loss"], rel=TOLERANCE, abs=TOLERANCE)
        for name, gradient in learner.named_gradients():
            if learner.layout.rank == 0:
                assert_close(gradient, want["gradients"][name], f"update {version}, gradient of {name}")
        if version == 0:
            check_mismatch(result.mismatch, literal_mismatch(batch, want["log_probs_T"]))
        else:
            assert result.mismatch.num_tokens == 0, "no token has age 0 any more"
    check_alarm(learner, scored, max_tokens)
    parallel_state.destroy_model_parallel()


def check_mismatch(got: Mismatch, want: tuple[int, float, float, float, float]) -> None:
    """Compare the mismatch on every rank, including stages without a loss."""
    num_tokens, mean, largest, kl, p99 = want
    assert got.num_tokens == num_tokens
    assert got.mean == pytest.approx(mean, rel=TOLERANCE)
    assert float(got.largest) == pytest.approx(largest, rel=TOLERANCE)
    assert got.kl == pytest.approx(kl, rel=1e-4)
    assert got.quantile(0.99) == pytest.approx(p99, rel=0.012)


def check_search(learner: MegatronLearner, config: Config, batch: Batch, log_probs_T: Tensor) -> None:
    """At the step's own weights every ratio is 1, so only the importance weights decide the share."""
    behaviour = batch.behaviour_logprobs_T[batch.mask_T].double()
    weight = (log_probs_T[batch.mask_T] - behaviour).exp().clamp(max=CAP)
    mass, advantage = weight * behaviour.exp(), batch.advantages_T[batch.mask_T].double()
    positive, negative = (mass * advantage.clamp(min=0)).sum(), (mass * -advantage.clamp(max=0)).sum()
    fixed = config.bapo.model_copy(update={"rho0": 1e-9})  # reached immediately: starting bounds and their share
    finder = BoundsFinder(config.model_copy(update={"bapo": fixed}), learner)
    bounds = finder.find(make_minibatch(learner, config.train.max_tokens_per_microbatch, batch))
    assert (bounds.low, bounds.high) == (SEARCH.low.start, SEARCH.high.start)
    assert bounds.positive_share == pytest.approx(float(positive / (positive + negative)), rel=1e-5)


def check_alarm(learner: MegatronLearner, old: Batch, max_tokens: int) -> None:
    """Correct log-probs raise no alarm; shifted ones, and log-probs at the weights of two updates ago, do."""
    now_T = with_scores(old, [proximal_scorer(learner)], learner, learner.config).proximal_logprobs_T
    assert now_T is not None
    assert old.proximal_logprobs_T is not None
    for name, behaviour_T, is_wrong in (
        ("right", now_T, False),
        ("shifted", now_T + 2e-3, True),
        ("of old weights", old.proximal_logprobs_T, True),
    ):
        versions_T = torch.full_like(old.versions_T, learner.version)
        batch = dataclasses.replace(old, versions_T=versions_T, behaviour_logprobs_T=behaviour_T)
        updates = UpdateMetrics(learner.config)
        state = {n: p.clone() for n, p in learner.model.named_parameters()}
        updates.add(learner.step(make_minibatch(learner, max_tokens, batch), BOUNDS))
        metrics = updates.result()
        assert metrics["mismatch/alarms"] == is_wrong, (name, metrics["mismatch/logprob_mean"])
        assert metrics["mismatch/tokens"] == batch.num_trained_tokens
        assert is_wrong or metrics["mismatch/logprob_max"] < 1e-5
        assert math.isfinite(metrics["mismatch/kl"])
        with torch.no_grad():  # the next case compares with the same weights
            for n, p in learner.model.named_parameters():
                p.copy_(state[n])


def check_layouts(rank: int, world_size: int, folder: Path, cases: list[tuple[dict[str, Any], int]]) -> None:
    for layout, max_tokens in cases:
        try:
            check_layout(folder, layout, max_tokens)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {max_tokens} tokens per micro-batch") from error


def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, [({}, 1000), ({}, 50)])


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases = [({"tensor": 2, "sequence": True}, 60), ({"pipeline": 2}, 60), ({"data": 2}, 60)]
    run_distributed(check_layouts, 2, folder, cases)


@pytest.mark.slow
def test_four_processes(folder: Path) -> None:
    cases = [({"tensor": 2, "pipeline": 2}, 60), ({"pipeline": 2, "data": 2}, 1000)]
    run_distributed(check_layouts, 4, folder, cases)
