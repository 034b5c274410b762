"""Sampling without rounds, with an engine that takes time by the test's own clock: over-sampling, overlap, fencing,
the staleness bound."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.errors import EngineError
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.dispatch import sample_seed
from bapo_megatron.rollout.drivers import JudgeOnce
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.simulate.clock import ClockLoop, run_on_clock
from bapo_megatron.types import Group, Sample
from tests.states import through_checkpoint
from tests.unit.test_scheduler import STOP, ScriptedEngine, make


class TimedEngine(ScriptedEngine):
    """An engine that samples a token per request and tick; lengths are long-tailed; weights may change in between."""

    def __init__(self, url: str = "http://timed", token_s: float = 0.0005) -> None:
        super().__init__(url=url)
        self.token_s = token_s
        self.num_running = 0
        self.max_running = 0
        self.is_hung = False
        self.halt_at: int | None = None  # responses of this length wait until they are aborted
        self._aborted: set[str] = set()

    def token(self, seed: int, position: int) -> int:
        length = 40 if seed % 7 == 0 else 2 + seed % 5
        return STOP if position == length else (seed + position) % 9

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        self.num_running += len(requests)
        self.max_running = max(self.max_running, self.num_running)
        try:
            return [await self.sample(request) for request in requests]
        finally:
            self.num_running -= len(requests)

    async def sample(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        done, reason = len(request.token_ids) - 3, "length"
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        while len(tokens) < request.max_new_tokens and reason == "length":
            while self.is_hung or (done + len(tokens) == self.halt_at and request.rid not in self._aborted):
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.token_s)
            if request.rid in self._aborted:
                reason = "abort"
                break
            if not spans or spans[-1].version != self.version:
                spans.append(VersionSpan(self.version, len(tokens), len(tokens)))
            tokens.append(self.token(request.seed, done + len(tokens)))
            spans[-1] = VersionSpan(spans[-1].version, spans[-1].start, len(tokens))
            reason = "stop" if tokens[-1] == STOP else reason
        logprobs = tuple(-0.01 * (done + i + 1) for i in range(len(tokens)))
        return GenerateResult(
            request.rid, np.array(tokens, np.int64), np.array(logprobs, np.float32), tuple(spans), reason, done + 3, 0
        )  # type: ignore[arg-type]

    async def abort(self, rid: str | None = None) -> None:
        assert rid is not None, "others may use the server, too"
        self._aborted.add(rid)


def expected(t: Sample, max_tokens: int = 48) -> tuple[int, ...]:
    seed, tokens = sample_seed(0, t.sample_id), []
    while len(tokens) < max_tokens and STOP not in tokens:
        tokens.append(TimedEngine().token(seed, len(tokens)))
    return tuple(tokens)


def check(scheduler: Scheduler, trained: Sequence[Group]) -> None:
    """Check that every response follows from its seed and was trained once, and that the books miss no token."""
    samples = [t for g in trained for t in g.samples]
    assert len({t.sample_id for t in samples}) == len(samples)
    for t in samples:
        assert tuple(t.sampled_ids) == expected(t)
        assert t.behaviour_logprobs.tolist() == [np.float32(-0.01 * (i + 1)) for i in range(t.num_sampled_tokens)]
        assert list(t.versions) == sorted(t.versions)
    scheduler.ledger.check(scheduler.book.buffered())
    for t in scheduler.book.buffered():
        assert tuple(t.sampled_ids) == expected(t)[: t.num_sampled_tokens]
    num_buffered = sum(t.num_sampled_tokens for t in scheduler.book.buffered())
    num_trained = sum(t.num_sampled_tokens for t in samples)
    assert scheduler.ledger.num_tokens["generated"] == num_trained + num_buffered


async def train(
    scheduler: Scheduler, engines: Sequence[TimedEngine], num_steps: int, updates: int, train_s: float = 0.004
) -> list[list[Group]]:
    """Train by taking time only; push weights to every engine after each step."""
    batches = []
    for step in range(num_steps):
        groups, _ = await scheduler.take(step, step * updates)
        assert groups is not None
        batches.append(groups)
        await asyncio.sleep(train_s)
        scheduler.pool.expect((step + 1) * updates)
        for engine in engines:
            engine.version = (step + 1) * updates
            await asyncio.sleep(0)
    await scheduler.close()
    return batches


OPTIONS: dict[str, Any] = {"max_response_tokens": 48, "groups_in_flight": 4}


def test_an_event_loop_that_ends_early_leaves_no_request_behind() -> None:
    """Whatever ended the caller, no new request may start while the running ones are cancelled."""
    engine = TimedEngine(token_s=0.01)

    async def fail() -> None:
        await make(engine, overlap=True, max_staleness=2, **OPTIONS).take(0, 0)
        assert engine.num_running > 0
        raise ArithmeticError("the trainer's own")

    with pytest.raises(ArithmeticError):
        run_on_clock(fail())
    assert engine.num_running == 0


@pytest.mark.parametrize("budget", [None, 7])
def test_the_tail_is_aborted_and_resumed_with_newer_weights(budget: int | None) -> None:
    engine = TimedEngine()
    scheduler = make(engine, abort_tail=True, tokens_per_round=budget, **OPTIONS)
    batches = run_on_clock(train(scheduler, [engine], num_steps=12, updates=1))
    check(scheduler, [g for batch in batches for g in batch])
    assert engine.num_running == 0, "nothing is left running between steps"
    trained = [t for batch in batches for g in batch for t in g.samples]
    assert any(len(set(t.versions)) > 1 for t in trained)
    assert any(t.num_sampled_tokens > 40 for t in trained)
    if budget is not None:
        assert all(r.max_new_tokens <= budget for r in engine.requests)


def test_a_step_does_not_wait_for_the_tail() -> None:
    """Slow responses need 40 tokens and stop at 30; steps of over-sampled groups are ready after a few tokens."""
    engine = TimedEngine()
    engine.halt_at = 30
    scheduler = make(engine, abort_tail=True, samples_per_prompt=1, groups_in_flight=16, max_response_tokens=48)

    groups, _ = run_on_clock(asyncio.wait_for(scheduler.take(0, 0), 60))
    assert groups is not None
    begun = [*(t for g in groups for t in g.samples), *scheduler.book.buffered()]
    assert all(t.num_sampled_tokens < 40 for t in begun)
    assert any(len(expected(t)) > 40 for t in begun), "otherwise none was slow"


def test_a_pause_ends_requests_before_a_push_and_the_next_step_resumes_them() -> None:
    """Slow responses stop at 30 tokens until they are aborted; no request sees two weight versions."""
    engine = TimedEngine()
    engine.halt_at = 30
    options = {"samples_per_prompt": 1, "groups_in_flight": 16, "max_response_tokens": 48}
    scheduler = make(engine, overlap=True, max_staleness=4, **options)

    async def run() -> None:
        await scheduler.take(0, 0)
        await asyncio.sleep(10)  # of training
        assert engine.num_running, "slow responses"
        await scheduler.sampling.pause()
        num_sent, num_before = len(engine.requests), {s.sample_id: s.num_sampled_tokens for s in book.buffered()}
        assert not engine.num_running
        assert max(num_before.values()) == 30
        await asyncio.sleep(10)
        assert len(engine.requests) == num_sent, "none starts before the push is done"
        engine.version, engine.halt_at = 1, None
        await scheduler.take(1, 1)
        await scheduler.close()
        resumed = [r for r in engine.requests[num_sent:] if len(r.token_ids) == 3 + 30]
        assert len(resumed) == sum(n == 30 for n in num_before.values())

    book = scheduler.book
    run_on_clock(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("abort_tail", [False, True])
def test_sampling_goes_on_while_the_trainer_trains(abort_tail: bool) -> None:
    engine = TimedEngine()
    scheduler = make(engine, overlap=True, abort_tail=abort_tail, max_staleness=4, **OPTIONS)

    async def run() -> None:
        groups, _ = await scheduler.take(0, 0)
        assert groups is not None
        before = scheduler.ledger.num_tokens["generated"]
        while scheduler.ledger.num_tokens["generated"] == before:
            await asyncio.sleep(0.001)
        await scheduler.close()
        check(scheduler, groups)

    run_on_clock(asyncio.wait_for(run(), 60))


def test_responses_go_on_through_a_push_and_know_both_versions() -> None:
    engine = TimedEngine(token_s=0.001)
    scheduler = make(engine, overlap=True, max_staleness=6, **OPTIONS)
    batches = run_on_clock(train(scheduler, [engine], num_steps=15, updates=1))
    check(scheduler, [g for batch in batches for g in batch])
    trained = [t for batch in batches for g in batch for t in g.samples]
    assert any(len(set(t.versions)) > 1 for t in trained)


def test_slots_are_refilled_one_by_one_and_never_overfilled() -> None:
    engine = TimedEngine()
    scheduler = make(engine, overlap=True, max_staleness=9, max_concurrent_requests=5, **OPTIONS)
    run_on_clock(train(scheduler, [engine], num_steps=10, updates=1))
    assert engine.max_running == 5


def test_a_hung_engine_is_fenced_and_its_samples_move_on() -> None:
    good, bad = TimedEngine("http://good"), TimedEngine("http://bad")
    bad.is_hung = True
    scheduler = make(good, bad, overlap=True, max_staleness=4, request_timeout_s=30, **OPTIONS)

    async def run() -> list[Group]:
        taking = asyncio.create_task(scheduler.take(0, 0))
        await asyncio.sleep(0.1)
        scheduler.pool.fence(bad, "no health")  # type: ignore[arg-type]
        groups, _ = await asyncio.wait_for(taking, 60)
        assert groups is not None
        await scheduler.close()
        return groups

    check(scheduler, run_on_clock(run()))


def test_engines_that_return_nothing_are_an_error_not_a_busy_loop() -> None:
    class Silent(TimedEngine):
        async def sample(self, request: GenerateRequest) -> GenerateResult:
            return GenerateResult(request.rid, np.array((), np.int64), np.array((), np.float32), (), "abort", 3, 0)

    scheduler = make(Silent(), abort_tail=True, **OPTIONS)
    with pytest.raises(EngineError, match="replies in a row from http://timed held no token"):
        run_on_clock(asyncio.wait_for(scheduler.take(0, 0), 60))


def test_a_failing_judge_is_loud() -> None:
    scheduler = make(TimedEngine(), abort_tail=True, **OPTIONS)

    def broken(_: Any) -> list[Verdict]:
        raise RuntimeError("no verdict")

    scheduler.driver = JudgeOnce(broken)
    with pytest.raises(RuntimeError, match="no verdict"):
        run_on_clock(asyncio.wait_for(scheduler.take(0, 0), 60))


def test_a_failure_between_two_batches_is_told_once_by_the_next() -> None:
    scheduler = make(TimedEngine(), overlap=True, max_staleness=9, **OPTIONS)
    driver, failed = scheduler.driver, []
    assert isinstance(driver, JudgeOnce)

    def fails_once(samples: Any) -> Sequence[Verdict]:
        if not failed:
            failed.append(samples)
            raise RuntimeError("no verdict")
        return driver.judge(samples)

    async def told() -> None:
        while scheduler.sampling.failure is None:
            await asyncio.sleep(0.01)

    async def run() -> None:
        await scheduler.take(0, 0)
        scheduler.driver = JudgeOnce(fails_once)
        await asyncio.wait_for(told(), 60)
        with pytest.raises(RuntimeError, match="no verdict"):
            await scheduler.take(1, 1)
        groups, _ = await asyncio.wait_for(scheduler.take(1, 1), 60)
        assert groups is not None
        await scheduler.close()

    run_on_clock(run())


def test_state_saved_while_sampling_goes_on_loses_and_repeats_nothing() -> None:
    options = {"overlap": True, "max_staleness": 5, **OPTIONS}

    async def first(engine: TimedEngine, scheduler: Scheduler) -> tuple[list[Group], str]:
        trained = []
        for step in range(4):
            groups, _ = await scheduler.take(step, step)
            assert groups is not None
            trained += groups
            await asyncio.sleep(0.003)
            engine.version = step + 1
            scheduler.pool.expect(step + 1)
        assert engine.num_running > 0, "requests are in progress while the state is saved"
        saved = through_checkpoint(scheduler.state_dict())
        await scheduler.close()
        return trained, saved

    engine = TimedEngine()
    head, saved = run_on_clock(first(engine, make(engine, **options)))
    second = make(engine, **options)
    second.load_state_dict(saved)
    assert second.ledger.counts()["running"] == 0

    async def rest() -> list[Group]:
        trained = []
        for step in range(4, 9):
            engine.version = step
            groups, _ = await second.take(step, step)
            assert groups is not None
            trained += groups
        await second.close()
        return trained

    check(second, head + run_on_clock(rest()))


@pytest.mark.parametrize("judge_s", [0.0, 0.1])
def test_a_bound_that_is_lowered_between_runs_holds_from_then_on(judge_s: float) -> None:
    """Responses that become stale while they are sampled or judged are dropped, and counted in the next batch."""
    options = {**OPTIONS, "overlap": True, "samples_per_prompt": 2, "groups_in_flight": 12, "tokens_per_round": 6}
    engine = TimedEngine()
    first = make(engine, max_staleness=12, **options)
    head = run_on_clock(train(first, [engine], num_steps=4, updates=1))
    second = make(engine, max_staleness=2, **options)
    second.load_state_dict(through_checkpoint(first.state_dict()))
    driver = second.driver
    assert isinstance(driver, JudgeOnce)

    def judge(samples: Sequence[Sample]) -> Sequence[Verdict]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ClockLoop)
        loop.work(judge_s if samples[0].prompt.prompt_id % 3 else 0.0)
        return driver.judge(samples)

    second.driver = JudgeOnce(judge)
    num_stale = 0

    async def rest() -> list[list[Group]]:
        nonlocal num_stale
        batches = []
        for step in range(4, 12):
            groups, stats = await second.take(step, step)
            assert groups is not None
            batches.append(groups)
            num_stale += stats.num_stale_groups
            await asyncio.sleep(0.004)
            second.pool.expect(step + 1)
            engine.version = step + 1
        await second.close()
        return batches

    tail = run_on_clock(rest())
    for step, groups in enumerate(tail, start=4):
        assert max(step - v for g in groups for t in g.samples for v in t.versions) <= 2
    samples = [t for groups in (*head, *tail) for g in groups for t in g.samples]
    assert len({t.sample_id for t in samples}) == len(samples)
    assert all(tuple(t.sampled_ids) == expected(t) for t in samples)
    second.ledger.check(second.book.buffered())
    assert 0 < num_stale == second.book.num_dropped["stale"]


def test_groups_dropped_while_the_trainer_trains_are_counted_in_the_next_batch() -> None:
    engine = TimedEngine()
    scheduler = make(
        engine,
        keep=lambda group: group.prompt.prompt_id % 2 == 0,
        **{**OPTIONS, "overlap": True, "max_staleness": 12, "groups_in_flight": 16},
    )

    async def run() -> list[int]:
        counts = []
        for step in range(4):
            groups, stats = await scheduler.take(step, 0)
            assert groups is not None
            counts.append(stats.num_dropped_groups)
            assert sum(counts) == scheduler.book.num_dropped["keep_group"]
            await asyncio.sleep(0.1)
        await scheduler.close()
        return counts

    assert sum(run_on_clock(run())) > 0


def test_the_trainer_waits_for_a_slow_request_before_its_tokens_are_too_old() -> None:
    """Tokens that have not come back yet count too."""

    class SlowFirst(TimedEngine):
        async def sample(self, request: GenerateRequest) -> GenerateResult:
            if len(self.requests) == 0:
                result = await super().sample(request)
                await asyncio.sleep(0.3)  # a few dozen steps
                return result
            return await super().sample(request)

    engine = SlowFirst(token_s=0.0)
    scheduler = make(engine, overlap=True, max_staleness=4, samples_per_prompt=1, **OPTIONS | {"groups_in_flight": 8})
    batches = run_on_clock(train(scheduler, [engine], num_steps=12, updates=1, train_s=0.001))
    assert not scheduler.ledger.dropped
    steps = [step for step, groups in enumerate(batches) for g in groups if g.prompt.prompt_id == 0]
    assert len(steps) == 1
    assert steps[0] <= 4
    check(scheduler, [g for batch in batches for g in batch])


@settings(max_examples=40, deadline=None)
@given(
    chaos=st.integers(0, 2**32),
    updates=st.integers(1, 3),
    spare=st.integers(0, 5),
    in_flight=st.integers(2, 8),
    budget=st.sampled_from([None, 3, 11]),
    abort_tail=st.booleans(),
    overlap=st.booleans(),
)
def test_the_staleness_bound_is_never_passed_and_nothing_is_dropped(
    chaos: int, updates: int, spare: int, in_flight: int, budget: int | None, abort_tail: bool, overlap: bool
) -> None:
    bound = (2 if overlap else 1) * updates - 1 + spare
    rng = random.Random(chaos)
    engines = [TimedEngine(f"http://{i}", token_s=rng.choice([0.0, 0.001])) for i in range(2)]
    scheduler = make(
        *engines,
        updates_per_step=updates,
        max_staleness=bound,
        groups_in_flight=in_flight,
        tokens_per_round=budget,
        abort_tail=abort_tail,
        overlap=overlap,
        max_response_tokens=48,
    )
    batches = run_on_clock(train(scheduler, engines, num_steps=8, updates=updates, train_s=rng.random() * 0.004))
    for step, groups in enumerate(batches):
        last_update = (step + 1) * updates - 1
        assert len(groups) == 2
        assert max(last_update - v for g in groups for t in g.samples for v in t.versions) <= bound
    check(scheduler, [g for batch in batches for g in batch])
    assert not scheduler.ledger.dropped
