"""The scheduler makes the same decisions as a plain one, over random histories."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.errors import EngineError
from bapo_megatron.rollout.book import RolloutBook
from bapo_megatron.rollout.staleness import Ages, StalenessBound
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.types import Ended, Group, Sample, Segment
from tests.states import through_checkpoint
from tests.unit.plain_scheduler import PlainBook, make_plain
from tests.unit.test_drivers import Timed, Turns, driver
from tests.unit.test_scheduler import CountingPrompts, make

HANG_CLOCK_S = 1000.0  # on a clock that jumps
EVENTS = (
    "admit",
    "start",
    "start",
    "reply",
    "reply",
    "fail",
    "answer",
    "answer",
    "choose",
    "drop_stale",
    "push",
    "resume",
)


def keep(group: Group) -> bool:
    return group.prompt.prompt_id % 5 != 0


class Twins:
    """A book and a plain book that go through the same history, and must agree after each event."""

    def __init__(self, bound: StalenessBound, by_group: bool, in_flight: int) -> None:
        self.version, self.by_group, self.in_flight, self.bound = 0, by_group, in_flight, bound
        self.first_max_age = bound.max_age
        self.running: dict[str, int] = {}  # weight version at the start of the request, by sample id
        self.books = self._new()
        self.num_chosen = self.num_waits = 0

    def _new(self) -> tuple[RolloutBook, PlainBook]:
        size = self.bound.groups_per_step
        config = RolloutConfig(prompts_per_step=size, samples_per_prompt=2, groups_in_flight=self.in_flight)
        books = [RolloutBook(config, CountingPrompts(), self.bound, keep, by_group=self.by_group) for _ in range(2)]
        return books[0], PlainBook.like(books[1], config)

    def both(self, name: str, *args: Any) -> Any:
        """Call a method of both books; return their common result."""
        ours, plain = (getattr(book, name)(*args) for book in self.books)
        assert ours == plain, name
        return ours

    def agree(self) -> None:
        ours, plain = self.books
        growing = self.both("growing")
        assert ours.num_growing == len(growing)
        self.both("waiting")
        for version in (self.version, self.version + self.bound.updates_per_step):
            for sample in growing:
                self.both("is_urgent", sample, version)
            assert {s.sample_id for s in ours.urgent(version)} == {s.sample_id for s in plain.urgent(version)}
        assert ours.num_dropped == plain.num_dropped
        assert list(ours.buffered()) == list(plain.buffered())
        ours.ledger.check(ours.buffered())
        ours.check_changes()

    def happen(self, event: str, number: int) -> None:
        """Let an event happen; `number` decides which samples it affects, and how."""
        getattr(self, event)(random.Random(number))
        self.agree()

    def admit(self, rng: random.Random) -> None:
        self.both("admit", self.version, self.version + rng.choice([0, self.bound.updates_per_step]))

    def start(self, rng: random.Random) -> None:
        for sample in (s for s in self.both("growing") if s.sample_id not in self.running and rng.random() < 0.6):
            self.both("start", sample, self.version)
            self.running[sample.sample_id] = self.version

    def reply(self, rng: random.Random) -> None:
        for sample_id in [i for i in self.running if rng.random() < 0.5]:
            begun, sample = self.running.pop(sample_id), self.books[1].get(sample_id)
            versions = sorted(rng.randint(begun, self.version) for _ in range(rng.randrange(3)))
            segments = [Segment.sampled(version, 0, (5,), (-1.0,)) for version in versions]
            turn_end = rng.choice(["stop", None]) if sample.num_sampled_tokens or segments else None
            self.both("grow", sample.extended(segments, turn_end))  # type: ignore[arg-type]
            self.both("release", sample_id)

    def fail(self, rng: random.Random) -> None:
        """Withdraw requests, or let them fail with their engine."""
        for sample_id in [i for i in self.running if rng.random() < 0.3]:
            del self.running[sample_id]
            self.both("release", sample_id)

    def answer(self, rng: random.Random) -> None:
        for samples in self.both("waiting"):
            if rng.random() < 0.7:
                for sample in samples:
                    self.both("answer", self._answered(sample, rng))
                group = self.both("group", samples[0].prompt.prompt_id)
                if group.is_complete:
                    ours, plain = (book.settle(group, self.version) for book in self.books)
                    assert ours == plain

    def _answered(self, sample: Sample, rng: random.Random) -> Sample:
        if not self.by_group and rng.random() < 0.4:
            return sample.answered([6, 7])
        has_failed = rng.random() < 0.2
        return replace(sample, need=Ended("failed", None) if has_failed else Ended("stop", rng.random()))

    def choose(self, rng: random.Random) -> None:
        has_enough = len(self.books[1].finished) >= self.bound.groups_per_step
        if self.both("choose", self.version) is None:
            self.num_waits += has_enough
        else:
            self.num_chosen += 1
            self.version += self.bound.updates_per_step

    def push(self, rng: random.Random) -> None:
        self.version += rng.choice([0, 0, self.bound.updates_per_step])

    def drop_stale(self, rng: random.Random) -> None:
        self.both("drop_stale", self.version)
        held = {s.sample_id for s in self.books[1].buffered()}
        assert self.running.keys() <= held

    def resume(self, rng: random.Random) -> None:
        """Begin a new attempt, perhaps with another bound."""
        state, theirs = (through_checkpoint(book.state_dict()) for book in self.books)
        np.testing.assert_equal(state, theirs)
        if self.first_max_age is not None:
            self.bound = replace(self.bound, max_age=max(0, self.first_max_age + rng.choice([-2, 0, 1])))
        self.books, self.running = self._new(), {}
        self.both("load_state_dict", state)


BOUNDS = st.builds(
    lambda spare, updates, size: StalenessBound(None if spare is None else updates - 1 + spare, updates, size),
    spare=st.none() | st.integers(0, 8),
    updates=st.integers(1, 3),
    size=st.integers(1, 3),
)


@given(
    max_age=st.none() | st.integers(1, 12),
    updates_per_step=st.integers(1, 4),
    version=st.integers(0, 30),
    versions=st.lists(st.none() | st.integers(0, 30), max_size=20),
)
def test_urgent_and_stale_groups_are_found_as_by_their_slack(
    max_age: int | None, updates_per_step: int, version: int, versions: list[int | None]
) -> None:
    bound, ages = StalenessBound(max_age, updates_per_step, 4), Ages()
    for prompt_id, oldest in enumerate(versions):
        ages.put(prompt_id, oldest)
    slack = {prompt_id: bound.slack(oldest, version) for prompt_id, oldest in enumerate(versions)}
    assert sorted(bound.urgent(ages, version)) == [prompt_id for prompt_id in slack if slack[prompt_id] == 0]
    assert sorted(bound.stale(ages, version)) == [prompt_id for prompt_id in slack if slack[prompt_id] < 0]
    for least in range(-3, 8):
        limit = bound.oldest_with(least, version)
        for oldest in range(31):
            assert (oldest >= limit) == (bound.slack(oldest, version) >= least)


@settings(max_examples=80, deadline=None)
@given(
    bound=BOUNDS,
    by_group=st.booleans(),
    in_flight=st.integers(1, 9),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2**16)), max_size=60),
)
def test_a_book_decides_as_a_plain_one(
    bound: StalenessBound, by_group: bool, in_flight: int, events: Sequence[tuple[str, int]]
) -> None:
    twins = Twins(bound, by_group, in_flight)
    for event, number in events:
        twins.happen(event, number)


@pytest.mark.parametrize("by_group", [False, True])
def test_a_long_history_has_every_decision(by_group: bool) -> None:
    rng = random.Random(by_group)
    twins = Twins(StalenessBound(7, 2, 2), by_group, 6)
    dropped: set[str] = set()
    for _ in range(120):
        for event in ("admit", "start", "reply", "answer", "choose", *rng.choices(EVENTS, k=rng.random() < 0.6)):
            twins.happen(event, rng.randrange(2**16))
            dropped |= twins.books[0].num_dropped.keys()
    assert twins.num_chosen > 5
    assert twins.num_waits > 0, "a step waits, though enough groups are finished"
    assert {"stale", "keep_group"} <= dropped


class Logged(Timed):  # type: ignore[misc, valid-type]
    """An engine that logs its requests together with the other engines' requests."""

    def __init__(self, url: str, token_s: float, log: list[Any]) -> None:
        super().__init__(url, token_s)
        self._log = log

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        self._log.append((asyncio.get_running_loop().time(), self.url, requests[0].rid))
        if self.failures:
            self.failures -= 1
            raise EngineError(f"{self.url}: HTTP 500")
        try:
            return await super().generate_many(requests)
        except asyncio.CancelledError:
            self._log.append(("withdrawn", self.url, requests[0].rid))
            raise


def history(is_plain: bool, seed: int, options: dict[str, Any], is_multi_turn: bool) -> tuple[list[Any], int]:
    """Train, fence engines, stop, resume; return all requests, batches and accounts, and the number of fencings."""
    rng, log = random.Random(seed), []
    engines = [Logged(f"http://{i}", rng.choice([0.01, 0.03, 0.2]), log) for i in range(3)]
    answer_s, spare, num_fenced = rng.choice([0.0, 0.02, 0.4]), 0, 0

    async def trouble(pool: Any) -> None:
        while True:
            await asyncio.sleep(rng.random() * 1.5)
            bad = rng.sample(engines, rng.randint(1, 2))
            for engine in bad:
                pool.fence(engine, "no health")
            rng.choice(engines).failures = rng.randrange(2)
            await asyncio.sleep(rng.random() * 1.5)
            for engine in bad:
                pool.admit(engine)
                pool.replied(engine)

    async def attempt(first: int, state: Any) -> Any:
        nonlocal num_fenced
        asked = driver(Turns(answer_s, failing=5)) if is_multi_turn else None
        scheduler = make(*engines, driver=asked, max_retries=3, keep=keep, **options, max_staleness=4 + spare)
        scheduler = make_plain(scheduler) if is_plain else scheduler
        if state is not None:
            scheduler.load_state_dict(state)
        troubles = asyncio.create_task(trouble(scheduler.pool))
        for step in range(first, first + 6):
            groups, stats = await scheduler.take(step, step)
            assert groups is not None
            log.append([(s.sample_id, s.sampled_ids.tolist(), s.versions.tolist()) for g in groups for s in g.samples])
            log.append((stats.num_stale_groups, stats.num_dropped_groups, stats.num_retries, scheduler.ledger.counts()))
            await asyncio.sleep(rng.choice([0.0, 0.3]))
            scheduler.pool.expect(step + 1)
            for engine in engines:
                engine.version = step + 1
        troubles.cancel()
        num_fenced += scheduler.pool.num_fenced
        await scheduler.close()
        return through_checkpoint(scheduler.state_dict())

    state = run_on_clock(asyncio.wait_for(attempt(0, None), HANG_CLOCK_S))
    spare = rng.choice([-2, 0, 2])
    for engine in engines:
        engine.failures = 0
    run_on_clock(asyncio.wait_for(attempt(6, state), HANG_CLOCK_S))
    return log, num_fenced


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    in_flight=st.integers(2, 8),
    slots=st.integers(1, 6),
    budget=st.sampled_from([None, 3]),
    mode=st.sampled_from([{"overlap": True}, {"abort_tail": True}, {"overlap": True, "abort_tail": True}, {}]),
    is_multi_turn=st.booleans(),
)
def test_a_scheduler_sends_and_trains_what_a_plain_one_does(
    seed: int, in_flight: int, slots: int, budget: int | None, mode: dict[str, bool], is_multi_turn: bool
) -> None:
    options = {"groups_in_flight": in_flight, "tokens_per_round": budget, "max_concurrent_requests": slots, **mode}
    options["max_response_tokens"] = 40
    (ours, _), (plain, _) = (history(is_plain, seed, options, is_multi_turn) for is_plain in (False, True))
    assert ours == plain


def test_histories_have_engines_that_are_fenced_and_requests_that_are_withdrawn() -> None:
    options = {"groups_in_flight": 6, "tokens_per_round": 3, "max_concurrent_requests": 2, "overlap": True}
    found = [history(False, seed, {**options, "max_response_tokens": 40}, True) for seed in range(4)]
    assert sum(num_fenced for _, num_fenced in found) > 2
    sent = [entry for log, _ in found for entry in log if isinstance(entry, tuple) and len(entry) == 3]
    assert len({url for _, url, _ in sent}) == 3
    assert sum(what == "withdrawn" for what, *_ in sent) > 5
