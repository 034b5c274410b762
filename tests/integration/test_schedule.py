"""Both orders of forward and backward passes give one update; `forwards_first` needs no extra pass to score."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.algorithms.objectives.supervised import SftLoss
from bapo_megatron.buffer.packing import Pass
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import StepResult
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import proximal_scorer, with_scores
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.types import ClipBounds, MiniBatch
from tests.distributed import HANG_S, run_distributed
from tests.integration.learner_reference import ADAM_EPS, LR, SEARCH, TEMPERATURE, random_batch, save_random_model

NUM_UPDATES = 2
SMALL, LARGE = 40, 1000  # tokens per micro-batch: several, or one

Case = tuple[str, dict[str, Any], dict[str, Any], int]  # family, [parallel] and `distributed`, [train], tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("schedule")
    for family in ("qwen3", "qwen2"):
        save_random_model(family, root / family)
    return root


def make_config(layout: dict[str, Any], max_tokens: int, proximal: str = "behaviour", **train: Any) -> Config:
    parallel = {name: value for name, value in layout.items() if name != "distributed"}
    return Config.model_validate(
        {
            "parallel": {"timeout_s": HANG_S, **parallel},
            "rollout": {"temperature": TEMPERATURE},
            "loss": {"proximal": proximal},
            "optimizer": {"lr": LR, "eps": ADAM_EPS, "distributed": layout.get("distributed", False)},
            "bapo": SEARCH.model_dump(),
            "train": {"logprob_chunk_tokens": 13, "max_tokens_per_microbatch": max_tokens, **train},
        }
    )


class CountedLearner(MegatronLearner):
    """A learner that counts the forward passes through the model, not counting recomputation."""

    num_forwards = 0

    def __init__(self, run: Resolved) -> None:
        super().__init__(run)
        self.model[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_forwards += 1


def pack(learner: MegatronLearner, proximal: bool = False, num_minibatches: int = 1) -> list[MiniBatch]:
    batch = random_batch()
    if proximal:
        batch = with_scores(batch, [proximal_scorer(learner)], learner, learner.config)
    max_tokens = learner.config.train.max_tokens_per_microbatch
    return list(Pass(learner.share, max_tokens, num_minibatches=num_minibatches).minibatches(batch))


def close(learner: MegatronLearner) -> None:
    del learner
    parallel_state.destroy_model_parallel()


@dataclasses.dataclass
class Update:
    bounds: ClipBounds
    result: StepResult
    gradients: dict[str, Tensor]
    num_forwards: int
    weights: dict[str, Tensor]


def updates(config: Config, path: Path, broken: bool = False) -> list[Update]:
    """Score, find bounds and step NUM_UPDATES times; if `broken`, the first gradient is nan."""
    learner = CountedLearner(resolve(config, path))
    finder = BoundsFinder(config, learner)
    (minibatch,) = pack(learner)
    found = []
    for number in range(NUM_UPDATES):
        mine = with_nan(minibatch) if broken and number == 0 else minibatch
        learner.num_forwards = 0
        bounds = finder.find(mine)
        result = learner.step(mine, bounds)
        gradients = {name: gradient.clone() for name, gradient in learner.named_gradients()}
        weights = {name: weight.clone() for name, weight in learner.weights().whole()}
        found.append(Update(bounds, result, gradients, learner.num_forwards, weights))
    close(learner)
    return found


def with_nan(minibatch: MiniBatch) -> MiniBatch:
    micro = minibatch.micro_batches[0]
    micro = dataclasses.replace(micro, advantages_R=torch.where(micro.mask_R, torch.nan, micro.advantages_R))
    return dataclasses.replace(minibatch, micro_batches=(micro, *minibatch.micro_batches[1:]))


def assert_same(got: Update, want: Update) -> None:
    """Check for equal bits: both orders make the same additions in the same order."""
    assert dataclasses.replace(got.bounds, positive_share=0) == dataclasses.replace(want.bounds, positive_share=0)
    assert got.bounds.positive_share == pytest.approx(want.bounds.positive_share, nan_ok=True, abs=0)
    assert got.result.metrics == pytest.approx(want.result.metrics, nan_ok=True, abs=0, rel=0)
    torch.testing.assert_close(got.result.mismatch.sums, want.result.mismatch.sums, rtol=0, atol=0)
    torch.testing.assert_close(got.result.log_probs, want.result.log_probs, rtol=0, atol=0)
    torch.testing.assert_close(got.gradients, want.gradients, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.weights, want.weights, rtol=0, atol=0)


def check_orders(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for family, layout, train, max_tokens in cases:
        found = {
            order: updates(make_config(layout, max_tokens, schedule=order, **train), root / family)
            for order in ("interleaved", "forwards_first")
        }
        first = found["interleaved"][0]
        assert first.bounds.num_moves > 0, "the search should have something to find"
        for one_pass, two_passes in zip(found["forwards_first"], found["interleaved"], strict=True):
            assert_same(one_pass, two_passes)
            assert two_passes.num_forwards == 2 * one_pass.num_forwards, (layout, train)
        assert one_pass.num_forwards == len(one_pass.result.log_probs or [])
        assert (one_pass.num_forwards > 1) == (max_tokens < LARGE)


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    cases: list[Case] = [
        ("qwen3", {}, {}, LARGE),
        ("qwen2", {}, {"entropy_coef": 0.3}, SMALL),
        ("qwen3", {}, {"recompute": True}, SMALL),
    ]
    check_orders(rank, world_size, root, cases)
    check_nan(root)
    check_auto(root)
    check_scores_of_another_minibatch(root)
    check_supervised(root)
    check_first_minibatch_is_scored_once(root, "interleaved")


def check_nan(root: Path) -> None:
    """A gradient that is not a number is skipped, and the next update is as with untouched weights."""
    skipped, after = updates(make_config({}, LARGE, schedule="forwards_first"), root / "qwen2", broken=True)
    (fresh, _) = updates(make_config({}, LARGE, schedule="forwards_first"), root / "qwen2")
    assert not math.isfinite(skipped.result.metrics["optimizer/grad_norm"])
    assert after.result.metrics["optimizer/skipped"] == 1
    torch.testing.assert_close(after.gradients, fresh.gradients, rtol=0, atol=0)


def check_auto(root: Path) -> None:
    """Schedule "auto" runs forwards first if this needs no more memory, or with recompute if it needs little."""
    for max_tokens, train, expected in (
        (LARGE, {}, True),
        (SMALL, {}, False),
        (SMALL, {"recompute": True}, True),
        (SMALL, {"schedule": "forwards_first"}, True),
        (LARGE, {"schedule": "interleaved"}, False),
    ):
        learner = MegatronLearner(resolve(make_config({}, max_tokens, **train), root / "qwen2"))
        schedule = learner.schedule
        (minibatch,) = pack(learner)
        assert schedule.runs_forwards_first(minibatch) == expected, train
        if train == {"recompute": True}:
            num_tokens = int(random_batch().seq_lens_S.sum())
            schedule.memory_bytes = 10 * 4 * 32 * num_tokens * 4  # ten times layers x hidden size x tokens x bytes
            assert schedule.runs_forwards_first(minibatch)
            schedule.memory_bytes -= 1
            assert not schedule.runs_forwards_first(minibatch)
        close(learner)


def check_scores_of_another_minibatch(root: Path) -> None:
    """A step reuses only its own mini-batch's forward passes, at the current weights."""
    learner = CountedLearner(resolve(make_config({}, LARGE, schedule="forwards_first"), root / "qwen3"))
    first, second = pack(learner, num_minibatches=2)
    bounds = ClipBounds(0.8, 1.2, 0.5, False, 0)
    learner.score(first)
    learner.step(second, bounds)
    assert learner.num_forwards == 2
    learner.step(first, bounds)  # its scores come from older weights
    assert learner.num_forwards == 3
    close(learner)


def check_supervised(root: Path) -> None:
    """With loss.name = "sft", the loss is the mean negative log-prob of the trained tokens, and it falls."""
    config = make_config({}, SMALL)
    config = config.model_copy(update={"loss": SftLoss()})
    learner = MegatronLearner(resolve(config, root / "qwen2"))
    finder = BoundsFinder(config, learner)
    (minibatch,) = pack(learner)
    losses = []
    for _ in range(NUM_UPDATES):
        log_probs = learner.log_probs(minibatch)
        trained = [x[batch.mask_R] for x, batch in zip(log_probs, minibatch.micro_batches, strict=True)]
        losses.append(learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"])
        assert losses[-1] == pytest.approx(-float(torch.cat(trained).mean()), rel=1e-5)
    assert losses[1] < losses[0]
    close(learner)


def check_first_minibatch_is_scored_once(root: Path, schedule: str, **layout: Any) -> None:
    """With proximal = "learner", its scoring pass also gives the first mini-batch's bounds, as its own pass would."""
    config = make_config(layout, SMALL, proximal="learner", schedule=schedule)
    learner = CountedLearner(resolve(config, root / "qwen3"))
    finder = BoundsFinder(config, learner)
    first, second = pack(learner, proximal=True, num_minibatches=2)
    own = learner.log_probs(first)
    learner.num_forwards = 0
    bounds = finder.find(first)
    assert learner.num_forwards == 0
    assert (own == []) == (learner.score(first) == []) == (not learner.layout.is_last_stage)
    for (known_R, _), own_R in zip(learner.score(first), own, strict=True):
        torch.testing.assert_close(known_R, own_R, rtol=1e-5, atol=1e-5)
    scored = finder.find(dataclasses.replace(first, proximal_version=None))
    assert (bounds.low, bounds.high) == (scored.low, scored.high)
    assert bounds.positive_share == pytest.approx(scored.positive_share, abs=1e-5)
    assert learner.num_forwards == len(first.micro_batches)

    learner.step(first, bounds)
    learner.num_forwards = 0
    finder.find(second)
    assert learner.num_forwards == len(second.micro_batches), "the weights have changed since the start"
    close(learner)


def check_two_processes(rank: int, world_size: int, root: Path) -> None:
    cases: list[Case] = [
        ("qwen3", {"tensor": 2, "sequence": True}, {}, SMALL),
        ("qwen2", {"data": 2}, {}, LARGE),
        ("qwen3", {"context": 2, "distributed": True}, {"recompute": True}, SMALL // 2),
    ]
    check_orders(rank, world_size, root, cases)
    check_first_minibatch_is_scored_once(root, "auto", pipeline=2)
    check_first_minibatch_is_scored_once(root, "auto", data=2)


def check_four_processes(rank: int, world_size: int, root: Path) -> None:
    cases: list[Case] = [
        ("qwen3", {"tensor": 2, "sequence": True, "data": 2, "distributed": True}, {"entropy_coef": 0.1}, SMALL // 2),
        ("qwen2", {"context": 2, "data": 2}, {"recompute": True}, SMALL // 4),
    ]
    check_orders(rank, world_size, root, cases)


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_one_process, 1, folder)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    run_distributed(check_two_processes, 2, folder)


@pytest.mark.slow
def test_four_processes(folder: Path) -> None:
    run_distributed(check_four_processes, 4, folder)
