"""Evaluation inside a run: every prompt is answered whole, by live engines, and nothing of it is booked."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rollout.base import GenerateRequest, GenerateResult
from bapo_megatron.rollout.evaluate import Evaluator, eval_metrics
from bapo_megatron.rollout.pool import EnginePool
from bapo_megatron.types import Prompt, Segment, Trajectory
from tests.unit.test_scheduler import STOP, ScriptedEngine

PROMPTS = [Prompt(i, (1, 2, i % 7), "", "", "test") for i in range(5)]


def evaluator(*engines: ScriptedEngine, judged: list[Trajectory] | None = None, **settings: Any) -> Evaluator:
    config = Config.model_validate(
        {
            "eval": {"samples_per_prompt": 2, "temperature": 0.5},
            "rollout": {"max_response_tokens": 16, "tokens_per_round": 3, "max_retries": 0, **settings},
        }
    )

    def score(trajectories: Sequence[Trajectory]) -> list[float]:
        if judged is not None:
            judged.extend(trajectories)
        return [float(t.finish_reason == "stop") for t in trajectories]

    return Evaluator(config, EnginePool(engines), PROMPTS, score, (STOP,))  # type: ignore[arg-type]


def test_every_response_is_whole_and_at_the_evaluations_temperature() -> None:
    engine, judged = ScriptedEngine(), []  # type: ignore[var-annotated]
    engine.version = 3
    metrics = asyncio.run(evaluator(engine, judged=judged).run(3))
    assert len(judged) == metrics["eval/num_samples"] == 10
    assert all(t.finish_reason for t in judged)
    assert {r.temperature for r in engine.requests} == {0.5}
    assert len(engine.requests) == 10, "in one piece, whatever the budget of training"


def test_a_failing_engine_leaves_its_part_to_the_others_and_aborts_are_made_good() -> None:
    whole: list[Trajectory] = []
    asyncio.run(evaluator(ScriptedEngine(), judged=whole).run(0))
    bad, chaotic = ScriptedEngine(url="http://bad"), ScriptedEngine(random.Random(1), url="http://chaotic")
    bad.failures = 9
    judged: list[Trajectory] = []
    asyncio.run(evaluator(bad, chaotic, judged=judged).run(0))
    assert {t.sample_id: t.response_ids for t in judged} == {t.sample_id: t.response_ids for t in whole}


def test_no_engine_left_is_an_error() -> None:
    engine = ScriptedEngine()
    engine.failures = 9
    asked = evaluator(engine, startup_timeout_s=0.1)
    with pytest.raises(NoEngineLeftError, match="is left for the evaluation: http://scripted is fenced"):
        asyncio.run(asked.sample(0))
    with pytest.raises(EngineError, match=r"no rollout engine is left after 0\.1 s: http://scripted is fenced"):
        asyncio.run(asked.run(0))


def test_when_the_last_engine_is_back_the_evaluation_asks_for_a_push_and_goes_on_where_it_was() -> None:
    class FailsOnce(ScriptedEngine):
        def __init__(self, url: str, call: int) -> None:
            super().__init__(url=url)
            self.calls_left = call

        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise EngineError(f"{self.url}: connection refused")
            return await super().generate_many(requests)

    whole: list[Trajectory] = []
    judged: list[Trajectory] = []
    asyncio.run(evaluator(ScriptedEngine(), judged=whole).run(0))
    first, second = FailsOnce("http://first", call=2), FailsOnce("http://second", call=1)
    asked = evaluator(first, second, judged=judged, startup_timeout_s=60)

    async def run() -> None:
        watch = asyncio.create_task(asked._pool.watch())
        assert await asked.run(0) is None, "the second failed, and the first in taking over"
        assert not judged
        for engine in (first, second):
            asked._pool.admit(engine)  # type: ignore[arg-type]
        assert (await asked.run(0) or {})["eval/num_samples"] == 10
        watch.cancel()

    asyncio.run(run())
    assert {t.sample_id: t.response_ids for t in judged} == {t.sample_id: t.response_ids for t in whole}
    assert len(first.requests) + len(second.requests) == 10, "what was answered is not asked again"
    asyncio.run(asked.run(0))
    assert len(first.requests) + len(second.requests) == 20, "a new evaluation begins anew"


def test_metrics_by_hand() -> None:
    def answer(prompt: int, index: int, reward: float, num_tokens: int, reason: Any) -> Trajectory:
        segment = Segment(0, 0, (1,) * num_tokens, (-0.5,) * num_tokens)
        return Trajectory(f"{prompt}.{index}", PROMPTS[prompt], (segment,), reason, reward)

    samples = [
        answer(0, 0, 1.0, 2, "stop"),
        answer(0, 1, 0.0, 4, "length"),
        answer(1, 0, 0.0, 6, "stop"),
        answer(1, 1, 0.0, 8, "stop"),
    ]
    assert eval_metrics(samples) == {
        "eval/reward": 0.25,
        "eval/reward_stderr": pytest.approx(math.sqrt(2 * 0.25**2) / math.sqrt(2)),
        "eval/best_of_group": 0.5,
        "eval/response_tokens_mean": 5.0,
        "eval/truncated_share": 0.25,
        "eval/num_samples": 4.0,
    }
