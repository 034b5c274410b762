"""Scope microbatch: each micro-batch has the bounds of its own tokens, over all data and context ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.learner.base import StepResult
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.monitor.record import UpdateMetrics
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch, ClipBounds
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    literal_bounds,
    literal_loss,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_schedule import LARGE, SMALL, CountedLearner, assert_same, make_config, updates

TOLERANCE = 1e-5
SEARCH = ClipBoundConfig(  # its target lies within the micro-batches' range: some bounds saturate, some do not
    rho0=0.25, low=[0.5, 0.9, 0.1], high=[1.0, 6.0, 0.1], contribution="surrogate", token_weight="rollout_prob"
)

Case = tuple[dict[str, Any], int]  # [parallel], tokens per micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("microbatch")
    save_random_model("qwen3", root / "qwen3")
    return root


def with_scope(config: Config, scope: str, rho0: float = SEARCH.rho0) -> Config:
    bapo = SEARCH.model_copy(update={"scope": scope, "rho0": rho0})
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e9})
    return config.model_copy(update={"bapo": bapo, "optimizer": optimizer})


def check_one_micro_batch(root: Path, **layout: Any) -> None:
    """If one micro-batch (on each rank) is the whole update, the scopes microbatch and exact give the same bits."""
    config = make_config(layout, LARGE)
    exact, alone = (updates(with_scope(config, scope, rho0=0.3), root / "qwen3") for scope in ("exact", "microbatch"))
    assert exact[0].bounds.num_moves > 0, "the search should have something to find"
    for want, got in zip(exact, alone, strict=True):
        (bounds,) = got.result.found
        assert_same(dataclasses.replace(got, bounds=bounds), want)
        assert got.num_forwards == want.num_forwards == 1


def parts_of(batch: Batch, learner: MegatronLearner) -> list[Batch]:
    """Return the batch once per micro-batch index, its mask reduced to the tokens that all ranks have there."""
    layout, found = learner.layout, []
    shares = [
        dataclasses.replace(learner.share, data_rank=d, context_rank=c)
        for d in range(layout.data_size)
        for c in range(layout.context_size)
    ]
    max_tokens = learner.config.train.max_tokens_per_microbatch
    packed = [one_minibatch(batch, max_tokens=max_tokens, share=share).micro_batches for share in shares]
    for together in zip(*packed, strict=True):
        is_here_T = torch.zeros_like(batch.mask_T)
        for micro in together:
            is_here_T[micro.batch_rows_R] = True
        found.append(dataclasses.replace(batch, mask_T=batch.mask_T & is_here_T))
    assert sum(part.num_trained_tokens for part in found) == batch.num_trained_tokens
    return found


def check_layout(root: Path, layout: dict[str, Any], max_tokens: int) -> None:
    """Compare one update with float64 and a search that visits every token of each micro-batch at every probe."""
    learner = CountedLearner(resolve(with_scope(make_config(layout, max_tokens), "microbatch"), root / "qwen3"))
    batch = random_batch()
    parts, wanted = parts_of(batch, learner), []

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            low, high, share = literal_bounds(log_probs_T.detach(), part, SEARCH)
            wanted.append(ClipBounds(low, high, share, share < SEARCH.rho0, 0))
            total = total + literal_loss(log_probs_T, part, wanted[-1]) * part.num_trained_tokens
        return total / batch.num_trained_tokens

    want = reference_update(load_float64(root / "qwen3"), batch, loss_of=loss_of)
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    result = learner.step(minibatch, BoundsFinder(learner.config, learner).find(minibatch))
    assert len({(bounds.low, bounds.high) for bounds in wanted}) > 1, "bounds should differ"
    assert learner.num_forwards == len(parts), "no pass of its own"
    check_bounds(learner.config, result, wanted)
    assert result.metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    for name, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[name], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_bounds(config: Config, result: StepResult, wanted: list[ClipBounds]) -> None:
    """Compare bounds on every rank, including stages without a loss; a step's metrics are means over micro-batches."""
    for got, want in zip(result.found, wanted, strict=True):
        assert (got.low, got.high, got.saturated) == (want.low, want.high, want.saturated)
        assert got.positive_share == pytest.approx(want.positive_share, abs=TOLERANCE)
        moves = (got.low - SEARCH.low.start) / SEARCH.low.step + (got.high - SEARCH.high.start) / SEARCH.high.step
        assert got.num_moves == round(moves)
    step = UpdateMetrics(config)
    step.add(result)
    metrics, num = step.result(), len(wanted)
    assert metrics["bapo/low"] == pytest.approx(sum(b.low for b in wanted) / num)
    assert metrics["bapo/high"] == pytest.approx(sum(b.high for b in wanted) / num)
    assert metrics["bapo/saturated_share"] == sum(b.saturated for b in wanted) / num


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for layout, max_tokens in cases:
        try:
            check_layout(root, layout, max_tokens)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {max_tokens} tokens per micro-batch") from error
    check_one_micro_batch(root, **({"data": 2} if world_size == 2 else {}))


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, [({}, SMALL)])


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases: list[Case] = [
        ({"data": 2}, SMALL),
        ({"tensor": 2, "sequence": True}, SMALL),
        ({"context": 2}, SMALL // 2),
        ({"pipeline": 2}, SMALL),
        ({"pipeline": 2, "virtual_pipeline": 2}, SMALL),
    ]
    run_distributed(check_layouts, 2, folder, cases)
