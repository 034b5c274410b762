"""Hostile requests and calls while honest samples are trained: no run ends, no reward is forged, no token mislabelled.

    python -m tests.attacks.hostile_samples [--first 0] [--count 5000]

Half of the samples are honest. Programs of the others send requests drawn from seeds (hostile.py), or the policy says
such calls; programs send these back. The engine gives each token a log-prob that follows from all tokens before it, so
that a token with another label, log-prob or place than it was sampled at is seen. Prints one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.config.schema import Config, RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards.environments import EnvironmentSpec
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.rollout.turn_tokens import TurnTokens, turn_driver
from bapo_megatron.types import Given, Prompt, Sample, Sampled
from tests.attacks.hostile import SPECIAL, a_turn
from tests.hang import HANG_S
from tests.unit.test_agents import ADD, END, TOKENIZER, Agents
from tests.unit.test_scheduler import ScriptedEngine

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REQUESTS_PER_PROGRAM = 16
PROGRAM = """
import sys
sys.path.insert(0, ROOT)
from tests.attacks.hostile import Requests

def log(kind, status):
    with open(OUTCOMES, "a") as file:
        file.write(json.dumps([kind, status]) + "\\n")

def send(body, more):
    connection = http.client.HTTPConnection(ADDRESS.hostname, ADDRESS.port)
    own = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", ADDRESS.path + "/chat/completions", body, own | more)
    reply = connection.getresponse()
    return reply.status, reply.read()

def follow(message):
    return [message, *(tool(call, "3") for call in message.get("tool_calls", ())), user("So?")]

if "honest" in TASK["prompt"]:
    first = ask(FIRST, tools=[ADD])
    (call,) = first["tool_calls"]
    ask([*FIRST, first, tool(call, "3")], tools=[ADD])
    sys.exit()
requests, history = Requests(f"{SEED}/{TASK['seed']}"), FIRST
for number in range(NUM):
    kind, more, body = requests.next(history)
    log(kind, send(body, more)[0])
    if number % 3 == 0:
        status, reply = post({"messages": history, "tools": [ADD]})
        log("words of the policy", status)
        if status != 200:
            history = FIRST
            continue
        history = [*history, *follow(reply["choices"][0]["message"])]
        log("words of the policy", post({"messages": [user("Summary"), *history[2:]], "tools": [ADD]})[0])
if TASK["seed"] % 3 == 0:
    raise SystemExit("no idea")
if TASK["seed"] % 3 == 1:
    os.kill(os.getpid(), 9)
"""
"""A program, honest or hostile. What the policy says comes back in a history that the chat template writes again."""


class Engine(ScriptedEngine):
    """An engine of two policies. The honest one calls a tool, and then says "3" or "4"."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        super().__init__()
        self.num_hostile_turns = 0
        self._tokenizer = tokenizer
        self._seed = seed
        self._left: dict[int, list[int]] = {}  # of turns in progress, by the seed of their trajectory

    def answer(self, request: GenerateRequest) -> GenerateResult:
        ids = [*request.token_ids]
        left = self._left.get(request.seed) or self._turn(ids, request.seed)
        tokens, self._left[request.seed] = left[: request.max_new_tokens], left[request.max_new_tokens :]
        reason: Any = "stop" if tokens[-1] == self._tokenizer.eos_token_id else "length"
        spans = (VersionSpan(self.version, 0, len(tokens)),)
        logprobs = tuple(logprobs_of([*ids, *tokens])[len(ids) :])
        return GenerateResult(
            request.rid, np.array(tokens, np.int64), np.array(logprobs, np.float32), spans, reason, len(ids), 0
        )

    def _turn(self, before: Sequence[int], seed: int) -> list[int]:
        text, rng = self._tokenizer.decode(before), random.Random(f"{self._seed}/{seed}/{len(before)}")
        if "honest" in text:
            said = CALL if "tool_response" not in text else rng.choice("34")
        else:
            self.num_hostile_turns += 1
            said = a_turn(rng)
        end = self._tokenizer.eos_token_id
        ids = self._tokenizer.encode(said, add_special_tokens=False)
        return [*(ids[: ids.index(end)] if end in ids else ids), end]


def crc_of(token_ids: Sequence[int]) -> list[int]:
    """Return a number for each token that follows from it and from all before it."""
    found, crc = [], 0
    for token_id in token_ids:
        crc = zlib.crc32(token_id.to_bytes(4, "little"), crc)
        found.append(crc)
    return found


def logprobs_of(token_ids: Sequence[int]) -> list[float]:
    return [-0.001 - (crc % 4000) / 1000 for crc in crc_of(token_ids)]


def check_labels(sample: Sample, version: int) -> int:
    """Check all that is said about the tokens of a sample; return how many were sampled."""
    num_sampled = 0
    for trajectory in sample.trajectories:
        ids = [i for s in trajectory.segments for i in s.token_ids.tolist()]
        expected, place = np.array(logprobs_of(ids), np.float32), 0
        for segment in trajectory.segments:
            end = place + len(segment.token_ids)
            if isinstance(segment.origin, Sampled):
                assert segment.origin.version == version
                np.testing.assert_array_equal(segment.origin.behaviour_logprobs, expected[place:end])
                num_sampled += end - place
            place = end
        first = trajectory.segments[0].origin
        assert isinstance(first, Given)
        for left, right in pairwise(trajectory.segments):
            assert not (isinstance(left.origin, Sampled) and isinstance(right.origin, Sampled)), "one turn, one segment"
    return num_sampled


class Found:
    """What a campaign has seen."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.num = Counter[str]()

    def take(self, engine: Engine, sample: Sample, tokenizer: Any, honest: Sequence[str]) -> None:
        """Check a sample, and count it. `honest`: what an honest sample is given, from its prompt on."""
        num_sampled = check_labels(sample, engine.version)
        self.num["sampled tokens"] += num_sampled
        if "honest" not in sample.prompt.text:
            self.num["hostile samples"] += 1
            assert sample.reward == 0 or (sample.reward is None and not num_sampled), (sample.reward, sample.need)
            return
        self.num["honest samples"] += 1
        (trajectory,) = [t for t in sample.trajectories if t.num_sampled_tokens]
        call, said = (tokenizer.decode(turn, skip_special_tokens=True) for turn in trajectory.turns)
        assert (call, sample.reward) == (CALL, float(said == "3"))
        given = [tokenizer.decode(s.token_ids) for s in trajectory.segments if isinstance(s.origin, Given)]
        assert given == [*honest]

    def row(self, scheduler: Scheduler, errors: Sequence[str]) -> dict[str, Any]:
        assert not scheduler.ledger.dropped, scheduler.ledger.dropped
        assert not errors, f"the net has caught what should be an answer: {errors[0]}"
        return {**self.num, "outcomes": {kind: dict(sorted(of.items())) for kind, of in sorted(self.outcomes.items())}}


class Log(logging.Handler):
    """The errors that the log has of samples."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(logging.Formatter().format(record))


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    log = Log()
    logging.getLogger("bapo_megatron").addHandler(log)
    try:
        yield log.errors
    finally:
        logging.getLogger("bapo_megatron").removeHandler(log)


class Prompts:
    """Honest and hostile prompts in turn."""

    name, position = "both", 0

    def next(self) -> Prompt:
        self.position += 1
        text = f"{('honest', 'hostile')[self.position % 2]} 1+2?"
        ids = TOKENIZER.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
        return Prompt(self.position - 1, tuple(ids), text, "3", "test")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Question:
        return Question(f"{('honest', 'hostile')[index]} 1+2?", "3", "the question")


LIMITS = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 60_000}
RESULT = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def of_agents(seed: int, count: int) -> dict[str, Any]:
    """Let programs send at least `count` hostile requests; return what came of it."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder, logged() as errors:
        outcomes = Path(folder) / "outcomes.jsonl"
        engine = Engine(TOKENIZER, seed)
        values = {"ROOT": str(ROOT), "ADD": ADD, "OUTCOMES": str(outcomes), "NUM": REQUESTS_PER_PROGRAM, "SEED": seed}
        program = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + PROGRAM
        limits = {"max_turns": 50, "max_prompt_tokens": 9000, "timeout_s": HANG_S}
        agents = Agents(Path(folder), program, engine, judge="text", **limits, **LIMITS)
        agents.scheduler.book.prompts = Prompts()
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "honest 1+2?"}]
        first = TOKENIZER.apply_chat_template(asked, tools=[ADD], tokenize=False, add_generation_prompt=True)

        async def run() -> None:
            step = 0
            while not outcomes.exists() or len(outcomes.read_text().splitlines()) < count:
                for group in await agents.take(step):
                    for sample in group.samples:
                        found.take(engine, sample, TOKENIZER, [first, RESULT])
                step += 1
            found.num["steps"] = step

        agents.run(run())
        for kind, status in map(json.loads, outcomes.read_text().splitlines()):
            assert 200 <= status < 500, (kind, status)
            found.outcomes[kind][str(status)] += 1
        found.num["hostile requests"] = sum(of.total() for of in found.outcomes.values())
        found.num["hostile turns"] = engine.num_hostile_turns
        return found.row(agents.scheduler, errors)


def of_tools(seed: int, count: int) -> dict[str, Any]:
    """Let a policy say at least `count` hostile turns to tools; return what came of it."""
    found, module = Found(), "tests.unit.tool_functions"
    options = {"tools": ["calculator", *(f"{module}:{name}" for name in ("add", "search", "shout", "broken"))]}
    environment = {"kind": "tools", "options": options, "max_turns": 12, "max_answer_tokens": 300, "timeout_s": HANG_S}
    data = {"chat_template": True, "max_prompt_tokens": 9000}
    values = {"data": data, "environment": environment, "reward": {"kind": "text"}, "run": {"seed": seed}}
    config = Config.model_validate(values)
    engine, tokens = Engine(TOKENIZER, seed), TurnTokens.of(config, TOKENIZER, len(TOKENIZER))
    processes = EnvironmentProcesses(EnvironmentSpec.of(config), concurrency=1)
    driver = turn_driver(config, processes, tokens, LIMITS["max_response_tokens"], RewardScorer(config))
    prompts = PromptStream(config, TOKENIZER, Prompts())  # type: ignore[arg-type]
    scheduler = Scheduler(
        RolloutConfig(**LIMITS, startup_timeout_s=HANG_S),
        pool=EnginePool([engine]),  # type: ignore[list-item]
        prompts=prompts,
        driver=driver,
        stop_token_ids=(END,),
        seed=seed,
        updates_per_step=1,
        keep=lambda group: True,
        max_turn_tokens=None,
    )

    async def run() -> None:
        while engine.num_hostile_turns < count:
            groups, _ = await scheduler.take(found.num["steps"], 0)
            assert groups is not None
            scheduler.ledger.check(scheduler.book.buffered())
            for sample in (sample for group in groups for sample in group.samples):
                honest = [TOKENIZER.decode(sample.prompt.token_ids), RESULT]
                found.take(engine, sample, TOKENIZER, honest)
                reason = sample.finish_reason or "failed"
                if "hostile" in sample.prompt.text:
                    found.outcomes["how hostile samples end"][reason] += 1
            found.num["steps"] += 1

    with logged() as errors:
        try:
            asyncio.run(run())
            metrics = driver.metrics()
        finally:
            driver.close()
    for name in ("errors", "timeouts"):
        found.outcomes["failures of tools"][name] = int(metrics[f"environment/{name}"])
    found.num["hostile turns"] = engine.num_hostile_turns
    return found.row(scheduler, errors)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.attacks.hostile_samples")
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--count", type=int, default=5000, help="number of cases, half of them turns of the policy")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    half = options.count // 2
    print(json.dumps({"agents": of_agents(options.first, half), "tools": of_tools(options.first, half)}, indent=1))
    return 0


if __name__ == "__main__":
    assert SPECIAL[0] == TOKENIZER.eos_token
    sys.exit(main())
