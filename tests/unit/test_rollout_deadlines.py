"""A wait may last as long as it shows progress, and without progress no longer than its deadline."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.dispatch import RolloutStats
from bapo_megatron.rollout.manager import InRunEvaluation, RolloutManager
from tests.distributed import HANG_S
from tests.unit.test_evaluate import evaluator
from tests.unit.test_scheduler import ScriptedEngine

SHORT_S = 0.05


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


class Progress:
    """A counter that counts up at each look, `num_steps` times."""

    def __init__(self, num_steps: int) -> None:
        self.num_looks = 0
        self.num_steps = num_steps

    def look(self) -> int:
        self.num_looks += 1
        return min(self.num_looks, self.num_steps)

    async def until_looked_at(self, num_looks: int) -> None:
        while self.num_looks < num_looks:
            await asyncio.sleep(0.01)


def test_progress_extends_the_deadline_and_its_end_ends_the_wait(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(10**6)
    loop.run(progress.until_looked_at(6), SHORT_S, "a slow one", lambda: (progress.look(),))
    assert progress.num_looks >= 6, "five deadlines have passed"

    begun, cancelled = threading.Event(), threading.Semaphore(0)
    wait = concurrent.futures.wait

    async def forever() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.release()

    def wait_from_its_start(futures: Any, timeout: float) -> Any:
        assert begun.wait(HANG_S)
        return wait(futures, timeout)

    monkeypatch.setattr(concurrent.futures, "wait", wait_from_its_start)
    progress = Progress(3)
    with pytest.raises(EngineError, match=r"waited 0.05 s for a hung one: no progress"):
        loop.run(forever(), SHORT_S, "a hung one", lambda: (progress.look(),))
    assert progress.num_looks == 4
    assert cancelled.acquire(timeout=HANG_S)
    begun.clear()
    with pytest.raises(EngineError, match=r"waited 0.05 s for a silent one: no answer"):
        loop.run(forever(), SHORT_S, "a silent one")
    assert cancelled.acquire(timeout=HANG_S)


def test_an_error_of_the_coroutine_is_its_own(loop: LoopThread) -> None:
    async def fail() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="of a socket"):
        loop.run(fail(), HANG_S)


def manager(loop: LoopThread, take: Any, **counts: Any) -> RolloutManager:
    """Return a manager that can only ask for a batch; its longest wait without progress is below a second."""
    quick = {"request_timeout_s": 2 * SHORT_S, "max_retries": 0, "samples_per_prompt": 1}
    config = Config.model_validate({"rollout": quick, "reward": {"timeout_s": SHORT_S / 2}})
    now = dict.fromkeys(("tokens", "judged", "fenced"), lambda: 0) | counts
    engines: Any = SimpleNamespace(loop=loop, pool=_Counts(num_fenced=now["fenced"], return_limit_s=lambda: SHORT_S))
    driver = SimpleNamespace(deadline_s=SHORT_S)
    ledger = SimpleNamespace(num_tokens=_Tokens(now["tokens"]))
    fixed = {"take": take, "driver": driver, "annotators": Annotators(), "ledger": ledger}
    scheduler: Any = _Counts(num_answers=now["judged"], **{name: lambda one=one: one for name, one in fixed.items()})
    unused: Any = None
    return RolloutManager(config, engines, unused, unused, unused, scheduler, unused, unused)


class _Counts:
    """An object whose attributes are computed by functions."""

    def __init__(self, **functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions[name]()


class _Tokens:
    def __init__(self, generated: Any) -> None:
        self._generated = generated

    def __getitem__(self, key: str) -> int:
        assert key == "generated"
        return self._generated()


@pytest.mark.parametrize("sign", ["tokens", "judged", "fenced"])
def test_a_batch_may_take_any_time_while_something_moves(loop: LoopThread, sign: str) -> None:
    progress = Progress(10**6)

    async def take(step: int, version: int) -> tuple[None, RolloutStats]:
        await progress.until_looked_at(5)
        return None, RolloutStats()

    assert manager(loop, take, **{sign: progress.look}).next_batch(0, 0) is None
    assert progress.num_looks >= 5


def test_a_batch_that_hangs_is_named(loop: LoopThread) -> None:
    async def hang(step: int, version: int) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(EngineError, match=r"waited 0\.2 s for the rollouts of step 3: no progress"):
        manager(loop, hang).next_batch(3, 0)


def test_an_evaluation_may_take_any_time_while_answers_come_in(loop: LoopThread) -> None:
    progress = Progress(10**6)

    async def sample(version: int) -> None:
        await progress.until_looked_at(5)
        raise EngineError("all were asked for")

    made = manager(loop, None)
    asked: Any = SimpleNamespace(sample=sample, deadline_s=SHORT_S, what="answers", progress=lambda: (progress.look(),))
    made.evaluation = InRunEvaluation(asked, answers=[])
    with pytest.raises(EngineError, match="all were asked for"):
        made.evaluate(0)


@pytest.mark.parametrize("sign", ["answers", "fenced"])
def test_answers_and_engines_given_up_are_progress_of_an_evaluation(sign: str) -> None:
    engine = ScriptedEngine()
    engine.failures = 9 if sign == "fenced" else 0
    asked = evaluator(engine)
    before = asked.progress()
    with contextlib.suppress(NoEngineLeftError):
        asyncio.run(asked.sample(0))
    after = asked.progress()
    assert [a - b for a, b in zip(after, before, strict=True)] == ([0, 1] if sign == "fenced" else [10, 0])
