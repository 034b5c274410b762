"""Drivers in rounds, streams and evaluations: turns, ends, failures, resumed turns, and invalid answers."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bapo_megatron.algorithms.advantages import ESTIMATORS
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.rewards import worker_pool
from bapo_megatron.rewards.environments import (
    Continue,
    End,
    EnvironmentSpec,
    Failed,
    ForJudge,
    StepAnswer,
    TurnJson,
    as_answer,
)
from bapo_megatron.rewards.steps import calculator, guess
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses, Worker
from bapo_megatron.rollout.drivers import Answers, StepDriver
from bapo_megatron.rollout.evaluate import Evaluator, eval_metrics
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.types import Ended, Given, Group, NeedsEnvironment, NeedsTokens, Prompt, Sample, Segment
from tests.hang import HANG_S
from tests.states import through_checkpoint
from tests.unit.test_continuous import TimedEngine, train
from tests.unit.test_scheduler import STOP, CountingPrompts, ScriptedEngine, make

WORDS = (20, 21)  # the environment's: no engine samples them
LIMIT = 40


class Turns:
    """An environment that answers every turn except the third; it remembers its answers only in its state."""

    deadline_s = 0.0

    def __init__(
        self, answer_s: float = 0.0, failing: int | None = None, which: int = 0, *, is_said: bool = True
    ) -> None:
        self.asked: list[str] = []
        self._failure = Failed("no browser", is_said=is_said)
        self._answer_s = answer_s
        self._failing = failing  # one in this many turns fails,
        self._which = which  # one of these

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        self.asked.append(json.dumps([turn, state]))
        if self._answer_s:
            await asyncio.sleep(self._answer_s * (1 + len(turn["token_ids"]) % 3))
        lengths = [*(state or []), len(turn["token_ids"])]
        assert turn["number"] == len(lengths)
        if self._failing and sum(turn["token_ids"]) % self._failing == self._which:
            return self._failure
        if len(lengths) == 3:
            return End({"short": -float(sum(lengths)), "turns": 3.0})
        return Continue(lengths, token_ids=WORDS, reward=0.25)


def ends_turns(engine_type: type[ScriptedEngine]) -> type[ScriptedEngine]:
    class Short(engine_type):  # type: ignore[valid-type, misc]
        def token(self, seed: int, position: int) -> int:
            return STOP if position % (3 + seed % 5) == 2 else (seed + position) % 9

    return Short


class Numbered(CountingPrompts):
    """Prompts whose answer is their number."""

    def next(self) -> Prompt:
        return replace(super().next(), answer=self.position - 1)


Rounds, Timed = ends_turns(ScriptedEngine), ends_turns(TimedEngine)


def words(answer: Continue, turn: TurnJson, max_tokens: int) -> tuple[Sequence[int], bool]:
    token_ids = answer.token_ids or ()
    return token_ids[:max_tokens], len(token_ids) > max_tokens


def driver(environment: Any = None, **limits: Any) -> StepDriver:
    limits = {"max_response_tokens": LIMIT, "max_answer_tokens": 9, "max_turns": 9} | limits
    return StepDriver(environment or Turns(), words, str, **limits)


def check(scheduler: Scheduler, groups: Sequence[Group]) -> None:
    """Check that the books balance, and that turns alternate with the environment's words as its state says."""
    scheduler.ledger.check(scheduler.book.buffered())
    samples = [s for g in groups for s in g.samples]
    assert len({s.sample_id for s in samples}) == len(samples)
    for s in samples:
        (trajectory,) = s.trajectories
        lengths = [len(turn) for turn in trajectory.turns]
        given = [x for x in trajectory.segments[1:] if isinstance(x.origin, Given)]
        assert all(x.token_ids.tolist() == [*WORDS] for x in given)
        assert all(turn[-1] == STOP for turn in trajectory.turns)
        assert (s.finish_reason == "failed") == (s.reward is None)
        if isinstance(s.need, Ended) and s.need.problem is not None and s.reward is not None:
            assert s.reward == 0.25 * len(given) == 0.25 * (len(lengths) - 1)
        elif s.finish_reason == "stop":
            assert len(lengths) == 3 == len(given) + 1
            assert s.state == lengths[:2]
            assert s.reward == 3.0 - sum(lengths) + 0.25 * 2
            assert s.turn_rewards == (0.25, 0.25)
    held = list(scheduler.book.buffered())
    kinds = (
        (scheduler.ledger.num_tokens, "generated", [s.num_sampled_tokens for s in held]),
        (scheduler.ledger.num_given, "given", [s.num_given_tokens for s in held]),
    )
    for counts, made, buffered in kinds:
        assert counts[made] == counts["trained"] + counts["dropped"] + sum(buffered)


def test_turns_in_rounds_whatever_a_round_may_sample() -> None:
    def take(budget: int | None) -> list[Group]:
        scheduler = make(Rounds(), driver=driver(), tokens_per_round=budget, max_response_tokens=LIMIT)
        groups, _ = run_on_clock(scheduler.take(0, 0))
        assert groups is not None
        check(scheduler, groups)
        return sorted(groups, key=lambda group: group.prompt.prompt_id)

    whole = take(None)
    assert {s.finish_reason for g in whole for s in g.samples} == {"stop"}
    assert take(1) == take(2) == whole


def test_a_slow_environment_is_no_broken_engine_and_holds_no_slot() -> None:
    engine = Timed()
    slow = driver(Turns(answer_s=60.0))
    scheduler = make(engine, driver=slow, overlap=True, max_staleness=9, max_response_tokens=LIMIT, groups_in_flight=4)

    async def run() -> list[Group]:
        taking = asyncio.create_task(scheduler.take(0, 0))
        await asyncio.sleep(10.0)
        waiting = [s for s in scheduler.book.buffered() if isinstance(s.need, NeedsEnvironment)]
        assert len(waiting) == 10 * 2 * 3, "as many as the staleness bound admits"
        assert engine.num_running == 0
        groups, _ = await taking
        assert groups is not None
        await scheduler.close()
        return groups

    check(scheduler, run_on_clock(run()))
    rounds = make(Rounds(), driver=driver(Turns(answer_s=60.0)), max_response_tokens=LIMIT)
    groups, stats = run_on_clock(rounds.take(0, 0))
    assert groups is not None
    assert stats.num_rounds == 3


def test_answers_are_progress_as_they_come_although_a_round_waits_for_all_of_them() -> None:
    """Otherwise questions that wait for a process would look like a hang."""

    class Queued(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            answer = await super().step(turn, state)
            await asyncio.sleep(60.0 * len(self.asked))  # one process, which they take in turn
            return answer

    scheduler = make(Rounds(), driver=driver(Queued()), max_response_tokens=LIMIT)

    async def run() -> list[int]:
        taking = asyncio.create_task(scheduler.take(0, 0))
        await asyncio.sleep(1.0)
        found = []
        for _ in range(6):
            found.append(scheduler.num_answers)
            await asyncio.sleep(60.0)
        taking.cancel()
        return found

    assert run_on_clock(run()) == [0, 1, 2, 3, 4, 5]


def test_overlap_hides_tools_of_half_a_second_and_rounds_wait_for_each_of_their_calls() -> None:
    class Together(Timed):
        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            return list(await asyncio.gather(*map(self.sample, requests)))

    class Waits(Turns):
        wait_s = 0.5

        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            await asyncio.sleep(self.wait_s if turn["number"] < 3 else 0.0)
            return await super().step(turn, state)

    def step_s(wait_s: float, **mode: Any) -> float:
        engine, environment, num_steps = Together(token_s=0.03), Waits(), 5
        environment.wait_s = wait_s
        options = {"prompts_per_step": 8, "samples_per_prompt": 8, "max_concurrent_requests": 64, **mode}
        scheduler = make(engine, driver=driver(environment), max_response_tokens=LIMIT, **options)

        async def run() -> float:
            clock, began_s = asyncio.get_running_loop(), 0.0
            for step in range(3 + num_steps):
                began_s = clock.time() if step == 3 else began_s  # until then, overlapped sampling fills its slots
                await scheduler.take(step, step)
                await asyncio.sleep(0.25)  # trains
                engine.version = step + 1
                scheduler.pool.expect(step + 1)
            took_s = clock.time() - began_s
            await scheduler.close()
            return took_s / num_steps

        return run_on_clock(run())

    overlap = {"overlap": True, "max_staleness": 8}
    assert step_s(0.5, **overlap) < 1.3 * step_s(0.0, **overlap)
    assert step_s(0.5) == pytest.approx(step_s(0.0) + 2 * 0.5)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_training_waits_for_a_hanging_environment_in_the_last_step_possible_until_its_deadline(
    max_staleness: int,
) -> None:
    class Hangs(Turns):
        deadline_s = 60.0
        num_hanging = 0

        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            if turn["answer"] == 0 and turn["number"] == 2 and not self.num_hanging:
                self.num_hanging += 1
                await asyncio.sleep(self.deadline_s)
                return Failed("no answer", "timeout")  # which keeps its sample
            return await super().step(turn, state)

    engine = Timed()
    scheduler = make(
        engine, driver=driver(Hangs()), overlap=True, max_staleness=max_staleness, max_response_tokens=LIMIT
    )
    scheduler.book.prompts = Numbered()
    steps: list[list[Group]] = []
    waits_s: list[float] = []

    async def run() -> None:
        for step in range(6):
            began_s = asyncio.get_running_loop().time()
            groups, _ = await scheduler.take(step, step)
            waits_s.append(asyncio.get_running_loop().time() - began_s)
            steps.append(groups or [])
            engine.version = step + 1
            scheduler.pool.expect(step + 1)
        await scheduler.close()

    run_on_clock(run())
    check(scheduler, [g for groups in steps for g in groups])
    assert [step for step, wait_s in enumerate(waits_s) if wait_s > 1.0] == [max_staleness]
    assert 59.0 < waits_s[max_staleness] < 60.0 + 1.0
    (late,) = (g for g in steps[max_staleness] if g.prompt.prompt_id == 0)
    assert [s.need.problem for s in late.samples if isinstance(s.need, Ended)].count("timeout") == 1
    assert not scheduler.ledger.dropped, "nothing was dropped as stale"


def test_a_turn_that_ends_while_sampling_closes_leaves_no_question_behind() -> None:
    class Deaf(Timed):
        async def abort(self, rid: str | None = None) -> None:
            """Let the request end by itself."""

    environment = Turns(answer_s=0.02)
    engine = Deaf(token_s=0.01)
    scheduler = make(
        engine, driver=driver(environment), overlap=True, max_staleness=9, groups_in_flight=2, max_response_tokens=LIMIT
    )

    async def run() -> None:
        await scheduler.take(0, 0)
        num_asked = len(environment.asked)
        await scheduler.close()
        assert len(environment.asked) > num_asked, "otherwise nothing is tested"
        await asyncio.sleep(0)
        assert {task for task in asyncio.all_tasks() if not task.cancelling()} == {asyncio.current_task()}

    run_on_clock(run())


@settings(max_examples=25, deadline=None)
@given(
    answer_s=st.sampled_from([0.0, 0.0003, 0.01]),
    failing=st.sampled_from([None, 5]),
    is_said=st.booleans(),
    budget=st.sampled_from([None, 2]),
    abort_tail=st.booleans(),
    overlap=st.booleans(),
)
def test_streams_lose_no_turn(
    answer_s: float, failing: int | None, is_said: bool, budget: int | None, abort_tail: bool, overlap: bool
) -> None:
    engine = Timed(token_s=0.001)
    scheduler = make(
        engine,
        driver=driver(Turns(answer_s, failing, is_said=is_said)),
        tokens_per_round=budget,
        abort_tail=abort_tail,
        overlap=overlap,
        max_staleness=4,
        groups_in_flight=5,
        max_response_tokens=LIMIT,
    )
    batches = run_on_clock(train(scheduler, [engine], num_steps=6, updates=1))
    check(scheduler, [g for batch in batches for g in batch])
    assert scheduler.ledger.dropped.keys() <= ({"failed"} if failing and is_said else set())


@pytest.mark.parametrize("failing", [None, 7])
def test_a_turn_is_resumed_in_the_middle_and_asked_again(failing: int | None) -> None:
    """A state taken in the middle of a turn, or while the environment is asked, leads to the same groups."""
    options: dict[str, Any] = {"tokens_per_round": 2, "groups_in_flight": 5, "max_response_tokens": LIMIT}

    def take(scheduler: Scheduler, steps: range, states: list[Any] | None = None) -> list[Group]:
        found: list[Group] = []
        for step in steps:
            groups, _ = run_on_clock(scheduler.take(step, 0))
            found += groups or []
            if states is not None:
                states.append(through_checkpoint(scheduler.state_dict()))
        return found

    turns: dict[str, Any] = {"failing": failing, "is_said": False}
    straight = take(make(Rounds(), driver=driver(Turns(**turns)), **options), range(4))
    problems = {s.need.problem for g in straight for s in g.samples if isinstance(s.need, Ended)}
    assert problems == ({None, "error"} if failing else {None})

    class Killed(BaseException):
        pass

    class Dies(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            answer = await super().step(turn, state)
            if len(self.asked) == 25:
                raise Killed
            return answer

    dies, states = Dies(**turns), []
    first = make(Rounds(), driver=driver(dies), **options)
    states.append(through_checkpoint(first.state_dict()))
    with pytest.raises(Killed):
        take(first, range(4), states)
    killed = through_checkpoint(first.state_dict())  # another task of the loop may save it at this point
    num_taken = len(states) - 1
    needs = {s["need"]["needs"] for group in killed["active"] for s in group["samples"]}
    assert {"tokens", "environment"} <= needs, "samples in the middle of a turn, and waiting ones"
    assert any(s["state"] for group in killed["active"] for s in group["samples"])
    again = Turns(**turns)
    second = make(Rounds(), driver=driver(again), **options)
    second.load_state_dict(killed)
    assert second.ledger.counts()["running"] == 0
    assert take(second, range(num_taken, 4)) == straight[2 * num_taken :]
    assert dies.asked[-1] in again.asked, "its answer was not booked"
    third = make(Rounds(), driver=driver(Turns(**turns)), **options)
    third.load_state_dict(states[-1])
    assert take(third, range(num_taken, 4)) == straight[2 * num_taken :], "a killed run resumes its last checkpoint"


def test_limits_of_turns_and_tokens_end_a_sample_with_what_it_has_earned() -> None:
    scheduler = make(Rounds(), driver=driver(max_turns=2), max_response_tokens=LIMIT)
    groups, _ = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    samples = [s for g in groups for s in g.samples]
    assert {s.finish_reason for s in samples} == {"turns"}
    assert all(s.reward == 0.25 * 2 for s in samples)
    assert all(isinstance(s.trajectories[0].segments[-1].origin, type(s.sampled_segments[0][0])) for s in samples)
    scheduler.ledger.check(scheduler.book.buffered())


@pytest.mark.parametrize("max_turns", [2, 9])
def test_a_sample_earns_all_that_its_environment_gave_whoever_ends_it(max_turns: int) -> None:
    class Gives(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            reward = {"right": 1.0, "short": 0.5} if turn["number"] == 2 else 0.25
            return End(reward) if turn["number"] == 2 < max_turns else Continue(None, token_ids=WORDS, reward=reward)

    one = driver(Gives(), max_turns=max_turns)
    groups, _ = run_on_clock(make(Rounds(), driver=one, max_response_tokens=LIMIT).take(0, 0))
    ends = {(s.finish_reason, s.reward, str(s.need.parts)) for g in groups or () for s in g.samples}  # type: ignore[union-attr]
    assert ends == {("stop" if max_turns == 9 else "turns", 1.75, "{'right': 1.0, 'short': 0.5}")}


@pytest.mark.parametrize("budget", [None, 2])
@pytest.mark.parametrize("limit", range(3, 12))
def test_a_turn_may_end_exactly_at_a_limit_and_no_request_is_for_0_tokens(limit: int, budget: int | None) -> None:
    """The whole turns decide: a sample that reaches the limit with a stop token has stopped if its environment ends it,
    and is over the length otherwise."""
    seen: list[TurnJson] = []

    class Ends(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            seen.append(turn)
            return await super().step(turn, state)

    engine = Rounds()
    found = driver(Ends(), max_response_tokens=limit)
    scheduler = make(engine, driver=found, max_response_tokens=limit, tokens_per_round=budget, samples_per_prompt=8)
    groups, _ = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    assert all(r.max_new_tokens > 0 for r in engine.requests)
    for s in (s for g in groups for s in g.samples):
        turns = s.trajectories[0].turns
        assert s.num_sampled_tokens <= limit
        if len(turns) == 3 and turns[-1][-1] == STOP:
            assert s.finish_reason == "stop"
        else:
            assert (s.finish_reason, s.num_sampled_tokens) == ("length", limit)
    assert {turn["end"] for turn in seen} <= {"stop", "length"}
    assert all((turn["token_ids"][-1] == STOP) == (turn["end"] == "stop") for turn in seen)


class LengthFirst(Rounds):
    """An engine that says "length" of a reply which uses up its budget, also if its last token is a stop token."""

    def answer(self, request: GenerateRequest) -> GenerateResult | EngineError:
        result = super().answer(request)
        assert isinstance(result, GenerateResult)
        is_full = len(result.token_ids) == request.max_new_tokens
        return replace(result, finish_reason="length") if is_full else result


def test_a_stop_token_ends_a_turn_whatever_a_server_says_first() -> None:
    def taken(engine: ScriptedEngine) -> list[Any]:
        groups, _ = run_on_clock(make(engine, driver=driver(), tokens_per_round=1).take(0, 0))
        assert groups is not None
        return [(s.finish_reason, s.trajectories[0].token_ids.tolist()) for g in groups for s in g.samples]

    assert taken(LengthFirst()) == taken(Rounds())


@pytest.mark.parametrize("budget", [None, 2])
def test_a_turn_limit_ends_a_turn_and_the_environment_sees_that(budget: int | None) -> None:
    options: dict[str, Any] = {"max_response_tokens": LIMIT, "tokens_per_round": budget, "max_turn_tokens": 4}
    groups, _ = run_on_clock(make(Rounds(), driver=driver(), **options).take(0, 0))
    assert groups is not None
    num_cut = 0
    for s in (s for g in groups for s in g.samples):
        turns = s.trajectories[0].turns
        num_cut += sum(turn[-1] != STOP for turn in turns)
        assert all(turn[-1] == STOP or len(turn) == 4 for turn in turns)
        assert s.finish_reason == ("stop" if turns[-1][-1] == STOP else "length")
    assert num_cut, "otherwise nothing is tested"


def test_an_answer_over_its_limit_is_cut_and_counted() -> None:
    one = driver(max_answer_tokens=1)
    groups, _ = run_on_clock(make(Rounds(), driver=one, max_response_tokens=LIMIT).take(0, 0))
    assert groups is not None
    samples = [s for g in groups for s in g.samples]
    assert all(s.num_given_tokens == 2 for s in samples)
    assert one.metrics()["environment/cut_answers"] == 2 * len(samples)


def test_samples_whose_environment_says_that_it_failed_have_no_reward() -> None:
    one = driver(Turns(failing=8))
    scheduler = make(Rounds(), driver=one, max_response_tokens=LIMIT, samples_per_prompt=12)
    groups, _ = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    check(scheduler, groups)
    failed = [s for g in groups for s in g.samples if s.reward is None]
    assert 0 < len(failed) < 24, "otherwise nothing is tested"
    assert scheduler.ledger.dropped == {"failed": len(failed)}
    assert failed[0].need == Ended("failed", None, "error", "no browser")


@pytest.mark.parametrize("advantage", ["grpo", "grpo_turns"])
@pytest.mark.parametrize("kind", ["error", "timeout", "raises", "not encoded"])
def test_a_failure_that_the_policy_may_have_caused_keeps_its_sample_with_what_it_has_earned(
    kind: Any, advantage: str
) -> None:
    """Otherwise the policy could drop its bad samples, by words on which the environment fails."""

    class Fails(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            if sum(turn["token_ids"]) % 8 or turn["number"] == 1:
                return await super().step(turn, state)
            if kind == "raises":
                raise OverflowError("no page")
            return Continue(None, text="no page") if kind == "not encoded" else Failed("no page", kind)

    def encode(answer: Continue, turn: TurnJson, max_tokens: int) -> tuple[Sequence[int], bool]:
        if answer.text is not None:
            raise ValueError(answer.text)
        return words(answer, turn, max_tokens)

    one = replace(driver(Fails()), encode=encode)
    scheduler = make(Rounds(), driver=one, max_response_tokens=LIMIT, samples_per_prompt=12)
    groups, _ = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    check(scheduler, groups)
    assert not scheduler.ledger.dropped
    kept = [s for g in groups for s in g.samples if isinstance(s.need, Ended) and s.need.problem]
    assert 0 < len(kept) < 24, "otherwise nothing is tested"
    problem = "timeout" if kind == "timeout" else "error"
    for s in kept:
        assert isinstance(s.need, Ended)
        reason = "OverflowError: no page" if kind == "raises" else "no page"
        assert (s.need.reason, s.need.problem, s.need.message) == ("stop", problem, reason)
        assert s.reward == 0.25 * len(s.turn_rewards) > 0
    config = Config.model_validate({"advantage": {"kind": advantage}, "environment": {"kind": "calculator"}})
    found = BatchBuilder(config).build(groups, one.metrics()).metrics
    assert found["environment/failed_samples"] == 0.0
    assert found[f"environment/{problem}s"] == len(kept)
    assert 0 < found["environment/failed_share"] < 0.5
    assert found["reward/judged"] == 24


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), which=st.integers(0, 29), whitens=st.booleans())
@pytest.mark.parametrize(
    "kind",
    [kind for kind in ESTIMATORS if not (ESTIMATORS[kind].needs_binary or ESTIMATORS[kind].reads_parts)],
)
def test_the_tenth_that_fails_changes_nothing_for_the_others(kind: str, seed: int, which: int, whitens: bool) -> None:
    """The others have the advantages, bit for bit, of groups that never had the failed samples: 1 in 30 turns fails."""

    def take(failing: int | None) -> list[Group]:
        environment = Turns(failing=failing, which=which)
        options: dict[str, Any] = {"max_response_tokens": LIMIT, "samples_per_prompt": 20}
        groups, _ = run_on_clock(make(Rounds(), driver=driver(environment), seed=seed, **options).take(0, 0))
        assert groups is not None
        return sorted(groups, key=lambda group: group.prompt.prompt_id)

    groups, whole = take(30), take(None)
    failed = {s.sample_id for g in groups for s in g.samples if s.reward is None}
    assume(failed)
    others = [replace(g, samples=tuple(s for s in g.samples if s.sample_id not in failed)) for g in whole]
    config = Config.model_validate({"advantage": {"kind": kind, "whiten_batch": whitens, "gamma": 0.9}})
    batch, alone = (BatchBuilder(config).build(one, {}) for one in (groups, others))
    for name in ("advantages_T", "mask_T", "token_ids_T", "rewards_S", "seq_lens_S", "behaviour_logprobs_T"):
        assert getattr(batch, name).equal(getattr(alone, name)), name
    assert batch.metrics == alone.metrics
    assert batch.num_sequences == 40 - len(failed)
    assert len(batch.advantages_T.unique()) > 3, "otherwise nothing is compared"


@pytest.mark.parametrize("num_left", [0, 1])
def test_a_group_with_fewer_than_two_rewards_is_replaced_and_counted(num_left: int) -> None:
    class Flaky(Turns):
        num_asked = 0

        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            self.num_asked += turn["answer"] == 0
            fails = turn["answer"] == 0 and self.num_asked > num_left and turn["number"] == 1
            return self._failure if fails else await super().step(turn, state)

    scheduler = make(Rounds(), driver=driver(Flaky()), max_response_tokens=LIMIT)
    scheduler.book.prompts = Numbered()
    groups, stats = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    assert [g.prompt.prompt_id for g in groups] == [1, 2]
    assert scheduler.ledger.dropped == {"failed": 3}
    assert stats.num_failed_groups == 1
    check(scheduler, groups)


@pytest.mark.parametrize("is_said", [False, True])
def test_an_environment_that_only_fails_ends_the_run_with_its_reason(is_said: bool) -> None:
    environment = Turns(failing=1, is_said=is_said)
    scheduler = make(Rounds(), driver=driver(environment), max_response_tokens=LIMIT)
    with pytest.raises(UserError, match=r"failed on all of the first 32 turns.*sample \d+\.\d, prompt \d+: no browser"):
        run_on_clock(train(scheduler, [], num_steps=9, updates=0))


@pytest.mark.parametrize("is_said", [False, True])
def test_an_environment_that_breaks_later_ends_the_run_too(is_said: bool) -> None:
    class Breaks(Turns):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            return self._failure if len(self.asked) > 20 else await super().step(turn, state)

    scheduler = make(Rounds(), driver=driver(Breaks(is_said=is_said)), max_response_tokens=LIMIT)
    said = r"failed on 1,000 turns in a row, .*: no browser"
    if is_said:
        said = r"40 groups in a row .* environment failed on 3 of its 3 samples: no browser"
    with pytest.raises(UserError, match=said):
        run_on_clock(train(scheduler, [], num_steps=200, updates=0))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda s: s, "the sample still waits for its environment"),
        (lambda s: replace(s, need=NeedsTokens()), "it asks for tokens after the . that trajectory 0 had before"),
        (lambda s: replace(s, need=NeedsTokens(3)), "it asks for tokens of trajectory 3 of 1"),
        (lambda s: replace(s, need=Ended("stop", None)), "it ended by 'stop' without a reward"),
        (lambda s: {"text": "1702;"}, r"it returned \{'text': '1702;'\}"),
        (lambda s: s.answered([20] * 3).extended([Segment.sampled(0, 0, [1], [-1.0])], None), "it changed . sampled"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_driver_that_returns_neither_tokens_nor_an_end_is_one_message(
    answer: Any, said: str, is_stream: bool
) -> None:
    class Wrong:
        by_group, deadline_s, first_need = False, 0.0, NeedsTokens()

        async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
            return [answer(s) for s in samples]

    scheduler = make((Timed if is_stream else Rounds)(), driver=Wrong(), abort_tail=is_stream)
    where = r"driver Wrong, sample (\d+)\.\d of prompt \1: neither tokens nor an end: "
    with pytest.raises(UserError, match=where + said):
        run_on_clock(scheduler.take(0, 0))
    scheduler.ledger.check(scheduler.book.buffered())


@pytest.mark.parametrize("is_said", [None, False, True])
def test_an_evaluation_asks_the_same_environments(is_said: bool | None) -> None:
    limits = {"rollout": {"max_response_tokens": LIMIT, "max_retries": 0}, "eval": {"samples_per_prompt": 2}}
    config = Config.model_validate(limits)
    prompts = [Prompt(i, (1, 2, i), "", "", "test") for i in range(4)]
    sets = [(config.unnamed_eval_set, prompts)]
    environment = Turns() if is_said is None else Turns(failing=5, is_said=is_said)
    asked = Evaluator(config, EnginePool([Rounds()]), sets, (STOP,), {"": driver(environment)})  # type: ignore[list-item]

    async def run() -> list[Sample]:
        await asked.sample(0)
        (samples,) = (await asked.judged()).values()
        return samples

    samples = asyncio.run(run())
    failed = [s for s in samples if isinstance(s.need, Ended) and s.need.problem]
    assert bool(failed) == (is_said is not None)
    assert [s.reward for s in failed] == [None if is_said else 0.25 * len(s.turn_rewards) for s in failed]
    assert len(samples) == 8
    samples = [s for s in samples if s not in failed]
    assert [s.reward for s in samples] == [3.5 - s.num_sampled_tokens for s in samples]
    assert all(len(s.trajectories[0].turns) == 3 for s in samples)


def test_metrics_say_what_samples_did_with_their_environment() -> None:
    config = Config.model_validate({"environment": {"kind": "calculator"}})
    one = driver(Turns(failing=6), max_turns=2)
    scheduler = make(Rounds(), driver=one, max_response_tokens=LIMIT, samples_per_prompt=12)
    groups, _ = run_on_clock(scheduler.take(0, 0))
    assert groups is not None
    batch = BatchBuilder(config).build(groups, one.metrics())
    found = {name.partition("/")[2]: value for name, value in batch.metrics.items() if name.startswith("environment/")}
    failed = [s.need for g in groups for s in g.samples if s.reward is None and isinstance(s.need, Ended)]
    assert 0 < len(failed) < 22, "otherwise nothing is tested"
    assert found["failed_samples"] == len(failed) <= found["errors"], "others fail in groups that are not done"
    assert (found["timeouts"], found["cut_answers"], found["turn_limit_share"]) == (0, 0, 1)
    assert (found["turns_mean"], found["answered_share"], found["given_tokens_mean"]) == (2, 1, 2)
    assert found["wait_s"] >= 0
    assert 0 < found["failed_share"] < 0.5
    assert one.recent_failure is not None
    assert one.recent_failure.end.message == "no browser"
    assert one.metrics()["environment/failed_share"] == 0.0, "none since then"
    assert one.metrics()["environment/errors"] == found["errors"]


def test_an_evaluation_whose_environment_fails_has_only_a_count() -> None:
    failed = Sample.of("eval-0.0", Prompt(0, (1,), "", "", "test"), need=Ended("failed", None, "error", "no browser"))
    assert eval_metrics([failed], "a") == {"eval/a/num_samples": 0.0}


# built-in environments


def said(step: Any, text: str, answer: Any, number: int = 1, end: str = "stop", **options: Any) -> Any:
    turn = {**turn_of(answer, number), "text": text, "end": end}
    return asyncio.run(step(turn, None, **options))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("37*46?", "1702;"),
        ("So 3 - 12 ?", "-9;"),
        ("999999999*999999999?", "999999998000000001;"),
        ("1234567890+1?", "234567891;"),
        ("?", "!"),
        ("2**9?", "!"),
        ("__import__('os')?", "!"),
    ],
)
def test_the_calculator_works_out_what_it_can_read(text: str, answer: str) -> None:
    assert said(calculator, text, "0") == {"text": answer}
    assert said(calculator, text, "0", is_broken=True) == {"text": "!"}


def test_the_calculator_rewards_the_last_number_of_a_turn_that_is_no_call() -> None:
    for text, reward in (("1702", 1.0), ("1702.", 1.0), ("it is 1702.\n", 1.0), ("17", 0.0), ("", 0.0), ("1702;", 0.0)):
        assert said(calculator, text, "1702") == {"reward": reward}, text
    assert said(calculator, "1702", 1702, number=3, cost=0.1) == {"reward": 0.8}
    assert said(calculator, "1702", "1702", end="length") == {"reward": 0.0}, "a turn that was cut has no result"
    assert said(calculator, "37*46?", "1702", end="length") == {"reward": 0.0}


def test_a_number_is_guessed_or_not() -> None:
    assert [said(guess, f"{n}?", "4") for n in (3, 5, 4)] == [{"text": ">"}, {"text": "<"}, {"reward": 1.0}]
    assert said(guess, "3?", 4, is_silent=True) == {"text": "!"}
    assert (
        said(guess, "3?", 4, number=3) == said(guess, "4", 4) == said(guess, "4?", 4, end="length") == {"reward": 0.0}
    )
    assert said(guess, "3?", 4, number=3, max_guesses=4) == {"text": ">"}


# worker processes


def turn_of(answer: Any, number: int = 1) -> TurnJson:
    return TurnJson(prompt="3+5=", answer=answer, source="t", number=number, text="?!", token_ids=[1, 2], end="stop")


def hurry_only_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no deadline of worker processes pass, except for questions that ask for a hang."""
    ask = Worker.ask

    async def ask_with(worker: Worker, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return await ask(worker, fields, limit_s if "hang" in str(fields["turn"]) else HANG_S)

    monkeypatch.setattr(Worker, "ask", ask_with)
    for name in ("START_TIMEOUT_S", "GRACE_S"):
        monkeypatch.setattr(worker_pool, name, HANG_S)


@pytest.mark.parametrize("name", ["step", "astep"])
def test_an_environment_in_processes_answers_or_fails_and_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry_only_hangs(monkeypatch)
    spec = EnvironmentSpec(f"tests.unit.step_functions:{name}", timeout_s=2.0, process_memory_bytes=4 << 30)
    environment = EnvironmentProcesses(spec, concurrency=2)
    failures = {
        "failed": "no browser",
        "raise": r"LookupError('?!') (step_functions.py, line ",
        "die": "its process died, twice: it ended with code 3",
        "hang": "no answer in 2 s" if name == "step" else "TimeoutError",
        "long": "at most 1000000 bytes of JSON, not 2000",
    }
    asked = ["count", "end", "wide", *failures, "neither"]

    async def run() -> list[StepAnswer]:
        return list(await asyncio.gather(*(environment.step(turn_of(a), {"count": 40}) for a in asked)))

    try:
        answers = asyncio.run(asyncio.wait_for(run(), HANG_S))
    finally:
        environment.close()
    assert answers[:2] == [Continue({"count": 42}, text="42;", reward=0.5), End({"right": 1.0, "short": -0.25})]
    assert answers[2] == Continue(None, text="\u65e5" * 330_000), "nearly as long as an answer may be"
    for answer, said in zip(answers[3:], [*failures.values(), "not str: 'neither'"], strict=True):
        assert isinstance(answer, Failed)
        assert said in answer.reason
    hang = answers[3 + list(failures).index("hang")]
    assert isinstance(hang, Failed)
    assert hang.problem == "timeout"


def test_a_step_function_that_does_not_fit_is_refused() -> None:
    spec = EnvironmentSpec("tests.unit.step_functions:no_step", timeout_s=2.0, process_memory_bytes=4 << 30)
    with pytest.raises(UserError, match=r"no_step\": its signature is .* does not fit turn, state and environment"):
        EnvironmentProcesses(spec)


def test_messages_are_an_answer_with_whatever_else_their_template_reads() -> None:
    messages = [{"role": "tool", "content": "1702", "tool_call_id": "abcd12345"}, {"role": "user", "content": ""}]
    assert as_answer({"messages": messages, "state": 1}) == Continue(1, messages=messages)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"state": {}},
        {"text": 1, "state": {}},
        {"text": "a", "token_ids": [1]},
        {"text": "a", "failed": "b"},
        {"token_ids": [True]},
        {"token_ids": [1.5]},
        {"messages": ["a"]},
        {"messages": []},
        {"messages": {"role": "user", "content": "a"}},
        {"messages": [{"role": "user", "content": ["a"]}]},
        {"messages": [{"role": "<|im_start|>", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}], "text": "a"},
        {"reward": None},
        {"reward": "1"},
        {"reward": float("nan")},
        {"reward": {"a": None}},
        {"reward": 10**400},
        {"reward": {"a": 1e308, "b": 1e308}},
        {"text": "a", "state": json.loads("[" * 100 + "]" * 100)},
        {"text": "a", "state": [float("inf")]},
        {"text": "\ud800"},
        {"text": "a", "state": {1, 2}},
        {"text": "a", "rewards": 1.0},
    ],
)
def test_an_answer_that_is_none_is_shown(value: Any) -> None:
    with pytest.raises(TypeError, match=r"step|reward"):
        as_answer(value)


class LastTurn:
    """An environment that leaves the second turn to the judge."""

    deadline_s = 3.0

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        return Continue(None, token_ids=WORDS) if turn["number"] == 1 else ForJudge()

    def close(self) -> None:
        pass


class Scorer:
    """A judge that fails on the prompts with an even number."""

    deadline_s = 4.0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.recent_failure: Verdict | None = None

    async def ask(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
        self.asked += [text for _, text in items]
        return [
            Verdict(Ended(reward=0.5, message="fine", parts={"words": 0.5}))
            if prompt.prompt_id % 2
            else Verdict(Ended(reward=0.0, problem="error", message="no judge"))
            for prompt, _ in items
        ]

    def metrics(self) -> dict[str, float]:
        self.recent_failure = Verdict(Ended(reward=0.0, problem="error", message="no judge"))
        return {"reward/judged": 2.0, "reward/failed_share": 0.5}

    def close(self) -> None:
        pass


def test_a_judge_scores_the_last_turn_and_its_failure_counts_as_a_judges() -> None:
    scorer = Scorer()
    one = driver(LastTurn(), answers=Answers(scorer))
    assert one.deadline_s == 7.0
    ends = []
    for number in (0, 1):
        sample = Sample.of(f"{number}.0", Prompt(number, (1, 2), "", "", "test"))
        for token in (3, 4 + number):
            sample = sample.extended([Segment.sampled(0, 0, [token, STOP], [-1.0, -1.0])], "stop")
            (sample,) = asyncio.run(one.advance([sample]))
        ends.append(sample.need)
    assert ends == [Ended("stop", 0.0, "error", "no judge"), Ended("stop", 0.5, None, "fine", {"words": 0.5})]
    assert scorer.asked == [str([4, STOP]), str([5, STOP])], "the words of the last turn"
    metrics = one.metrics()
    assert (metrics["reward/failed_share"], metrics["environment/failed_share"]) == (0.5, 0.0)
    assert one.recent_failure == scorer.recent_failure


class Raises(Scorer):
    """A judge that cannot be asked."""

    async def ask(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
        raise RecursionError("too deep")


def judged_after(number: int, one: StepDriver) -> Sample:
    """Return a sample whose environment was asked about its first turn."""
    sample = Sample.of(f"{number}.0", Prompt(number, (1, 2), "", "", "test"))
    sample = sample.extended([Segment.sampled(0, 0, [number, STOP], [-1.0, -1.0])], "stop")
    (sample,) = asyncio.run(one.advance([sample]))
    return sample


@pytest.mark.parametrize("answer", [Failed("no page"), ForJudge()])
def test_an_error_of_asking_the_judge_ends_no_run_unless_it_is_the_only_answer(
    answer: StepAnswer, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(LastTurn):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            return answer

    one = driver(Fails(), answers=Answers(Raises()))  # type: ignore[arg-type]
    for number in range(31):
        end = judged_after(number, one).need
        assert isinstance(end, Ended)
        assert (end.reason, end.reward, end.problem) == ("stop", 0.0, "error")
        assert end.message.endswith("; asking the judge: RecursionError('too deep')")
    assert caplog.text.count("Traceback") == 1
    with pytest.raises(UserError, match=r"all of the first 32 turns.*asking the judge: RecursionError"):
        judged_after(31, one)


@pytest.mark.parametrize("kind", ["timeout", "error", "raises"])
def test_a_judge_scores_turns_that_their_environment_fails_on(kind: Any) -> None:
    """Otherwise the policy, whose calls may have caused that, could drop its bad samples, and end the run."""

    class Fails(LastTurn):
        async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
            if kind == "raises":
                raise OverflowError("too large")
            return Failed("no page", kind)

    scorer = Scorer()
    one, ends = driver(Fails(), answers=Answers(scorer)), []  # type: ignore[arg-type]
    for number in range(40):
        ends.append(judged_after(number, one).need)
    problem, reason = ("error", "OverflowError: too large") if kind == "raises" else (kind, "no page")
    assert ends[0] == Ended("stop", 0.0, "error", "no judge"), "the judge's own failure is shown"
    assert ends[1] == Ended("stop", 0.5, problem, reason, {"words": 0.5})
    assert len(scorer.asked) == 40
    assert one.metrics()[f"environment/{problem}s"] == 40


def test_a_step_that_asks_for_a_judge_where_there_is_none_fails() -> None:
    assert as_answer({"judge": True}) == ForJudge()
    sample = Sample.of("0.0", Prompt(0, (1, 2), "", "", "test"))
    sample = sample.extended([Segment.sampled(0, 0, [3, STOP], [-1.0, -1.0])], "stop")
    one = driver(LastTurn())
    (sample,) = asyncio.run(one.advance([sample]))
    sample = sample.extended([Segment.sampled(0, 0, [4, STOP], [-1.0, -1.0])], "stop")
    (sample,) = asyncio.run(one.advance([sample]))
    assert isinstance(sample.need, Ended)
    assert (sample.need.reason, sample.need.reward, sample.need.problem) == ("stop", 0.0, "error")
    assert "only the judge of tools" in sample.need.message
