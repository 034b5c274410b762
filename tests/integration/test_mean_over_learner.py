"""The means of the learner's loss (loss.mean_over), and rejection before the mean, at any layout and split."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.losses import LOSS_SECTIONS, CustomLoss
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import LossConfig
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import policy_updates, proximal_scorer, with_scores, without_rejected
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import Reference, load_float64, reference_update, save_random_model
from tests.integration.test_rivals_learner import (
    ONE_PROCESS,
    TOLERANCE,
    TWO_PROCESSES,
    Case,
    batch_of_outcomes,
    sequence_of,
)
from tests.integration.test_schedule import LARGE, make_config
from tests.integration.test_update_rule import EXAMPLES, LIMIT, near_T

KL_COEF, ENTROPY_COEF = 0.3, 0.2
MAX_RESPONSE_TOKENS = 50
FILTERS = {"geometric": (0.97, 1.04), "sequence": (0.6, 1.7), "token": (0.9, 1.1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("means")
    save_random_model("qwen3", root / "qwen3")
    return root


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def config_of(loss: LossConfig, layout: dict[str, Any], max_tokens: int, **train: Any) -> Config:
    config = make_config(layout, max_tokens, **train)
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e9})
    rollout = config.rollout.model_copy(update={"max_response_tokens": MAX_RESPONSE_TOKENS})
    return config.model_copy(update={"loss": loss, "optimizer": optimizer, "rollout": rollout})


def mean_of(mean_over: str) -> Callable[[Tensor, Batch], Tensor]:
    """Return the mean of a batch's [T] values, response by response."""

    def mean(values_T: Tensor, batch: Batch) -> Tensor:
        if mean_over == "tokens":
            return values_T[batch.mask_T].mean()
        lens = batch.seq_lens_S.tolist()
        pairs = zip(values_T.split(lens), batch.mask_T.split(lens), strict=True)
        responses = [values[mask] for values, mask in pairs if mask.any()]
        if mean_over == "responses":
            return torch.stack([one.mean() for one in responses]).mean()
        return torch.stack([one.sum() for one in responses]).mean() / MAX_RESPONSE_TOKENS

    return mean


def spread(values: Tensor, mask_T: Tensor) -> Tensor:
    """Return values of trained tokens as [T]."""
    return torch.zeros(mask_T.numel(), dtype=torch.float64).masked_scatter(mask_T, values)


def check_update(learner: MegatronLearner, batch: Batch, want: Reference, max_tokens: int, token_mean: float) -> Any:
    """Check the gradient, and that metrics stay means over tokens; return the decision."""
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    found = BoundsFinder(learner.config, learner).find(minibatch)
    metrics = learner.step(minibatch, found).metrics
    assert metrics["loss/policy"] == pytest.approx(token_mean, rel=TOLERANCE, abs=TOLERANCE)
    for parameter, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[parameter], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()
    return found


def check_mean(root: Path, layout: dict[str, Any], max_tokens: int, mean_over: str) -> None:
    """Check BAPO with a KL term and an entropy bonus: every term and the search have the same mean."""
    section = LOSS_SECTIONS["bapo"].model_validate(
        {"name": "bapo", "mean_over": mean_over, "kl_coef": KL_COEF, "kl_estimator": "k2"}
    )
    config = config_of(section, layout, max_tokens, entropy_coef=ENTROPY_COEF)
    learner = MegatronLearner(resolve(config, root / "qwen3"))
    batch, mean, bounds, token_means = batch_of_outcomes(), mean_of(mean_over), [], []
    noise_T = torch.randn(batch.mask_T.shape, generator=torch.Generator().manual_seed(8))
    batch = dataclasses.replace(batch, reference_logprobs_T=batch.behaviour_logprobs_T + 0.2 * noise_T)
    assert batch.reference_logprobs_T is not None
    reference_T = batch.reference_logprobs_T.double()

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        mask_T, behaviour_T, advantages_T = (
            batch.mask_T,
            batch.behaviour_logprobs_T.double(),
            batch.advantages_T.double(),
        )
        ratio_T = torch.where(mask_T, log_probs_T - behaviour_T, 0.0).exp()
        sizes_T = batch.count_S(mask_T).repeat_interleave(batch.seq_lens_S).clamp(min=1)
        weights_T = 1 / sizes_T.double() if mean_over == "responses" else torch.ones_like(behaviour_T)
        table = contribution_table(ratio_T.detach(), advantages_T, mask_T, behaviour_T, config.bapo, weights=weights_T)
        bounds.append(found := search_bounds(table, config.bapo))
        terms_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(found.low, found.high) * advantages_T)
        token_means.append(float(terms_T.detach()[mask_T].mean()))
        return mean(terms_T, batch)

    kl = (reference_T, "k2", KL_COEF)
    want = reference_update(
        load_float64(root / "qwen3"), batch, kl=kl, entropy_coef=ENTROPY_COEF, loss_of=loss_of, mean_of=mean
    )
    found = check_update(learner, batch, want, max_tokens, token_means[-1])
    assert (found.low, found.high) == (bounds[-1].low, bounds[-1].high)
    assert found.num_moves > 0


def check_rejection(root: Path, layout: dict[str, Any], max_tokens: int, level: str) -> None:
    """Rejected tokens leave the loss, its mean over responses, and the metrics."""
    low, high = FILTERS[level]
    options = {"proximal": "learner", "importance_cap": 1e9, "filter_level": level, "filter_kind": "reject"}
    section = LOSS_SECTIONS["grpo"].model_validate(
        {"name": "grpo", "mean_over": "responses", "filter_floor": low, "filter_cap": high, **options}
    )
    config = config_of(section, layout, max_tokens)
    learner = MegatronLearner(resolve(config, root / "qwen3"))
    batch, token_means = batch_of_outcomes(), []
    noise_T = 0.15 * torch.randn(batch.mask_T.shape, generator=torch.Generator().manual_seed(8))
    batch = dataclasses.replace(batch, proximal_logprobs_T=batch.behaviour_logprobs_T + noise_T, proximal_version=-1)
    assert batch.proximal_logprobs_T is not None
    log_weights = (batch.proximal_logprobs_T.double() - batch.behaviour_logprobs_T.double())[batch.mask_T]
    keeps, sequence = torch.zeros_like(log_weights, dtype=torch.bool), sequence_of(batch)
    for s in sequence.unique():
        mine = log_weights[sequence == s]
        ratio = {"token": mine.exp(), "sequence": mine.sum().exp(), "geometric": mine.mean().exp()}[level]
        keeps[sequence == s] = (ratio >= low) & (ratio <= high)
    kept_T = batch.mask_T.clone()
    kept_T[batch.mask_T] = keeps
    num_trained = batch.num_trained_tokens
    batch = without_rejected(batch, learner, config)
    assert torch.equal(batch.mask_T, kept_T)
    assert 0 < batch.num_trained_tokens < num_trained
    assert batch.metrics["loss/filtered_share"] == (num_trained - batch.num_trained_tokens) / num_trained

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        assert batch.proximal_logprobs_T is not None
        proximal_T, advantages_T = batch.proximal_logprobs_T.double(), batch.advantages_T.double()
        weights_T = (proximal_T - batch.behaviour_logprobs_T.double()).exp()
        ratio_T = torch.where(batch.mask_T, log_probs_T - proximal_T, 0.0).exp()
        terms_T = -weights_T * torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
        token_means.append(float(terms_T.detach()[batch.mask_T].mean()))
        return mean_of("responses")(terms_T, batch)

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    check_update(learner, batch, want, max_tokens, token_means[-1])


def check_rule(root: Path, layout: dict[str, Any], max_tokens: int) -> None:
    """A rule that leaves out responses, and counts those that stay."""
    loss = CustomLoss(name="keep_near:KEEP_NEAR", options={"max_distance": LIMIT}, mean_over="responses")
    learner = MegatronLearner(resolve(config_of(loss, layout, max_tokens), root / "qwen3"))
    batch, token_means = batch_of_outcomes(), []

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        batch = dataclasses.replace(batch, mask_T=near_T(log_probs_T.detach(), batch))
        ratio_T = torch.where(batch.mask_T, log_probs_T - batch.behaviour_logprobs_T.double(), 0.0).exp()
        terms_T = -ratio_T * batch.advantages_T.double()
        token_means.append(float(terms_T.detach()[batch.mask_T].mean()))
        return mean_of("responses")(terms_T, batch)

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    check_update(learner, batch, want, max_tokens, token_means[-1])


def check_all_rejected(root: Path) -> None:
    """A step that rejects all its tokens has no update."""
    options = {"proximal": "learner", "filter_level": "token", "filter_kind": "reject", "filter_cap": 1.0001}
    loss = LOSS_SECTIONS["grpo"].model_validate({"name": "grpo", **options})
    learner = MegatronLearner(resolve(config_of(loss, {}, LARGE), root / "qwen3"))
    batch = batch_of_outcomes()
    unlikely_T = torch.where(batch.sampled_T, -20.0, 0.0)
    batch = dataclasses.replace(batch, behaviour_logprobs_T=unlikely_T)
    batch = with_scores(batch, [proximal_scorer(learner)] * 2, learner, learner.config)
    assert batch.metrics["loss/filtered_share"] == 1
    assert list(policy_updates(learner.config, 0, learner.share).minibatches(batch)) == []
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    checks: list[tuple[Callable[..., None], tuple[str, ...]]] = [
        *((check_mean, (mean_over,)) for mean_over in ("responses", "budget")),
        *((check_rejection, (level,)) for level in FILTERS),
        (check_rule, ()),
    ]
    for check, options in checks:
        for layout, max_tokens in cases:
            try:
                check(root, layout, max_tokens, *options)
            except AssertionError as error:
                raise AssertionError(f"{check.__name__}: {options}, {layout}, {max_tokens} tokens") from error
    if world_size == 1:
        check_all_rejected(root)


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, ONE_PROCESS)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    run_distributed(check_layouts, 2, folder, TWO_PROCESSES)
