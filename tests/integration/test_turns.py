"""Turns and branches, packed with others: loss, bounds and gradient equal a float64 process that trains each sampled
token once."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.rewards.environments import Continue, End, StepAnswer, TurnJson
from bapo_megatron.rollout.drivers import JudgeOnce, StepDriver
from bapo_megatron.types import Batch, ClipBounds, Ended, Group, MiniBatch, NeedsTokens, Sample, Segment
from tests.distributed import run_distributed
from tests.integration.learner_reference import literal_bounds, literal_loss, load_float64, save_random_model
from tests.integration.learner_reference import reference_update as reference
from tests.integration.test_schedule import LARGE, SMALL, make_config
from tests.unit.test_scheduler import STOP, ScriptedEngine, make, verdict

TOLERANCE = 1e-5


class TwoTurns:
    """An environment that answers the first turn with two words that no policy samples; longer turns score higher."""

    deadline_s = 0.0

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        if turn["number"] == 1:
            return Continue({"first": len(turn["token_ids"])}, token_ids=[30, 31])
        return End({"length": float(len(turn["token_ids"])), "first": state["first"] / 2})


class Branches:
    """A driver that starts a branch from the first three tokens of a response, after an answer of its own."""

    by_group, deadline_s, first_need = False, 0.0, NeedsTokens()

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        return [self.next(sample) for sample in samples]

    def next(self, sample: Sample) -> Sample:
        if len(sample.trajectories) == 2:
            return dataclasses.replace(sample, need=Ended("stop", float(sample.trajectories[1].num_sampled_tokens)))
        branch = sample.turn.branch(len(sample.prompt.token_ids) + 3)
        branch = branch.extended([Segment.given("environment", [30, 31])])
        return dataclasses.replace(sample.with_trajectory(1, branch), need=NeedsTokens(1))


class Engine(ScriptedEngine):
    """An engine that ends turns after 4 to 7 tokens; its log-probs are near those at random weights."""

    def token(self, seed: int, position: int) -> int:
        return STOP if position % (5 + seed % 4) == 4 + seed % 4 else (seed + position) % 9

    def answer(self, request: GenerateRequest) -> GenerateResult:
        result = super().answer(request)
        assert isinstance(result, GenerateResult)
        logprobs = [-3.5 + 0.1 * ((5 * token + i) % 13 - 6) for i, token in enumerate(result.token_ids.tolist())]
        return dataclasses.replace(result, behaviour_logprobs=np.array(logprobs, np.float32))


def sampled(driver: Any) -> list[Group]:
    engine = Engine()
    groups, _ = asyncio.run(make(engine, driver=driver, tokens_per_round=3).take(0, 0))
    assert groups is not None
    return groups


def trained_once(groups: list[Group]) -> Tensor:
    """Return the mask by brute force: what the policy sampled, at its first occurrence in a sample."""
    mask: list[bool] = []
    for sample in (s for g in groups for s in g.samples):
        seen = set()
        for ids in (t.token_ids.tolist() for t in sample.trajectories):
            for at in range(len(ids)):
                mask.append(at >= len(sample.prompt.token_ids) and ids[at] < 30 and tuple(ids[: at + 1]) not in seen)
                seen.add(tuple(ids[: at + 1]))
    return torch.tensor(mask)


def packed_kinds(batch: Batch, minibatch: MiniBatch) -> list[set[int]]:
    """Return the numbers of given tokens that a sequence of each pack has after its prompt of 3 tokens."""
    sequence_T = torch.arange(batch.num_sequences).repeat_interleave(batch.seq_lens_S)
    num_given_S = (
        batch.seq_lens_S - 3 - torch.zeros_like(batch.seq_lens_S).index_add(0, sequence_T, batch.sampled_T.long())
    )
    return [set(num_given_S[sequence_T[one.batch_rows_R]].tolist()) for one in minibatch.micro_batches]


def check_layout(root: Path, layout: dict[str, Any], max_tokens: int, groups: list[Group]) -> None:
    config = make_config(layout, max_tokens)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_grad": 1e9})})
    learner = MegatronLearner(resolve(config, root))
    batch = BatchBuilder(config).build(groups, {})
    mask_T = trained_once(groups)
    assert int(mask_T.sum()) == sum(s.num_sampled_tokens for g in groups for s in g.samples)
    found: list[tuple[float, float, float]] = []

    def loss_of(log_probs_T: Tensor, batch: Batch) -> Tensor:
        found.append(literal_bounds(log_probs_T.detach(), batch))
        return literal_loss(log_probs_T, batch, ClipBounds(*found[0], saturated=False, num_moves=0))

    want = reference(load_float64(root), dataclasses.replace(batch, mask_T=mask_T), loss_of=loss_of)
    minibatch = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    assert any(len(kinds) > 1 for kinds in packed_kinds(batch, minibatch)), "a pack has turns, or a branch, with others"
    bounds = BoundsFinder(config, learner).find(minibatch)
    assert (bounds.low, bounds.high) == found[0][:2]
    assert bounds.positive_share == pytest.approx(found[0][2], abs=TOLERANCE)
    result = learner.step(minibatch, bounds)
    assert result.metrics["train/tokens"] == int(mask_T.sum())
    assert result.metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE, abs=TOLERANCE)
    for name, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), want.gradients[name], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check(rank: int, world_size: int, root: Path, layouts: list[tuple[dict[str, Any], int]]) -> None:
    limits: dict[str, Any] = {"max_response_tokens": 16, "max_answer_tokens": 8, "max_turns": 8}
    turns = sampled(StepDriver(TwoTurns(), lambda answer, *_: (answer.token_ids or (), False), str, **limits))
    branches = sampled(Branches())
    plain = sampled(JudgeOnce(lambda samples: [verdict(s.num_sampled_tokens) for s in samples]))
    for groups in (turns, branches, plain):
        samples = [s for g in groups for s in g.samples]
        assert all((s.num_given_tokens >= 2) == (groups is not plain) and s.reward is not None for s in samples)
        assert any(g.rewards.count(g.rewards[0]) < len(g.rewards) for g in groups), "otherwise nothing is learned"
    for layout, max_tokens in layouts:
        try:
            check_layout(root, layout, max_tokens, [*turns, *branches, *plain])
        except AssertionError as error:
            raise AssertionError(f"{layout}, {max_tokens} tokens") from error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("turns")
    save_random_model("qwen3", root)
    return root


def test_one_process(folder: Path) -> None:
    run_distributed(check, 1, folder, [({}, SMALL)])


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    layouts = [({"tensor": 2}, SMALL), ({"pipeline": 2}, SMALL), ({"context": 2}, SMALL // 2), ({"data": 2}, LARGE)]
    run_distributed(check, 2, folder, layouts)
