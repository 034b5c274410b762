"""Partial rollout against a scripted engine: budgets, order, retries, staleness, restarts, and random aborts."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.errors import EngineError
from bapo_megatron.rollout.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.rollout.scheduler import Scheduler, sample_seed
from bapo_megatron.types import Prompt, Trajectory

STOP = 9


class CountingPrompts:
    """An endless stream of distinct prompts."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Prompt:
        self.position += 1
        return Prompt(self.position - 1, (1, 2, self.position % 7), "", "", "test")

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class ScriptedEngine:
    """Deterministic: tokens, log-probs and length of a response depend on the request's seed only."""

    url = "http://scripted"

    def __init__(self, chaos: random.Random | None = None) -> None:
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.failures = 0
        self._chaos = chaos
        self._calls = 0

    def token(self, seed: int, position: int) -> int:
        return STOP if position == 3 + seed % 20 else (seed + position) % 9

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._calls += 1
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise EngineError(f"{self.url}: HTTP 500 on request {request.rid}")
        done = len(request.token_ids) - 3
        limit, reason = request.max_new_tokens, "length"
        if self._chaos and self._chaos.random() < 0.3:
            limit, reason = self._chaos.randrange(request.max_new_tokens + 1), "abort"
        tokens: list[int] = []
        while len(tokens) < limit:
            tokens.append(self.token(request.seed, done + len(tokens)))
            if tokens[-1] in request.stop_token_ids:
                reason = "stop"
                break
        logprobs = tuple(-0.01 * (done + i + 1) for i in range(len(tokens)))
        spans = (VersionSpan(self.version, 0, len(tokens)),) if tokens else ()
        return GenerateResult(request.rid, tuple(tokens), logprobs, spans, reason, done + 3, 0)  # type: ignore[arg-type]


def make(engine: ScriptedEngine, seed: int = 0, **settings_: Any) -> Scheduler:
    config = RolloutConfig(
        **{"prompts_per_step": 2, "samples_per_prompt": 3, "max_response_tokens": 16, "max_retries": 1, **settings_}
    )

    def score(trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(t.finish_reason == "stop") for t in trajectories]

    return Scheduler(
        config,
        engines=[engine],  # type: ignore[list-item]
        prompts=CountingPrompts(),
        score=score,
        stop_token_ids=(STOP,),
        seed=seed,
    )


def expected(engine: ScriptedEngine, t: Trajectory, max_tokens: int = 16) -> tuple[int, ...]:
    seed, tokens = sample_seed(0, t.sample_id), []
    while len(tokens) < max_tokens and STOP not in tokens:
        tokens.append(engine.token(seed, len(tokens)))
    return tuple(tokens)


def test_partial_responses_are_resumed_with_later_weights_and_keep_every_token() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine, tokens_per_round=5, groups_in_flight=5)

    async def run() -> list[Trajectory]:
        out = []
        for step in range(12):
            groups, _ = await scheduler.take(step, engine.version)
            out += [t for g in groups for t in g.trajectories]
            engine.version += 1
        return out

    trained = asyncio.run(run())
    assert len(trained) == 12 * 2 * 3
    assert len({t.sample_id for t in trained}) == len(trained)
    for t in trained:
        assert t.response_ids == expected(engine, t)
        assert t.behaviour_logprobs == tuple(-0.01 * (i + 1) for i in range(t.num_response_tokens))
        assert list(t.versions) == sorted(t.versions)
        assert t.reward == float(t.finish_reason == "stop")
        assert (t.finish_reason == "length") == (STOP not in t.response_ids)
    assert any(len(set(t.versions)) > 1 for t in trained)
    assert sum(t.num_resumed_tokens for t in trained) > 0
    assert all(r.max_new_tokens <= 5 for r in engine.requests)


def test_without_a_budget_one_round_finishes_everything() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine)
    groups, stats = asyncio.run(scheduler.take(0, 0))
    assert stats.num_rounds == 1
    assert [g.prompt.prompt_id for g in groups] == [0, 1]
    assert scheduler.ledger.counts()["partial"] == 0


def test_a_failed_request_is_repeated_then_loud_and_nothing_is_lost() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine)
    engine.failures = 1
    _, stats = asyncio.run(scheduler.take(0, 0))
    assert stats.num_retries == 1
    engine.failures = 100
    with pytest.raises(EngineError, match=r"HTTP 500 .* \(gave up after 2 attempts\)"):
        asyncio.run(scheduler.take(1, 0))
    scheduler.ledger.check(scheduler.buffered())
    engine.failures = 0
    groups, _ = asyncio.run(scheduler.take(1, 0))
    assert [g.prompt.prompt_id for g in groups] == [2, 3]


def test_tokens_of_an_unknown_version_stop_the_run() -> None:
    engine = ScriptedEngine()
    engine.version = 5
    with pytest.raises(EngineError, match="tokens of weight version 5, but the trainer is at 2"):
        asyncio.run(make(engine).take(0, 2))


def test_an_engine_that_returns_nothing_is_an_error_not_a_hang() -> None:
    class Silent(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return GenerateResult(request.rid, (), (), (), "abort", 3, 0)

    with pytest.raises(EngineError, match="3 rounds in a row returned no token from http://scripted"):
        asyncio.run(make(Silent()).take(0, 0))


def test_stale_groups_are_dropped_and_counted() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine, groups_in_flight=8, max_staleness=2)
    asyncio.run(scheduler.take(0, 0))
    engine.version = 3
    groups, stats = asyncio.run(scheduler.take(1, 3))
    assert stats.num_stale_groups == 6
    assert min(v for g in groups for t in g.trajectories for v in t.versions) == 3
    assert scheduler.ledger.dropped == {"stale": 18}


def test_a_restored_scheduler_goes_on_exactly() -> None:
    def take(scheduler: Scheduler, engine: ScriptedEngine, steps: range) -> list[Trajectory]:
        out = []
        for step in steps:
            engine.version = step
            groups, _ = asyncio.run(scheduler.take(step, step))
            out += [t for g in groups for t in g.trajectories]
        return out

    options = {"tokens_per_round": 4, "groups_in_flight": 6}
    engine = ScriptedEngine()
    straight = take(make(engine, **options), engine, range(8))
    first, engine = make(ScriptedEngine(), **options), ScriptedEngine()
    head = take(first, engine, range(3))
    saved = json.loads(json.dumps(first.state_dict()))
    second = make(engine, **options)
    second.load_state_dict(saved)
    assert head + take(second, engine, range(3, 8)) == straight


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 16), st.integers(2, 8), st.integers(1, 4))
def test_conservation_under_random_aborts(chaos: int, budget: int, in_flight: int, samples: int) -> None:
    engine = ScriptedEngine(random.Random(chaos))
    scheduler = make(engine, tokens_per_round=budget, groups_in_flight=in_flight, samples_per_prompt=samples)
    num_trained_tokens = 0
    for step in range(4):
        engine.version = step
        groups, _ = asyncio.run(scheduler.take(step, step))
        num_trained_tokens += sum(t.num_response_tokens for g in groups for t in g.trajectories)
        for t in (t for g in groups for t in g.trajectories):
            assert t.response_ids == expected(engine, t)
            assert all(math.isfinite(x) for x in t.behaviour_logprobs)
        num_buffered = sum(t.num_response_tokens for t in scheduler.buffered())
        assert scheduler.ledger.num_tokens["generated"] == num_trained_tokens + num_buffered
        assert scheduler.ledger.num_tokens["trained"] == num_trained_tokens
        scheduler.ledger.check(scheduler.buffered())
