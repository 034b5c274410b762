"""Evaluation inside a run: live engines answer every prompt completely, and nothing of it is booked."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout import manager
from bapo_megatron.rollout.drivers import JudgeOnce, TextJudge
from bapo_megatron.rollout.evaluate import Evaluator, eval_metrics
from bapo_megatron.rollout.manager import RolloutManager
from bapo_megatron.types import Ended, Prompt, Sample, Segment
from tests.hang import HANG_S
from tests.unit.test_scheduler import STOP, ScriptedEngine, verdict

PROMPTS = [Prompt(i, (1, 2, i % 7), "", "", "test") for i in range(5)]


class Judge:
    """A scorer and a tokenizer in one."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return ["text"] * len(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "text"

    def verdicts(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
        return [verdict(prompt.prompt_id == 0) for prompt, _ in items]


def evaluator(*engines: ScriptedEngine, judge: Judge | None = None, **settings: Any) -> Evaluator:
    config = Config.model_validate(
        {
            "eval": {"samples_per_prompt": 2, "temperature": 0.5, "top_k": 20},
            "rollout": {"max_response_tokens": 16, "tokens_per_round": 3, "max_retries": 0, "top_p": 0.9, **settings},
        }
    )

    sets = [(config.unnamed_eval_set, PROMPTS)]
    return Evaluator(config, EnginePool(engines), sets, (STOP,), {"": driver(judge)})  # type: ignore[arg-type]


def driver(judge: Judge | None = None) -> JudgeOnce:
    judge = judge or Judge()
    return JudgeOnce(TextJudge(judge, judge))  # type: ignore[arg-type]


async def sampled(asked: Evaluator, version: int) -> dict[str, list[Sample]]:
    await asked.sample(version)
    return await asked.judged()


def ask(asked: Evaluator, version: int) -> list[Sample]:
    """Return the samples of the only set."""
    (samples,) = asyncio.run(sampled(asked, version)).values()
    return samples


def test_every_response_is_whole_and_sampled_as_the_evaluation_says() -> None:
    engine = ScriptedEngine()
    engine.version = 3
    samples = ask(evaluator(engine), 3)
    assert len({t.sample_id for t in samples}) == 10
    assert all(t.finish_reason for t in samples)
    assert {(r.temperature, r.top_p, r.top_k) for r in engine.requests} == {(0.5, 1.0, 20)}
    assert len(engine.requests) == 10, "in one piece, whatever the budget of training"


def test_a_failing_engine_leaves_its_part_to_the_others_and_aborts_are_made_good() -> None:
    whole = ask(evaluator(ScriptedEngine()), 0)
    bad, chaotic = ScriptedEngine(url="http://bad"), ScriptedEngine(random.Random(1), url="http://chaotic")
    bad.failures = 9
    samples = ask(evaluator(bad, chaotic), 0)
    assert {t.sample_id: tuple(t.sampled_ids) for t in samples} == {t.sample_id: tuple(t.sampled_ids) for t in whole}


def test_no_engine_left_is_an_error() -> None:
    engine = ScriptedEngine()
    engine.failures = 9
    with pytest.raises(NoEngineLeftError, match="is left for the evaluation: http://scripted is fenced"):
        asyncio.run(evaluator(engine).sample(0))


def test_when_the_last_engine_is_back_the_evaluation_asks_for_a_push_and_goes_on_where_it_was(loop: LoopThread) -> None:
    class FailsOnce(ScriptedEngine):
        def __init__(self, url: str, call: int) -> None:
            super().__init__(url=url)
            self.calls_left = call

        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise EngineError(f"{self.url}: connection refused")
            return await super().generate_many(requests)

    whole = ask(evaluator(ScriptedEngine()), 0)
    first, second = FailsOnce("http://first", call=2), FailsOnce("http://second", call=1)
    asked = evaluator(first, second)
    made = rollouts(loop, asked)
    asked.pool.return_limit_s = 0.1
    with pytest.raises(EngineError, match=r"no rollout engine is left after 0\.1 s: http://second is fenced"):
        made.evaluate(0)
    asked.pool.return_limit_s = HANG_S
    watch = loop.submit(asked.pool.watch())
    assert made.evaluate(0) is None, "the second failed, then the first as it took over; one is back"
    watch.cancel()
    for engine in (first, second):
        asked.pool.admit(engine)  # type: ignore[arg-type]
    (samples,) = loop.run(sampled(asked, 0), HANG_S).values()
    assert {t.sample_id: tuple(t.sampled_ids) for t in samples} == {t.sample_id: tuple(t.sampled_ids) for t in whole}
    assert len(first.requests) + len(second.requests) == 10, "what was answered is not asked again"
    assert (made.evaluate(0) or {})["eval/num_samples"] == 10
    assert len(first.requests) + len(second.requests) == 20, "a new evaluation starts over"


SETS = {
    "short": {"name": "short", "samples_per_prompt": 2, "temperature": 0.5, "max_response_tokens": 4},
    "many": {"name": "many", "samples_per_prompt": 3},
}


def evaluator_of_sets(*engines: ScriptedEngine, names: Sequence[str] = tuple(SETS)) -> Evaluator:
    rollout = {"max_response_tokens": 16, "max_retries": 0}
    config = Config.model_validate({"eval": {"sets": tuple(SETS[name] for name in names)}, "rollout": rollout})
    prompts = {"short": PROMPTS, "many": PROMPTS[:2]}
    sets = [(one, prompts[one.name]) for one in config.eval.sets]
    drivers = {name: driver() for name in names}
    return Evaluator(config, EnginePool(engines), sets, (STOP,), drivers)  # type: ignore[arg-type]


def test_sets_are_asked_together_each_with_its_own_settings() -> None:
    engine = ScriptedEngine()
    samples = asyncio.run(sampled(evaluator_of_sets(engine), 0))
    assert {name: len(of_set) for name, of_set in samples.items()} == {"short": 10, "many": 6}
    assert Counter((r.temperature, r.max_new_tokens) for r in engine.requests) == {(0.5, 4): 10, (1.0, 16): 6}
    assert max(t.num_sampled_tokens for t in samples["short"]) <= 4
    assert len({t.sample_id for of_set in samples.values() for t in of_set}) == 16
    (alone,) = asyncio.run(sampled(evaluator_of_sets(ScriptedEngine(), names=["many"]), 0)).values()
    assert [tuple(t.sampled_ids) for t in alone] == [tuple(t.sampled_ids) for t in samples["many"]], (
        "whatever other sets there are"
    )


def test_an_engine_lost_in_the_middle_costs_no_set_its_answers(loop: LoopThread) -> None:
    class Loses(ScriptedEngine):
        """An engine that answers the first call, and is lost in the second."""

        num_calls = 0

        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise EngineError(f"{self.url}: connection refused")
            return await super().generate_many(requests)

    whole = asyncio.run(sampled(evaluator_of_sets(ScriptedEngine()), 0))
    engine = Loses()
    asked = evaluator_of_sets(engine)
    with pytest.raises(NoEngineLeftError):
        loop.run(asked.sample(0), HANG_S)
    num_answered = len(engine.requests)
    assert num_answered in (10, 6), "one set's call was answered"
    asked.pool.admit(engine)  # type: ignore[arg-type]
    samples = loop.run(sampled(asked, 0), HANG_S)
    assert len(engine.requests) == 16, "what was answered is not asked again"
    for name, of_set in samples.items():
        assert [tuple(t.sampled_ids) for t in of_set] == [tuple(t.sampled_ids) for t in whole[name]]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def rollouts(loop: LoopThread, asked: Evaluator) -> RolloutManager:
    engines: Any = SimpleNamespace(loop=loop, pool=asked.pool)
    unused: Any = None
    evaluation = manager.InRunEvaluation(asked, [])
    return RolloutManager(Config(), engines, unused, unused, unused, unused, unused, evaluation)


class Deadlines:
    """The deadlines under which a loop is running something, and all deadlines so far."""

    def __init__(self, loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: list[float] = []
        self.seen: list[float] = []
        run = loop.run

        def watched(coroutine: Any, timeout_s: float, *args: Any) -> Any:
            self.now.append(timeout_s)
            self.seen.append(timeout_s)
            try:
                return run(coroutine, timeout_s, *args)
            finally:
                self.now.pop()

        monkeypatch.setattr(loop, "run", watched)


def test_judging_has_a_deadline_of_its_own(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(loop, monkeypatch)

    class Unhurried(Judge):
        def verdicts(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
            assert deadlines.now == []
            return super().verdicts(items)

    asked = evaluator(ScriptedEngine(), judge=Unhurried(), request_timeout_s=400)
    metrics = rollouts(loop, asked).evaluate(0) or {}
    assert (metrics["eval/reward"], metrics["eval/num_samples"]) == (0.2, 10.0)
    assert deadlines.seen == [asked.deadline_s] == [800]


class Hanging(ScriptedEngine):
    async def generate_many(self, requests: Any) -> Any:
        await asyncio.Event().wait()


def test_engines_that_hang_are_named_with_the_real_deadline(loop: LoopThread) -> None:
    message = (
        r"waited 1 s for the engines' 10 responses to 5 problems \(deadline: 1 s, rollout.request_timeout_s = 0.5 for "
        r"each of rollout.max_retries \+ 2 tries\): no progress"
    )
    with pytest.raises(EngineError, match=message):
        rollouts(loop, evaluator(Hanging(), request_timeout_s=0.5)).evaluate(0)


def test_metrics_by_hand() -> None:
    def answer(prompt: int, index: int, num_tokens: int, reason: Any, reward: float | None = 0.0) -> Sample:
        segment = Segment.sampled(0, 0, (1,) * num_tokens, (-0.5,) * num_tokens)
        return Sample.of(f"{prompt}.{index}", PROMPTS[prompt], (segment,), Ended(reason, reward))

    samples = [answer(0, 0, 2, "stop", 1.0), answer(0, 1, 4, "length"), answer(1, 0, 6, "stop")]
    samples += [answer(1, 1, 8, "stop"), answer(1, 2, 9, "failed", None)]
    assert eval_metrics(samples) == {
        "eval/reward": 0.25,
        "eval/reward_stderr": pytest.approx(math.sqrt(2 * 0.25**2) / math.sqrt(2)),
        "eval/best_of_group": 0.5,
        "eval/response_tokens_mean": 5.0,
        "eval/truncated_share": 0.25,
        "eval/num_samples": 4.0,
    }


def test_each_set_has_its_judge_and_its_metrics(loop: LoopThread) -> None:
    engine = ScriptedEngine()
    asked = evaluator_of_sets(engine)
    made = rollouts(loop, asked)
    metrics = made.evaluate(0) or {}
    assert {key.split("/")[1] for key in metrics} == set(SETS)
    assert (metrics["eval/short/reward"], metrics["eval/many/reward"]) == (0.2, 0.5), "one of five prompts, one of two"
    assert metrics["eval/many/num_samples"] == 6
