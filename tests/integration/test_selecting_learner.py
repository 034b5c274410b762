"""Clip-Cov, KL-Cov and the mask by entropy in the learner: every layout and split selects the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema_loss import SelectingLoss
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import load_float64, reference_update, save_random_model
from tests.integration.test_rivals_learner import TOLERANCE, batch_of_outcomes, config_of
from tests.integration.test_schedule import LARGE, SMALL, CountedLearner
from tests.unit.loss_inputs import loss_inputs
from tests.unit.test_top_share import literal_loss, selected_by_sorting

CASES: dict[str, dict[str, Any]] = {
    "clip_cov": {"share": 0.1, "covariance_low": 0.05, "covariance_high": 2.0, "clip_low": 0.6, "clip_high": 1.6},
    "kl_cov": {"share": 0.1},
    "kl_cov, ties": {"share": 0.1},
    "top_entropy": {"share": 0.2},
    "top_entropy, proximal": {"share": 0.2, "proximal": "learner"},
}

Case = tuple[dict[str, Any], str, int]  # [parallel], train.schedule, tokens per micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("selecting")
    save_random_model("qwen3", root / "qwen3")
    return root


def batch_of(case: str) -> Batch:
    batch = batch_of_outcomes()
    if "ties" in case:  # each covariance is 0, so that places decide
        batch = dataclasses.replace(batch, advantages_T=0.5 * batch.sampled_T)
    if "proximal" in case:  # scored already, without entropies
        batch = dataclasses.replace(batch, proximal_logprobs_T=batch.behaviour_logprobs_T, proximal_version=0)
    return batch


def literal_inputs(log_probs_T: Tensor, entropy_T: Tensor, batch: Batch) -> LossInputs:
    """Return the whole batch as one micro-batch, so that places are the batch's rows."""
    return loss_inputs(
        log_probs_R=log_probs_T,
        behaviour_logprobs_R=batch.behaviour_logprobs_T.double(),
        advantages_R=batch.advantages_T.double(),
        mask_R=batch.mask_T,
        entropy_R=entropy_T,
        bounds=None,  # type: ignore[arg-type]
    )


def selected_anywhere(learner: CountedLearner, finder: BoundsFinder, minibatch: Any, found: Any) -> set[int]:
    """Return the batch's rows that the loss selects on any rank."""
    loss, mine = learner.config.loss, []
    assert isinstance(loss, SelectingLoss)
    scored = learner.score(minibatch, with_entropy=loss.reads_entropy)
    for batch, (log_probs_R, entropy_R) in zip(minibatch.micro_batches, scored, strict=bool(scored)):
        tokens: Any = finder._scored(batch, log_probs_R, entropy_R)
        scores_R = loss.scores(tokens, found.means)
        mine += batch.batch_rows_R[found.selected(scores_R, batch)].tolist()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return set().union(*everywhere)


def check_layout(root: Path, case: str, layout: dict[str, Any], schedule: str, max_tokens: int) -> None:
    name, batch = case.split(",")[0], batch_of(case)
    config = config_of({"name": name} | CASES[case], layout, max_tokens)
    config = config.model_copy(update={"train": config.train.model_copy(update={"schedule": schedule})})
    learner = CountedLearner(resolve(config, root / "qwen3"))
    chosen: list[set[int]] = []
    entropy_T = reference_update(load_float64(root / "qwen3"), batch).entropy_T

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        inputs = literal_inputs(log_probs_T.detach(), entropy_T, batch)
        chosen.append(selected_by_sorting(inputs, config.loss, version=0))
        loss, gradient_T = literal_loss(inputs, config.loss, chosen[0])
        surrogate = (log_probs_T * gradient_T).sum()
        return (surrogate + (loss - surrogate.detach())) / batch.num_trained_tokens

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    assert max_tokens != SMALL or len(minibatch.micro_batches) >= 4 // learner.layout.data_size
    finder = BoundsFinder(learner.config, learner)
    found = finder.find(minibatch)
    num_forwards = learner.num_forwards
    assert selected_anywhere(learner, finder, minibatch, found) == chosen[0]
    assert found.num_selected == len(chosen[0]) > 3
    found, learner.num_forwards = finder.find(minibatch), 0  # the step follows its own scoring
    result = learner.step(minibatch, found)
    if schedule == "forwards_first":
        assert (num_forwards, learner.num_forwards) == (len(minibatch.micro_batches), 0), "scoring is the step's pass"
    assert result.metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    assert result.metrics["train/tokens"] == batch.num_trained_tokens, "the divisor stays"
    for parameter, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[parameter], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for case in CASES:
        for layout, schedule, max_tokens in cases:
            try:
                check_layout(root, case, layout, schedule, max_tokens)
            except AssertionError as error:
                raise AssertionError(f"{case}, {layout}, {schedule}, {max_tokens} tokens a micro-batch") from error


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    cases: list[Case] = [
        ({}, "interleaved", LARGE),
        ({}, "interleaved", SMALL),
        ({}, "forwards_first", SMALL),
    ]
    run_distributed(check_layouts, 1, folder, cases)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases: list[Case] = [
        ({"data": 2}, "interleaved", SMALL),
        ({"tensor": 2, "sequence": True}, "interleaved", LARGE),
        ({"context": 2}, "interleaved", SMALL // 2),
        ({"pipeline": 2}, "interleaved", SMALL),
    ]
    run_distributed(check_layouts, 2, folder, cases)
