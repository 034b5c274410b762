"""The scheduler in rounds, against a scripted engine: budgets, order, retries, fencing, restarts, random aborts."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, RequestRefusedError, UserError
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.book import RolloutBook
from bapo_megatron.rollout.dispatch import RolloutStats, sample_seed
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment
from tests.states import through_checkpoint

STOP = 9
T = TypeVar("T")


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
    """A deterministic engine: tokens, log-probs and length of a response depend only on the request's seed."""

    def __init__(self, chaos: random.Random | None = None, url: str = "http://scripted") -> None:
        self.url = url
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.failures = 0
        self._chaos = chaos

    def token(self, seed: int, position: int) -> int:
        return STOP if position == 3 + seed % 20 else (seed + position) % 9

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise EngineError(f"{self.url}: HTTP 500 on request {requests[0].rid}")
        return [self.answer(request) for request in requests]

    async def health(self) -> bool:
        return True

    def answer(self, request: GenerateRequest) -> GenerateResult | EngineError:
        self.requests.append(request)
        done = len(request.token_ids) - 3
        limit = request.max_new_tokens
        reason: Literal["stop", "length", "abort"] = "length"
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
        return GenerateResult(
            request.rid, np.array(tokens, np.int64), np.array(logprobs, np.float32), spans, reason, done + 3, 0
        )


def verdict(reward: float) -> Verdict:
    return Verdict(Ended(reward=float(reward)))


def make(
    *engines: ScriptedEngine,
    seed: int = 0,
    updates_per_step: int = 1,
    keep: Any = None,
    driver: Any = None,
    annotators: Annotators | None = None,
    max_turn_tokens: int | None = None,
    stop: int = STOP,
    **settings_: Any,
) -> Scheduler:
    defaults = {"prompts_per_step": 2, "samples_per_prompt": 3, "max_response_tokens": 16, "max_retries": 1}
    config = RolloutConfig(**{**defaults, "startup_timeout_s": 0.5, **settings_})

    def judge(samples: Sequence[Sample]) -> list[Verdict]:
        return [verdict(s.finish_reason == "stop") for s in samples]

    return Scheduler(
        config,
        pool=EnginePool(engines),  # type: ignore[arg-type]
        prompts=CountingPrompts(),
        driver=driver or JudgeOnce(judge),
        stop_token_ids=(stop,),
        seed=seed,
        updates_per_step=updates_per_step,
        keep=keep or (lambda group: True),
        annotators=annotators,
        max_turn_tokens=max_turn_tokens,
    )


def expected(engine: ScriptedEngine, t: Sample, max_tokens: int = 16) -> tuple[int, ...]:
    seed = sample_seed(0, t.sample_id)
    tokens: list[int] = []
    while len(tokens) < max_tokens and STOP not in tokens:
        tokens.append(engine.token(seed, len(tokens)))
    return tuple(tokens)


def test_partial_responses_are_resumed_with_later_weights_and_keep_every_token() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine, tokens_per_round=5, groups_in_flight=5)

    async def run() -> list[Sample]:
        out = []
        for step in range(12):
            groups, _ = await scheduler.take(step, engine.version)
            assert groups is not None
            out += [t for g in groups for t in g.samples]
            engine.version += 1
        return out

    trained = run_on_clock(run())
    assert len(trained) == 12 * 2 * 3
    assert len({t.sample_id for t in trained}) == len(trained)
    for t in trained:
        assert tuple(t.sampled_ids) == expected(engine, t)
        assert t.behaviour_logprobs.tolist() == [np.float32(-0.01 * (i + 1)) for i in range(t.num_sampled_tokens)]
        assert list(t.versions) == sorted(t.versions)
        assert t.reward == float(t.finish_reason == "stop")
        assert (t.finish_reason == "length") == (STOP not in tuple(t.sampled_ids))
    assert any(len(set(t.versions)) > 1 for t in trained)
    assert sum(t.num_resumed_tokens for t in trained) > 0
    assert all(r.max_new_tokens <= 5 for r in engine.requests)


def test_without_a_budget_one_round_finishes_everything() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine)
    groups, stats = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    assert stats.num_rounds == 1
    assert [g.prompt.prompt_id for g in groups] == [0, 1]
    assert scheduler.ledger.counts()["partial"] == 0


def test_a_failed_request_is_repeated_then_loud_and_nothing_is_lost() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine)
    engine.failures = 1
    _, stats = run_on_clock(scheduler.take(0, 0))
    assert stats.num_retries == 6, "all six responses of the call"
    engine.failures = 100
    with pytest.raises(EngineError, match=r"HTTP 500 .* \(gave up after 2 attempts\)"):
        run_on_clock(scheduler.take(1, 0))
    scheduler.ledger.check(scheduler.book.buffered())
    assert scheduler.ledger.counts()["queued"] == 6
    engine.failures = 0
    scheduler.pool.admit(engine)  # type: ignore[arg-type]
    groups, _ = run_on_clock(scheduler.take(1, 0))
    assert groups is not None
    assert [g.prompt.prompt_id for g in groups] == [2, 3]


def test_why_requests_are_repeated_is_logged_once_for_all_that_fail_alike(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ScriptedEngine):
        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            if not self.failures:
                return await super().generate_many(requests)
            self.failures -= 1
            status = 503 if self.failures == 2 else 500
            raise EngineError(f"{self.url}/generate, request {requests[0].rid}: HTTP {status}: no")

    engine = Failing()
    scheduler = make(engine, max_retries=3)
    engine.failures = 3
    _, stats = run_on_clock(scheduler.take(0, 0))
    assert len(stats.errors) == 3
    where = "a request is repeated: http://scripted/generate, request 0.0-s0"
    assert caplog.messages == [f"{where}c0: HTTP 503: no", f"{where}c1: HTTP 500: no"]


def test_a_failing_engine_is_fenced_and_the_others_take_over() -> None:
    good, bad = ScriptedEngine(url="http://good"), ScriptedEngine(url="http://bad")
    bad.failures = 100
    scheduler = make(good, bad)
    groups, stats = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    assert [g.prompt.prompt_id for g in groups] == [0, 1]
    assert all(tuple(t.sampled_ids) == expected(good, t) for g in groups for t in g.samples)
    assert (stats.num_fenced, stats.num_retries) == (1, 3)
    assert "http://bad is fenced (http://bad: HTTP 500" in scheduler.pool.describe()


def test_an_engine_that_is_back_gets_weights_before_it_is_asked() -> None:
    engine = ScriptedEngine()
    scheduler = make(engine, startup_timeout_s=10)
    engine.failures = 2

    async def run() -> list[Group] | None:
        watch = asyncio.create_task(scheduler.pool.watch())
        groups, stats = await scheduler.take(0, 0)
        assert stats == RolloutStats()
        assert groups is None, "the only engine failed and recovered: the trainer has to push"
        assert not engine.requests
        scheduler.pool.admit(engine)  # type: ignore[arg-type]
        groups, stats = await scheduler.take(0, 0)
        watch.cancel()
        assert (stats.num_retries, stats.num_rounds, stats.num_fenced) == (6, 2, 1), "the faults are this batch's"
        assert len(stats.errors) == 1
        return groups

    groups = run_on_clock(run())
    assert groups is not None
    assert [g.prompt.prompt_id for g in groups] == [0, 1]


def test_one_bad_result_of_many_costs_its_own_request_only() -> None:
    class Garbling(ScriptedEngine):
        num_bad = 0

        def answer(self, request: GenerateRequest) -> GenerateResult | EngineError:
            if request.rid.startswith("1.2-") and not self.num_bad:
                self.num_bad = 1
                return EngineError("garbage")
            return super().answer(request)

    engine = Garbling()
    groups, stats = run_on_clock(make(engine).take(0, 0))
    assert groups is not None
    assert stats.num_retries == 1
    assert len(engine.requests) == 6


def test_a_refused_request_ends_the_run_at_once() -> None:
    class Refusing(ScriptedEngine):
        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            raise RequestRefusedError("HTTP 400: input_ids: too long")

    scheduler = make(Refusing())
    with pytest.raises(RequestRefusedError, match="too long"):
        run_on_clock(scheduler.take(0, 0))
    scheduler.ledger.check(scheduler.book.buffered())


def test_an_engine_restarted_with_old_weights_is_fenced_and_its_tokens_are_not_believed() -> None:
    engine = ScriptedEngine()
    engine.version = -1
    scheduler = make(engine)
    with pytest.raises(EngineError, match="weight version -1, but version 4 was sent there"):
        run_on_clock(scheduler.take(0, 4))
    assert scheduler.ledger.num_tokens["generated"] == 0


def test_groups_that_are_not_worth_training_are_replaced_and_counted() -> None:
    engine = ScriptedEngine()
    judged: list[float] = []

    def keep(group: Group) -> bool:
        judged.extend(group.rewards)
        return len(set(group.rewards)) > 1

    scheduler = make(engine, keep=keep)
    groups, stats = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    assert all(len(set(g.rewards)) == 2 for g in groups)
    assert stats.num_dropped_groups > 0
    assert stats.rewards == judged
    assert len(judged) == 3 * (len(groups) + stats.num_dropped_groups)
    assert scheduler.ledger.dropped == {"keep_group": 3 * stats.num_dropped_groups}
    scheduler.ledger.check(scheduler.book.buffered())


def test_prompts_that_never_teach_anything_end_the_run_with_advice() -> None:
    scheduler = make(ScriptedEngine(), keep=lambda group: False)
    with pytest.raises(UserError, match=r"40 groups in a row were dropped \(keep_group\).*keep_group=\"all\""):
        run_on_clock(scheduler.take(0, 0))


def test_tokens_of_an_unknown_version_stop_the_run() -> None:
    engine = ScriptedEngine()
    engine.version = 5
    with pytest.raises(EngineError, match="tokens of weight version 5, but the trainer is at 2"):
        run_on_clock(make(engine).take(0, 2))


def test_a_request_that_an_abort_has_overtaken_is_soon_aborted_again() -> None:
    class Late(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.there: dict[str, asyncio.Event] = {}

        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            (request,) = requests
            await asyncio.sleep(0.01)
            if request.rid.startswith("0."):
                return [self.answer(request)]
            await asyncio.sleep(0.005)  # so it arrives after the abort
            self.there[request.rid] = asyncio.Event()
            await self.there[request.rid].wait()
            return [self.answer(replace(request, max_new_tokens=1))]

        async def abort(self, rid: str) -> None:
            if rid in self.there:
                self.there[rid].set()

    async def run() -> float:
        loop = asyncio.get_running_loop()
        scheduler = make(Late(), prompts_per_step=1, abort_tail=True, groups_in_flight=2)
        await scheduler.take(0, 0)
        return loop.time()

    assert run_on_clock(run()) < 0.05


def test_an_engine_that_returns_nothing_is_an_error_not_a_hang() -> None:
    class Silent(ScriptedEngine):
        def answer(self, request: GenerateRequest) -> GenerateResult:
            return GenerateResult(request.rid, np.array((), np.int64), np.array((), np.float32), (), "abort", 3, 0)

    with pytest.raises(EngineError, match="3 rounds in a row returned no token from http://scripted"):
        run_on_clock(make(Silent()).take(0, 0))


def test_stale_groups_are_dropped_and_counted() -> None:
    engine = ScriptedEngine()
    before = make(engine, groups_in_flight=8)
    run_on_clock(before.take(0, 0))
    after = make(engine, groups_in_flight=8, max_staleness=2)  # the resumed run has a new bound
    after.load_state_dict(before.state_dict())
    engine.version = 3
    groups, stats = run_on_clock(after.take(1, 3))
    assert groups is not None
    assert stats.num_stale_groups == 6
    assert min(v for g in groups for t in g.samples for v in t.versions) == 3
    assert after.ledger.dropped == {"stale": 18}


def test_the_bound_holds_for_groups_that_are_running_or_being_judged_when_they_become_stale() -> None:
    bound = StalenessBound(max_age=0, updates_per_step=1, groups_per_step=2)
    book = RolloutBook(RolloutConfig(prompts_per_step=2, samples_per_prompt=1), CountingPrompts(), bound)
    being_judged, running = book.admit(0, 0)
    for response, reason in ((being_judged, "stop"), (running, None)):
        book.start(response, 0)
        if reason:
            book.grow(response.extended([Segment.sampled(0, 0, (5,), (-1.0,))], reason))  # type: ignore[arg-type]
    ((waiting,),) = book.waiting()
    book.drop_stale(1)
    assert not book.num_dropped, "neither may leave now: its request, or its verdict, would find it gone"
    book.answer(replace(waiting, need=Ended("stop", 1.0)))
    book.settle(book.group(0), 1)
    assert book.num_dropped == {"stale": 1}
    book.grow(running.extended([Segment.sampled(0, 0, (6, 7), (-1.0, -1.0))], "length"))
    assert not book.is_urgent(running, 1), "it is too late to hurry"
    ((waiting,),) = book.waiting()
    book.answer(replace(waiting, need=Ended("length", 1.0)))
    book.settle(book.group(1), 1)
    assert book.num_dropped == {"stale": 2}
    book.ledger.check(book.buffered())
    assert book.ledger.num_tokens == {"generated": 3, "dropped": 3}


def test_a_restored_scheduler_goes_on_exactly() -> None:
    def take(scheduler: Scheduler, engine: ScriptedEngine, steps: range) -> list[Sample]:
        out = []
        for step in steps:
            engine.version = step
            groups, _ = run_on_clock(scheduler.take(step, step))
            assert groups is not None
            out += [t for g in groups for t in g.samples]
        return out

    options: dict[str, Any] = {"tokens_per_round": 4, "groups_in_flight": 6}
    engine = ScriptedEngine()
    straight = take(make(engine, **options), engine, range(8))
    first, engine = make(ScriptedEngine(), **options), ScriptedEngine()
    head = take(first, engine, range(3))
    saved = through_checkpoint(first.state_dict())
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
        groups, _ = run_on_clock(scheduler.take(step, step))
        assert groups is not None
        num_trained_tokens += sum(t.num_sampled_tokens for g in groups for t in g.samples)
        for t in (t for g in groups for t in g.samples):
            assert tuple(t.sampled_ids) == expected(engine, t)
            assert all(math.isfinite(x) for x in t.behaviour_logprobs)
        num_buffered = sum(t.num_sampled_tokens for t in scheduler.book.buffered())
        assert scheduler.ledger.num_tokens["generated"] == num_trained_tokens + num_buffered
        assert scheduler.ledger.num_tokens["trained"] == num_trained_tokens
        scheduler.ledger.check(scheduler.book.buffered())
