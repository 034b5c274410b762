"""The rivals in the learner: loss and gradient equal the papers' formulas at any layout and split."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema_loss import LOSS_SECTIONS
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import load_float64, random_batch, reference_update, save_random_model
from tests.integration.test_schedule import LARGE, SMALL, make_config
from tests.unit.test_rivals import RIVALS, objective_of

TOLERANCE = 1e-5
WIDE = {"clip_low": 0.6, "clip_high": 1.6}  # some responses and tokens are clipped, some are not

Case = tuple[dict[str, Any], int]  # [parallel], tokens of a micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rivals")
    save_random_model("qwen3", root / "qwen3")
    return root


def batch_of_outcomes() -> Batch:
    """The random batch with one advantage for each response, and behaviour log-probs near the model's."""
    batch = random_batch()
    generator = torch.Generator().manual_seed(6)
    advantages_S = torch.randn(batch.num_sequences, generator=generator)
    is_response_T = batch.behaviour_logprobs_T != 0
    noise_T = 0.3 * torch.randn(is_response_T.shape, generator=generator)
    return dataclasses.replace(
        batch,
        advantages_T=advantages_S.repeat_interleave(batch.seq_lens_S) * is_response_T,
        behaviour_logprobs_T=(-3.5 + noise_T) * is_response_T,  # of 33 tokens, at random weights
    )


def check_layout(root: Path, name: str, layout: dict[str, Any], max_tokens: int) -> None:
    options = {} if name in ("sapo", "m2po") else WIDE
    loss_config: Any = LOSS_SECTIONS[name].model_validate({"name": name} | options)
    config = make_config(layout, max_tokens)
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e9})
    config = config.model_copy(update={"loss": loss_config, "optimizer": optimizer})
    learner = MegatronLearner(config, root / "qwen3")
    batch = batch_of_outcomes()

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        sequence_T = torch.arange(batch.num_sequences).repeat_interleave(batch.seq_lens_S)
        mask_T = batch.mask_T
        objective = objective_of(
            loss_config,
            (log_probs_T - batch.behaviour_logprobs_T.double())[mask_T].exp(),
            batch.advantages_T[mask_T],
            sequence_T[mask_T],
            log_probs_T[mask_T],
        )
        return -objective / batch.num_trained_tokens

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    metrics = learner.step(minibatch, BoundsFinder(config, learner).find(minibatch)).metrics
    assert metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    if name in ("gspo", "gmpo", "m2po"):
        assert 0 < metrics["loss/clip_high_share"] + metrics["loss/clip_low_share"] < 1
    for parameter, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[parameter], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for name in RIVALS:
        for layout, max_tokens in cases:
            try:
                check_layout(root, name, layout, max_tokens)
            except AssertionError as error:
                raise AssertionError(f"{name}: {layout}, {max_tokens} tokens per micro-batch") from error


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, [({}, SMALL), ({}, LARGE)], timeout_s=240)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases: list[Case] = [
        ({"data": 2}, SMALL),
        ({"tensor": 2, "sequence": True}, LARGE),
        ({"context": 2}, SMALL // 2),
        ({"pipeline": 2}, SMALL),
    ]
    run_distributed(check_layouts, 2, folder, cases, timeout_s=240)
