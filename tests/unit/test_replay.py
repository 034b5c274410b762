"""Environments that exist: objects that are replayed, textarena's games, and one behind HTTP."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionError, web

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.environments import (
    Continue,
    End,
    EnvironmentSpec,
    Failed,
    StepAnswer,
    StepFunction,
    as_answer,
    build_environment,
)
from bapo_megatron.rewards.replay import seed_of
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from tests.hang import HANG_S
from tests.unit.step_functions import Game

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SEED = 11


def turn_of(text: str, answer: Any = SEED) -> dict[str, Any]:
    return {"prompt": "play", "answer": answer, "text": text}


def spec_of(name: str, **options: Any) -> EnvironmentSpec:
    kind = f"replay:tests.unit.step_functions:{name}"
    return EnvironmentSpec(kind, timeout_s=HANG_S, process_memory_bytes=4 << 30, options=options)


def environment(**options: Any) -> StepFunction:
    return build_environment(spec_of("Game", **options))


def ask(step: StepFunction, text: str, state: Any = None) -> StepAnswer:
    return as_answer(step({"turn": turn_of(text), "state": json.loads(json.dumps(state))}))


def play(texts: Sequence[str], **options: Any) -> list[StepAnswer]:
    """Play with an environment of its own for each turn, as if each process were killed."""
    answers: list[StepAnswer] = []
    for text in texts:
        state = answers[-1].state if answers and isinstance(answers[-1], Continue) else None
        answers.append(ask(environment(**options), text, state))
    return answers


@pytest.mark.parametrize("is_gym", [False, True])
def test_a_replayed_game_equals_a_live_one_whatever_is_played_between(is_gym: bool) -> None:
    live = Game(4, is_gym=is_gym)
    live.reset(seed=SEED)
    texts = ["a", "\x00ü\n", "", "b"]
    said = [live.step(text) for text in texts]
    assert len({one[0] for one in said}) == len(texts)
    answers = play(texts, most=4, is_gym=is_gym)
    for answer, one in zip(answers[:3], said, strict=False):
        assert isinstance(answer, Continue)
        assert (answer.text, answer.reward) == (one[0], 0.0)
    assert answers[3] == End(0.0), "the fourth is too late"
    assert play(texts, most=4, is_gym=is_gym) == answers, "the state too"


def test_the_end_carries_its_reward() -> None:
    live = Game()
    live.reset(seed=SEED)
    live.step("a")
    assert play(["a", str(live.rest % 10)])[1] == End(0.5)


def test_a_game_that_is_not_repeated_fails_its_sample() -> None:
    """It raises: what says that it has failed would drop the sample, and the policy may have chosen words for that."""
    with pytest.raises(ValueError, match=r"^turn 1, played again, was answered differently: "):
        play(["a", "b"], is_seeded=False)


@pytest.mark.parametrize("answer", [SEED, {"seed": SEED, "level": 2}])
def test_a_prompt_s_answer_may_be_its_seed(answer: Any) -> None:
    assert seed_of(turn_of("", answer)) == SEED


@pytest.mark.parametrize("answer", ["11", None, True, {"seed": "11"}, [SEED]])
def test_other_prompts_have_seeds_from_their_text(answer: Any) -> None:
    assert seed_of(turn_of("", answer) | {"prompt": "123456789"}) == 0xCBF43926, "the check value of CRC-32"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("NoStep", {}, "it makes an object of type NoStep, which has no step"),
        (
            "NoSeed",
            {},
            r"its objects' reset is \(\) -> None: got an unexpected keyword argument 'seed'",
        ),
        ("AsyncGame", {}, "the step of its objects is async"),
        ("no_game", {}, "making an object failed: OSError: no display"),
        ("Missing", {}, "has no Missing"),
        ("Game", {"level": 1}, "does not fit environment.options: got an unexpected keyword argument 'level'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=rf'kind="replay:tests\.unit\.step_functions:{name}": .*{problem}.* Expected: '):
        build_environment(spec_of(name, **options))


def test_a_worker_process_replays_and_names_the_place_of_a_failure() -> None:
    pool = EnvironmentProcesses(spec_of("Game"), concurrency=1)
    state = next(answer.state for answer in play(["a"]) if isinstance(answer, Continue))

    async def run() -> list[StepAnswer]:
        return [await pool.step(turn_of(text), state) for text in ("b", "crash")]  # type: ignore[arg-type]

    try:
        answered, failed = asyncio.run(run())
    finally:
        pool.close()
    assert answered == play(["a", "b"])[1]
    assert isinstance(failed, Failed)
    assert "LookupError('crash') (step_functions.py, line " in failed.reason


def test_a_result_of_another_form_fails_and_every_object_is_closed() -> None:
    num_closed = Game.num_closed
    step = build_environment(spec_of("OddGame"))
    assert Game.num_closed == num_closed + 1
    with pytest.raises(TypeError, match=r"step\(text\) returns \(observation, reward, done\) or .*, not 'a'"):
        step({"turn": turn_of("a"), "state": None})
    assert Game.num_closed == num_closed + 2


def test_an_environment_behind_http_is_tried_twice_and_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import http_step

    monkeypatch.setattr(http_step, "PAUSE_S", 0.0)
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = asked[-1]["turn"]["text"]
        if text == "lost" or (text == "unsteady" and len(asked) == 1):
            assert request.transport is not None
            request.transport.abort()
        if text == "broken":
            return web.Response(status=503, text="no room")
        return web.json_response({"text": text, "state": asked[-1]["state"]})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/step", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/step"
        try:
            assert await http_step.step(turn_of("unsteady"), [1], url) == {"text": "unsteady", "state": [1]}
            assert asked == [{"turn": turn_of("unsteady"), "state": [1]}] * 2
            with pytest.raises(ClientConnectionError):
                await http_step.step(turn_of("lost"), None, url)
            assert len(asked) == 4
            with pytest.raises(RuntimeError, match=r"/step answered 503: no room"):
                await http_step.step(turn_of("broken"), None, url)
            assert len(asked) == 5, "an answer is not asked for again"
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), HANG_S))


TEXTARENA = ("textarena==0.7.4", "chess", "joblib", "nltk", "python-dotenv", "websockets")  # the rest is here
GUESSES = """
import json, sys
from bapo_megatron.rewards.environments import Continue, EnvironmentSpec, as_answer, build_environment
spec = EnvironmentSpec("replay:text_game:Game", 1.0, 4 << 30, {"name": "GuessTheNumber-v0-raw"})
low, high, state, said = 1, 20, None, []
while low <= high:
    middle = (low + high) // 2
    turn = {"prompt": "", "answer": int(sys.argv[1]), "text": f"My guess is [{middle}]"}
    answer = as_answer(build_environment(spec)({"turn": turn, "state": state}))
    said.append(getattr(answer, "text", None))
    if not isinstance(answer, Continue):
        break
    low, high, state = (low, middle - 1, answer.state) if "lower" in said[-1] else (middle + 1, high, answer.state)
print(json.dumps([middle, answer.reward, said]))
"""


@pytest.mark.slow
def test_games_of_textarena_are_replayed(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *TEXTARENA)
    subprocess.run(pip, check=True, timeout=HANG_S)
    path = os.pathsep.join((str(tmp_path), str(EXAMPLES), *sys.path))
    secrets = set()
    for seed in range(4):
        command = (sys.executable, "-c", GUESSES, str(seed))
        run = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True, timeout=HANG_S
        )
        secret, reward, said = json.loads(run.stdout.splitlines()[-1])
        secrets.add(secret)
        assert reward == 1
        assert all(words in ("The target number is lower.", "The target number is higher.") for words in said[:-1])
    assert len(secrets) > 1
