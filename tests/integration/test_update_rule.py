"""A rule that rejects responses: loss, divisor and gradient equal a float64 process whose mask leaves them out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.losses import CustomLoss
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import load_float64, reference_update, save_random_model
from tests.integration.test_rivals_learner import TOLERANCE, batch_of_outcomes, sequence_of
from tests.integration.test_schedule import LARGE, SMALL, CountedLearner, make_config

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LIMIT = 0.6  # nats; half of the tokens belong to responses beyond it

Case = tuple[dict[str, Any], dict[str, Any], int]  # [parallel], [train], tokens per micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rules")
    save_random_model("qwen3", root / "qwen3")
    return root


def config_of(layout: dict[str, Any], max_tokens: int, limit: float = LIMIT, **train: Any) -> Config:
    config = make_config(layout, max_tokens, **train)
    loss = CustomLoss(name="keep_near:KEEP_NEAR", options={"max_distance": limit})
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e9})
    return config.model_copy(update={"loss": loss, "optimizer": optimizer})


def near_T(log_probs_T: Tensor, batch: Batch) -> Tensor:
    """Return the mask of trained tokens whose response has a mean log-ratio within the limit, sequence by sequence."""
    log_ratio = (log_probs_T - batch.behaviour_logprobs_T.double())[batch.mask_T]
    sequence, keeps = sequence_of(batch), torch.zeros_like(log_ratio, dtype=torch.bool)
    for s in sequence.unique():
        mean = float(log_ratio[sequence == s].mean())
        assert abs(abs(mean) - LIMIT) > 1e-4, "rounding could decide this response: choose another limit"
        keeps[sequence == s] = abs(mean) <= LIMIT
    mask_T = batch.mask_T.clone()
    mask_T[batch.mask_T] = keeps
    return mask_T


def check_layout(root: Path, layout: dict[str, Any], train: dict[str, Any], max_tokens: int) -> None:
    learner = CountedLearner(resolve(config_of(layout, max_tokens, **train), root / "qwen3"))
    batch, masks = batch_of_outcomes(), []

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        masks.append(mask_T := near_T(log_probs_T.detach(), batch))
        ratio = (log_probs_T - batch.behaviour_logprobs_T.double())[mask_T].exp()
        return -(ratio * batch.advantages_T.double()[mask_T]).sum() / int(mask_T.sum())

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    num_kept = int(masks[0].sum())
    assert 0 < num_kept < batch.num_trained_tokens
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    found = BoundsFinder(learner.config, learner).find(minibatch)
    assert found.num_tokens == num_kept
    result = learner.step(minibatch, found)
    assert result.found == (found,)
    assert result.metrics["train/tokens"] == num_kept
    assert result.metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    entropy = float(want.entropy_T[masks[0]].mean())
    assert result.metrics["loss/entropy"] == pytest.approx(entropy, rel=TOLERANCE), "the mask applies to metrics too"
    if train.get("schedule") == "forwards_first":
        assert learner.num_forwards == len(minibatch.micro_batches), "the scoring pass is the step's own"
    for parameter, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[parameter], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_all_rejected(root: Path) -> None:
    """With nothing left to learn from, the gradient is 0, and means of no tokens are nan."""
    learner = MegatronLearner(resolve(config_of({}, LARGE, limit=1e-9), root / "qwen3"))
    minibatch = one_minibatch(batch_of_outcomes(), max_tokens=LARGE, share=learner.share)
    found = BoundsFinder(learner.config, learner).find(minibatch)
    assert found.num_tokens == 0
    metrics = learner.step(minibatch, found).metrics
    assert (metrics["optimizer/grad_norm"], metrics["optimizer/skipped"], metrics["train/tokens"]) == (0, 0, 0)
    assert math.isnan(metrics["loss/policy"])
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for layout, train, max_tokens in cases:
        try:
            check_layout(root, layout, train, max_tokens)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {train}, {max_tokens} tokens per micro-batch") from error
    if world_size == 1:
        check_all_rejected(root)


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, [({}, {}, SMALL), ({}, {"schedule": "forwards_first"}, SMALL)])


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases: list[Case] = [
        ({"data": 2}, {}, SMALL),
        ({"tensor": 2, "sequence": True}, {}, LARGE),
        ({"context": 2}, {}, SMALL // 2),
        ({"pipeline": 2}, {}, SMALL),
    ]
    run_distributed(check_layouts, 2, folder, cases)
