"""The rivals in the learner: loss and gradient equal the papers' formulas at any layout and split."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import RatioLoss
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch, ClipBounds
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    Reference,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_schedule import LARGE, SMALL, make_config
from tests.unit.loss_inputs import fixed_bounds
from tests.unit.test_proximal import literal_weights
from tests.unit.test_rivals import RIVALS, objective_of

TOLERANCE = 1e-5
WIDE = {"clip_low": 0.6, "clip_high": 1.6}  # some responses and tokens are clipped, some are not
OPTIONS: dict[str, dict[str, float]] = {  # the model's probabilities are near 1 / 33
    "reinforce": {},
    "vespo": {},
    "sapo": {},
    "m2po": {},
    "ipo": {"max_change": 0.02, "kl_tau": 0.1},
    "dppo_tv": {"max_fall": 0.01, "max_rise": 0.02, "max_ratio": 1.1},
    "dppo_kl": {"max_fall": 0.01, "max_rise": 0.02},
    "kpop": {"max_kl": 0.01},
    "flash_reinforce": {"max_mean_kl": 0.0175},
    "topr": {},
    "dro": {},
}
UNMASKED = ("cispo", "sapo", "reinforce", "vespo", "topr", "dro")

CORRECTED: dict[str, Any] = {  # BAPO's search, and a loss of a response's ratio, with weights of tokens and responses
    "bapo": {"importance_level": "sequence", "importance_kind": "mask", "importance_floor": 0.6, "max_drift": 0.06},
    "gspo": WIDE | {"importance_kind": "mask", "importance_floor": 0.8, "importance_cap": 1.4},
}

Case = tuple[dict[str, Any], int]  # [parallel], tokens per micro-batch
ONE_PROCESS: list[Case] = [({}, SMALL), ({}, LARGE)]
TWO_PROCESSES: list[Case] = [
    ({"data": 2}, SMALL),
    ({"tensor": 2, "sequence": True}, LARGE),
    ({"context": 2}, SMALL // 2),
    ({"pipeline": 2}, SMALL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rivals")
    save_random_model("qwen3", root / "qwen3")
    return root


def batch_of_outcomes() -> Batch:
    """Return the random batch with one advantage per response, and behaviour log-probs near the model's."""
    batch = random_batch()
    generator = torch.Generator().manual_seed(6)
    advantages_S = torch.randn(batch.num_sequences, generator=generator)
    is_response_T = batch.behaviour_logprobs_T != 0
    noise_T = 0.3 * torch.randn(is_response_T.shape, generator=generator)
    return dataclasses.replace(
        batch,
        advantages_T=advantages_S.repeat_interleave(batch.seq_lens_S) * is_response_T,
        behaviour_logprobs_T=(-3.5 + noise_T) * is_response_T,  # near log-probs of 33 tokens at random weights
    )


def weights_and_bounds(config: Config, log_probs: Tensor, batch: Batch) -> tuple[Tensor, ClipBounds]:
    """Return the literal weights of the trained tokens, and the bounds that BAPO's search finds with them."""
    loss, mask_T = config.loss, batch.mask_T
    assert isinstance(loss, RatioLoss)
    assert batch.proximal_logprobs_T is not None
    behaviour, proximal = batch.behaviour_logprobs_T.double()[mask_T], batch.proximal_logprobs_T.double()[mask_T]
    advantages = batch.advantages_T.double()[mask_T]
    columns = (proximal - behaviour, behaviour - log_probs, advantages, sequence_of(batch))
    weights = torch.tensor(literal_weights(loss, *(x.tolist() for x in columns)), dtype=torch.float64)
    ratios, is_trained = (log_probs - proximal).exp(), torch.ones_like(weights, dtype=torch.bool)
    table = contribution_table(ratios, advantages, is_trained, behaviour, config.bapo, weights=weights)
    return weights, search_bounds(table, config.bapo) if loss.searches_bounds else fixed_bounds(loss)


def sequence_of(batch: Batch) -> Tensor:
    return torch.arange(batch.num_sequences).repeat_interleave(batch.seq_lens_S)[batch.mask_T]


def check_correction(root: Path, name: str, layout: dict[str, Any], max_tokens: int) -> None:
    """Check importance weights and masks, with log-probs of a given proximal policy."""
    config = config_of({"name": name, "proximal": "learner"} | CORRECTED[name], layout, max_tokens)
    learner = MegatronLearner(resolve(config, root / "qwen3"))
    batch = batch_of_outcomes()
    noise_T = 0.15 * torch.randn(batch.mask_T.shape, generator=torch.Generator().manual_seed(8))
    batch = dataclasses.replace(batch, proximal_logprobs_T=batch.behaviour_logprobs_T + noise_T, proximal_version=-1)
    found: list[ClipBounds] = []

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        mask_T, advantages_T = batch.mask_T, batch.advantages_T.double()
        log_probs = log_probs_T[mask_T]
        weights, bounds = weights_and_bounds(config, log_probs.detach(), batch)
        found.append(bounds)
        assert 0 < int((weights == 0).sum()) < len(weights)
        ratio_R = (log_probs - batch.proximal_logprobs_T.double()[mask_T]).exp()
        if name == "gspo":
            sequence_R, means = sequence_of(batch), torch.zeros_like(ratio_R)
            for s in sequence_R.unique():
                means = torch.where(sequence_R == s, ratio_R[sequence_R == s].log().mean().exp(), means)
            # weights differ within a response: each term has the mean's value and its own gradient
            ratio_R = means.detach() * ratio_R / ratio_R.detach()
        clipped_R = ratio_R.clamp(bounds.low, bounds.high)
        terms = torch.minimum(ratio_R * advantages_T[mask_T], clipped_R * advantages_T[mask_T])
        return -(weights * terms).sum() / batch.num_trained_tokens

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    check_update(learner, batch, want, found[-1], max_tokens)


def config_of(loss: dict[str, Any], layout: dict[str, Any], max_tokens: int) -> Config:
    config = make_config(layout, max_tokens)
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e9})
    section = LOSS_SECTIONS[loss["name"]].model_validate(loss)
    return config.model_copy(update={"loss": section, "optimizer": optimizer})


def check_layout(root: Path, name: str, layout: dict[str, Any], max_tokens: int) -> None:
    config = config_of({"name": name} | OPTIONS.get(name, WIDE), layout, max_tokens)
    loss_config: Any = config.loss
    learner = MegatronLearner(resolve(config, root / "qwen3"))
    batch = batch_of_outcomes()

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        mask_T = batch.mask_T
        objective = objective_of(
            loss_config,
            (log_probs_T - batch.behaviour_logprobs_T.double())[mask_T].exp(),
            batch.advantages_T[mask_T],
            sequence_of(batch),
            log_probs_T[mask_T],
        )
        return -objective / batch.num_trained_tokens

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    metrics = check_update(learner, batch, want, None, max_tokens)
    if name not in UNMASKED:
        assert 0 < metrics["loss/clip_high_share"] + metrics["loss/clip_low_share"] < 1


def check_update(
    learner: MegatronLearner, batch: Batch, want: Reference, bounds: ClipBounds | None, max_tokens: int
) -> dict[str, float]:
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    found = BoundsFinder(learner.config, learner).find(minibatch)
    if bounds is not None:
        assert isinstance(found, ClipBounds)
        assert (found.low, found.high) == (bounds.low, bounds.high)
    metrics = learner.step(minibatch, found).metrics
    assert metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    for parameter, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[parameter], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()
    return metrics


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    checks = [(check_layout, name) for name in RIVALS] + [(check_correction, name) for name in CORRECTED]
    for check, name in checks:
        for layout, max_tokens in cases:
            try:
                check(root, name, layout, max_tokens)
            except AssertionError as error:
                raise AssertionError(
                    f"{check.__name__}: {name}, {layout}, {max_tokens} tokens per micro-batch"
                ) from error


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, ONE_PROCESS)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    run_distributed(check_layouts, 2, folder, TWO_PROCESSES)
