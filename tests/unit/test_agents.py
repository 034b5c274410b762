"""Agent programs at their endpoint: branches, retries, limits and failures; each sampled token is trained once."""

import asyncio
import copy
import json
import os
import re
import select
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.key import KEY_VARIABLE
from bapo_megatron.errors import UserError
from bapo_megatron.preflight.checks.environment import check_environment
from bapo_megatron.preflight.checks.idle import idle_settings
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.resolved import resolve
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.worker_pool import WorkersError
from bapo_megatron.rollout.agent_endpoint import MODEL, Asked, Endpoint, Inbox, Reply
from bapo_megatron.rollout.agents import AgentDriver, AgentPrograms, Session, inherited
from bapo_megatron.rollout.turn_tokens import TurnTokens, environment_of, turn_driver
from bapo_megatron.types import Ended, Given, Group, NeedsEnvironment, Prompt, Sample, Segment
from tests.hang import HANG_S
from tests.states import through_checkpoint
from tests.unit.test_continuation import tokenizer_of
from tests.unit.test_scheduler import CountingPrompts, ScriptedEngine, make

T = TypeVar("T")
TOKENIZER = copy.deepcopy(tokenizer_of("qwen3"))
TOKENIZER.chat_template = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TOKENIZER.chat_template
)
END = TOKENIZER.eos_token_id
LIMITS = {"max_response_tokens": 400, "prompts_per_step": 1, "samples_per_prompt": 2}
PLAIN = """
import http.client, json, os, sys, urllib.parse
TASK = json.loads(os.environ["BAPO_TASK"])
ADDRESS = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def connect(body, headers={}, key=os.environ["OPENAI_API_KEY"], path="/chat/completions"):
    connection = http.client.HTTPConnection(ADDRESS.hostname, ADDRESS.port)
    own = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = None if body is None else json.dumps({"model": os.environ["OPENAI_MODEL"]} | body)
    connection.request("GET" if body is None else "POST", ADDRESS.path + path, data, own | headers)
    return connection

def post(body, **options):
    reply = connect(body, **options).getresponse()
    return reply.status, json.loads(reply.read())

def ask(messages, **fields):
    status, reply = post({"messages": messages} | fields)
    assert status == 200, reply
    return reply["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def tool(call, text):
    return {"role": "tool", "tool_call_id": call["id"], "content": text}

def report(**value):
    os.write(int(os.environ["BAPO_REWARD_FD"]), json.dumps(value).encode())

FIRST = [{"role": "system", "content": "Be brief."}, user(TASK["prompt"])]
"""
"""What programs without a client of OpenAI's begin with: `ask` returns a message, `post` a status and a body, and
`report` writes a reward where a program without a judge must."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = 'So.\n<tool_call>\n{"name": "add",  "arguments": {"a": 1, "b": {"c": 2}}}\n</tool_call>'


def offered(parameters: Any, key: str | None = None, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {key: parameters} if key else parameters}}


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}, result]


class Says(ScriptedEngine):
    """An engine that says the same in each turn, with a number of the request at its end: no two turns are equal."""

    def __init__(self, says: str = "<think>\nhm\n</think>\n\nWell, ") -> None:
        super().__init__()
        self.says = says
        self.num_said = 0
        self._left: dict[int, list[int]] = {}  # of turns in progress, by the seed of their trajectory

    def answer(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        left = self._left.get(request.seed) or self.words()
        tokens, self._left[request.seed] = left[: request.max_new_tokens], left[request.max_new_tokens :]
        reason: Any = "stop" if tokens[-1] == END else "length"
        logprobs = tuple(-0.5 for _ in tokens)
        spans = (VersionSpan(self.version, 0, len(tokens)),)
        return GenerateResult(
            request.rid,
            np.array(tokens, np.int64),
            np.array(logprobs, np.float32),
            spans,
            reason,
            len(request.token_ids),
            0,
        )

    async def abort(self, rid: str | None = None) -> None:
        """Let requests end by themselves: they do so soon."""

    def words(self) -> list[int]:
        self.num_said += 1
        words = self.says.replace("1", str(self.num_said)) if "1" in self.says else f"{self.says}{self.num_said}."
        return [*TOKENIZER.encode(words, add_special_tokens=False), END]


class Questions(CountingPrompts):
    def next(self) -> Prompt:
        self.position += 1
        ids = TOKENIZER.apply_chat_template([{"role": "user", "content": "3+4?"}], return_dict=False)
        return Prompt(self.position - 1, tuple(ids), "3+4?", "3", "test")


class Agents:
    """The scheduler of a program's samples, and what it has trained."""

    def __init__(self, folder: Path, program: str, engine: ScriptedEngine | None = None, **settings: Any) -> None:
        path = folder / "agent.py"
        path.write_text(PLAIN + textwrap.dedent(program))
        limits = {name: settings.pop(name) for name in tuple(settings) if name in ("max_turns", "timeout_s")}
        reward = {"kind": settings.pop("judge")} if "judge" in settings else {}
        command = settings.pop("command", [sys.executable, "-I", "-S", str(path)])
        environment = {"kind": "agent", "options": {"command": command}, "timeout_s": HANG_S, **limits}
        data = {"chat_template": True, "source": "jsonl", "max_prompt_tokens": settings.pop("max_prompt_tokens", 400)}
        self.config = Config.model_validate(
            {"environment": environment, "data": data, "reward": reward, "rollout": LIMITS | settings}
        )
        self.engine = engine or Says()
        self.programs = environment_of(self.config)
        assert isinstance(self.programs, AgentPrograms)
        tokens = TurnTokens.of(self.config, TOKENIZER, len(TOKENIZER))
        scorer = RewardScorer(self.config) if self.config.has_judge else None
        self.driver = turn_driver(self.config, self.programs, tokens, self.config.rollout.max_response_tokens, scorer)
        assert isinstance(self.driver, AgentDriver)
        self.scheduler = make(self.engine, driver=self.driver, stop=END, **(LIMITS | settings))
        self.scheduler.book.prompts = Questions()

    async def take(self, step: int = 0) -> list[Group]:
        groups, _ = await self.scheduler.take(step, 0)
        assert groups is not None
        self.scheduler.ledger.check(self.scheduler.book.buffered())
        return groups

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it as a run does, on the event loop of another thread; then end all programs."""
        loop = LoopThread()
        try:
            return loop.run(work, HANG_S)
        finally:
            self.driver.close()
            loop.close()

    def samples(self) -> list[Sample]:
        """Return the samples of the first step; check that each token that was sampled is trained once."""
        samples = [s for group in self.run(self.take()) for s in group.samples]
        check_trained_once(samples)
        return samples


def check_trained_once(samples: Sequence[Sample]) -> None:
    """Each turn ends with words of its own: the same words are sampled in one trajectory, and given in all others."""
    for sample in samples:
        turns = [tuple(turn.tolist()) for t in sample.trajectories for turn in t.turns]
        assert len({*turns}) == len(turns)
        for t in sample.trajectories[1:]:
            shared = [tuple(s.token_ids.tolist()) for s in t.segments if s.origin == Given("trajectory")]
            assert {*shared} <= {*turns}, "a branch has the turns of others as they were sampled"


def said(sample: Sample) -> list[list[str]]:
    """Return who wrote what in each trajectory that has a turn."""
    return [[TOKENIZER.decode(s.token_ids) for s in t.segments] for t in sample.trajectories if t.num_sampled_tokens]


def test_turns_continue_the_stored_tokens_whatever_comes_back_of_a_thought(tmp_path: Path) -> None:
    program = """
        first = ask(FIRST)
        assert first["reasoning_content"] == "hm", first
        assert first["content"].startswith("Well, "), first
        first.pop("reasoning_content")
        second = ask([*FIRST, first, user("Sure?")])
        parts = [{"type": "text", "text": "Really"}, {"type": "text", "text": " sure?"}]
        third = ask([*FIRST, first, user("Sure?"), second, user("Really sure?")])
        fourth = ask(
            [*FIRST, first, user([{"type": "text", "text": "Sure?"}]), second, user(parts), third, user("So?")]
        )
        print("progress")
        report(reward={"turns": 4.0, "brief": 0.5})
        """
    for sample in Agents(tmp_path, program).samples():
        assert isinstance(sample.need, Ended)
        assert (sample.need.reason, sample.reward, dict(sample.need.parts)) == ("stop", 4.5, {"turns": 4, "brief": 0.5})
        (texts,) = said(sample)
        assert texts[0] == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert all(text.startswith("<think>\nhm\n</think>\n\nWell, ") for text in texts[1::2]), "thoughts stay"
        asked = ("Sure?", "Really sure?", "So?")
        assert texts[2::2] == [f"\n<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in asked]


def test_arguments_are_compared_as_json_and_ids_of_calls_do_not_matter(tmp_path: Path) -> None:
    program = f"""
        ADD = {ADD!r}
        first = ask(FIRST, tools=[ADD])
        (call,) = first["tool_calls"]
        assert first["content"] == "So.", first
        assert json.loads(call["function"]["arguments"])["b"] == {{"c": 2}}, call
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=3)
        call["id"] = "mine"
        second = ask([*FIRST, first, tool(call, "3<|im_end|>")], tools=[ADD])
        other = ask([*FIRST, first, tool(call, "3<|im_end|>")], tool_choice="none")
        assert "tool_calls" not in other
        assert other["content"].startswith("So."), other
        report(reward=1)
        """
    for sample in Agents(tmp_path, program, Says(CALL)).samples():
        with_tools, without = said(sample)
        assert [len(with_tools), len(without)] == [4, 2], "other tools make another conversation"
        assert '"name": "add"' in with_tools[0]
        assert '{"name": "add",  "arguments"' in with_tools[1], "as it was sampled"
        assert with_tools[2].endswith(
            "\n<|im_start|>user\n<tool_response>\n3<|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        answer = sample.trajectories[1].segments[2]
        assert answer.token_ids.tolist().count(END) == 1, "what a tool says forges no turn"
        assert "Add two numbers" not in without[0]
        assert sample.reward == 1


def test_a_call_that_cannot_be_read_stays_text(tmp_path: Path) -> None:
    program = f"""
        first = ask(FIRST, tools=[{ADD!r}])
        assert first["content"].startswith('<tool_call>{{"name"'), first
        assert "tool_calls" not in first
        report(reward=1)
        """
    samples = Agents(tmp_path, program, Says('<tool_call>{"name": </tool_call>')).samples()
    assert [s.reward for s in samples] == [1, 1]


def test_a_rewritten_history_branches_where_it_was_changed(tmp_path: Path) -> None:
    program = """
        first = ask(FIRST)
        second = ask([*FIRST, first, user("a")])
        ask([*FIRST, first, user("b")])
        ask([*FIRST, first, user("a"), second, user("c")])
        ask(FIRST)
        ask([*FIRST, first, user("a"), {"role": "assistant", "content": "I said no."}, user("c")])
        ask([user("Summary"), second, user("c")])
        report(reward=1)
        """
    for sample in Agents(tmp_path, program, max_turns=9).samples():
        texts = said(sample)
        assert len(texts) == 5
        first, second = texts[0][1], texts[0][3]
        assert [len(one) for one in texts] == [6, 4, 2, 2, 2]
        assert texts[1][:2] == [texts[0][0], first]
        assert sample.trajectories[2].segments[1].origin == Given("trajectory")
        assert texts[2][0] == texts[0][0]
        assert "I said no." in texts[3][0]
        assert "Well, " in texts[4][0], "context, rendered by the template"
        assert second not in texts[4][0], "which drops thoughts"
        assert [t.num_shared_tokens > 0 for t in sample.trajectories[1:]] == [False, True, False, False, False]


def test_a_repeated_request_gets_the_turn_that_it_asked_for(tmp_path: Path) -> None:
    program = """
        again = {"x-stainless-retry-count": "1"}
        body = {"messages": FIRST}
        first = post(body)
        assert post(body, headers=again)[1]["choices"] == first[1]["choices"]
        history = {"messages": [*FIRST, first[1]["choices"][0]["message"], user("So?")]}
        found = [post(history), post(history, headers=again)]
        assert found[0][1]["choices"] == found[1][1]["choices"]
        report(reward=1)
        """
    for sample in Agents(tmp_path, program).samples():
        (texts,) = said(sample)
        assert len(texts) == 4, "two turns"
        assert sample.reward == 1


def test_a_request_that_lost_its_connection_is_joined_by_the_same_one() -> None:
    async def run() -> None:
        inbox, asked = Inbox(), Asked(({"role": "user", "content": "3+4?"},))
        first = inbox.put(asked, is_repeated=False)
        first.num_listening = 1
        assert inbox.put(asked, is_repeated=False) is not first, "a parallel request is one of its own"
        assert inbox.take() is first
        assert inbox.take() is None, "nobody waits for the other one"
        first.num_listening = 0
        assert inbox.put(asked, is_repeated=False) is first
        first.reply.set_result(Reply({"role": "assistant", "content": "7"}, "", "stop", 5, 1))
        assert inbox.put(asked, is_repeated=False) is first, "its turn waits for somebody"
        first.is_delivered = True
        assert inbox.put(asked, is_repeated=True) is first
        assert inbox.put(asked, is_repeated=False) is not first

    asyncio.run(run())


def test_a_client_that_leaves_does_not_wait_any_more() -> None:
    class Connection:
        def __init__(self, inbox: Inbox) -> None:
            self.headers = {"Authorization": f"Bearer {inbox.key}"}

        async def read(self) -> bytes:
            return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "3+4?"}]}).encode()

    async def run() -> None:
        endpoint = Endpoint()
        inbox = endpoint.open()
        serving = asyncio.create_task(endpoint._chat(Connection(inbox)))  # type: ignore[arg-type]
        await inbox.changed.wait()
        request = inbox.take()
        assert request is not None
        assert request.num_listening == 1
        serving.cancel()  # as aiohttp does once the connection is lost
        await asyncio.wait([serving])
        assert request.num_listening == 0
        assert not request.reply.cancelled(), "its turn goes to whoever asks for it again"
        endpoint.shut(inbox)
        assert request.reply.cancelled()

    asyncio.run(run())


def test_parallel_requests_are_turns_of_their_own(tmp_path: Path) -> None:
    program = """
        same = [connect({"messages": FIRST}) for _ in range(2)]
        other = connect({"messages": [user("other")]})
        replies = [json.loads(one.getresponse().read())["choices"][0]["message"] for one in (*same, other)]
        assert replies[0] != replies[1]
        histories = [[*FIRST, reply, user("So?")] for reply in replies[:2]]
        asked = [connect({"messages": history}) for history in histories]
        print([one.getresponse().read() for one in asked])
        report(reward=1)
        """
    for sample in Agents(tmp_path, program, max_turns=5).samples():
        texts = said(sample)
        assert sorted(len(one) for one in texts) == [2, 4, 4]
        assert len({one[0] for one in texts if len(one) == 4}) == 1


def test_a_stream_has_the_same_turn(tmp_path: Path) -> None:
    program = f"""
        body = {{"messages": FIRST, "tools": [{ADD!r}]}}
        stream = {{"stream": True, "stream_options": {{"include_usage": True}}}}
        events = connect(body | stream).getresponse().read().decode().split("\\n\\n")
        assert events[-2:] == ["data: [DONE]", ""], events
        whole, end, usage = (json.loads(event.removeprefix("data: ")) for event in events[:-2])
        again = post(body, headers={{"x-stainless-retry-count": "2"}})[1]
        call = whole["choices"][0]["delta"]["tool_calls"][0]
        assert call == {{"index": 0, **again["choices"][0]["message"]["tool_calls"][0]}}
        assert end["choices"][0]["finish_reason"] == again["choices"][0]["finish_reason"] == "tool_calls"
        assert usage["usage"] == again["usage"]
        assert usage["usage"]["total_tokens"] > usage["usage"]["completion_tokens"] > 9
        report(reward=1)
        """
    for sample in Agents(tmp_path, program, Says(CALL)).samples():
        assert len(said(sample)) == 1
        assert sample.reward == 1


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"stop": ["x"]}, "stop is not supported"),
        ({"n": 2}, "n: must be 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format.type: must be 'text'"),
        ({"tool_choice": "required"}, "tool_choice: must be 'auto' or 'none'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages: the last one is the assistant's"),
    ],
)
def test_what_the_endpoint_cannot_do_is_refused_by_name(tmp_path: Path, field: dict[str, Any], named: str) -> None:
    program = f"""
        status, reply = post({{"messages": FIRST}} | {field!r})
        assert status == 400, reply
        assert {named!r} in reply["error"]["message"], reply
        ask(FIRST, temperature=0.0, top_p=0.5, seed=3, parallel_tool_calls=False, n=1)
        report(reward=1)
        """
    samples = Agents(tmp_path, program, samples_per_prompt=1).samples()
    assert [s.reward for s in samples] == [1]


def test_odd_json_in_a_request_is_refused_by_name(tmp_path: Path) -> None:
    nested: Any = json.loads("[" * 100 + "]" * 100)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [offered({"properties": None})]}, "properties must be an object of JSON schemas"),
        ({"tools": [offered({"properties": []})]}, "properties must be an object of JSON schemas"),
        ({"tools": [offered({"properties": {"x": None}})]}, "properties must be an object of JSON schemas"),
        ({"tools": [offered({"a": nested})]}, "it is nested more than 100 levels deep"),
        ({"tools": [offered({"a": float("nan")})]}, "it holds NaN"),
        ({"tools": [offered({}, name="")]}, "tools.0.function.name: String should have at least 1 character"),
        ({"messages": calling(r'{"x": "\ud800"}')}, r"are not JSON: it is not valid Unicode: '\ud800'"),
        ({"messages": calling(r'["\udfff"]')}, r"are not JSON: it is not valid Unicode: '\udfff'"),
        ({"messages": calling("[" * 101 + "]" * 101)}, "are not JSON: it is nested more than 100 levels deep"),
        ({"messages": calling("[" * 200_000)}, "are not JSON: it is nested more than 100 levels deep"),
        ({"messages": calling('{"x": NaN}')}, "are not JSON: it has NaN"),
        ({"messages": calling('{"x": 1, "x": 2}')}, "are not JSON: the key 'x' is twice in one object"),
        ({"messages": calling("9" * 5000)}, "are not JSON: a number has 5000 digits"),
        ({str(number): 0 for number in range(99)}, "18 is not supported; 19 is not supported"),
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    program = f"""
        for field, named in json.load(open({str(tmp_path / "cases.json")!r})):
            status, reply = post({{"messages": FIRST}} | field)
            assert status == 400, (named, reply)
            assert named in reply["error"]["message"], (named, reply)
            assert len(reply["error"]["message"]) < 500
        ask(FIRST)
        report(reward=1)
        """
    samples = Agents(tmp_path, program, samples_per_prompt=1).samples()
    assert [s.reward for s in samples] == [1]


def test_another_model_another_key_and_web_pages_are_refused(tmp_path: Path) -> None:
    program = """
        assert post(None, path="/models")[1]["data"][0]["id"] == os.environ["OPENAI_MODEL"]
        status, reply = post({"messages": FIRST, "model": "gpt-5"})
        assert (status, reply["error"]["code"]) == (404, "model_not_found"), reply
        status, reply = post({"messages": FIRST}, key="guessed")
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key"), reply
        assert post({"messages": FIRST}, headers={"Origin": "http://evil.example"})[0] == 403
        assert "BAPO_ENGINE_KEY" not in os.environ
        ask(FIRST)
        report(reward=1)
        """
    samples = Agents(tmp_path, program, samples_per_prompt=1).samples()
    assert [s.reward for s in samples] == [1]


def test_the_endpoint_answers_while_a_long_text_becomes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are ready only once another request has been answered."""
    program = """
        import threading
        asking = threading.Thread(target=ask, args=(FIRST,))
        asking.start()
        assert post(None, path="/models")[0] == 200
        asking.join()
        report(reward=1)
        """
    is_answered = threading.Event()
    models, whole = Endpoint._models, Continuation.whole

    async def answered(self: Endpoint, request: web.Request) -> web.StreamResponse:
        is_answered.set()
        return await models(self, request)

    def slow(self: Continuation, *arguments: Any) -> list[int]:
        assert is_answered.wait(HANG_S)
        return whole(self, *arguments)

    monkeypatch.setattr(Endpoint, "_models", answered)
    monkeypatch.setattr(Continuation, "whole", slow)
    samples = Agents(tmp_path, program, samples_per_prompt=1).samples()
    assert [s.reward for s in samples] == [1]


def test_a_long_text_is_refused_and_the_program_goes_on(tmp_path: Path) -> None:
    program = """
        long = "the cat sat on the mat " * 100_000
        for messages in ([user(long)], [*FIRST, ask(FIRST), user(long)]):
            status, reply = post({"messages": messages})
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded"), reply
        report(reward=1)
        """
    samples = Agents(tmp_path, program, samples_per_prompt=1).samples()
    assert [s.reward for s in samples] == [1]


def test_a_requests_own_limit_cuts_its_turn(tmp_path: Path) -> None:
    program = """
        status, reply = post({"messages": FIRST, "max_tokens": 3})
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 3
        first = reply["choices"][0]["message"]
        ask([*FIRST, first, user("So?")], max_completion_tokens=100)
        report(reward=1)
        """
    for sample in Agents(tmp_path, program).samples():
        (trajectory,) = sample.trajectories[1:]
        assert len(trajectory.turns[0]) == 3
        assert trajectory.segments[2].token_ids[0] == END, "the turn has its end, given"
        assert sample.finish_reason == "stop"


LOOP = """
    messages = FIRST
    for number in range(99):
        status, reply = post({"messages": messages})
        if status != 200:
            break
        messages = [*messages, reply["choices"][0]["message"], user("So?")]
    assert status == 400, reply
    assert reply["error"]["code"] == CODE, reply
    """


@pytest.mark.parametrize(
    ("settings", "code", "reason", "num_turns"),
    [
        ({"max_turns": 3}, "turn_limit_exceeded", "turns", 3),
        ({"max_turns": 50, "max_response_tokens": 40}, "context_length_exceeded", "length", None),
        ({"max_turns": 2, "max_prompt_tokens": 40, "max_response_tokens": 9}, "context_length_exceeded", "length", 1),
    ],
)
@pytest.mark.parametrize("handles", [True, False])
def test_a_program_that_reaches_a_limit_may_still_give_its_reward(
    tmp_path: Path, settings: dict[str, Any], code: str, reason: str, num_turns: int | None, handles: bool
) -> None:
    end = "\nreport(reward=number)\n" if handles else '\nraise SystemExit("no idea")\n'
    program = textwrap.dedent(LOOP.replace("CODE", repr(code))) + end
    for sample in Agents(tmp_path, program, **settings).samples():
        num = sum(len(t.turns) for t in sample.trajectories)
        assert sample.finish_reason == reason
        assert num == (num_turns or num)
        assert sample.reward == (num if handles else 0), "a limit fails no program"


def test_a_judge_scores_the_last_turn_of_a_program_that_prints_no_reward(tmp_path: Path) -> None:
    program = """
        first = ask(FIRST)
        ask([*FIRST, first, user("So?")])
        """
    samples = Agents(tmp_path, program, Says("1"), judge="text").samples()
    for sample in samples:
        _, last = (TOKENIZER.decode(turn[:-1]) for turn in sample.trajectories[1].turns)
        assert sample.reward == (last == sample.prompt.answer)
    assert {s.reward for s in samples} == {0, 1}


@pytest.mark.parametrize(
    ("program", "said", "reward"),
    [
        ("print('bye')", "ended with exit code 0 before it had a turn; it printed: bye", None),
        ("ask(FIRST); raise ValueError('no mouse')", "(?s)exit code 1; it printed: .*ValueError: no mouse", 0),
        (
            "ask(FIRST)",
            "without a reward: write .* to the descriptor BAPO_REWARD_FD .*, or let reward.kind .*; it printed nothing",
            0,
        ),
        (
            'ask(FIRST); print("so\\n" + json.dumps({"reward": 1}))',
            "printed its reward, but .*: it must write",
            0,
        ),
        ('ask(FIRST); report(failed="no screen")', "no screen", None),
        ('ask(FIRST); report(failed="no screen"); sys.exit(1)', "exit code 1; it printed nothing", 0),
        ('ask(FIRST); report(reward="all")', "is not a reward: a reward is a finite number", 0),
        ("ask(FIRST); report(reward=1); report(reward=2)", "is not a reward: Extra data", 0),
        ("ask(FIRST); report(reward=1); sys.exit(2)", "exit code 2; it printed nothing", 0),
        ("ask(FIRST); report(text='more')", "neither a reward nor a failure", 0),
        ("ask(FIRST); report(reward={'x' * 70_000: 1})", "more than 65536 bytes", 0),
        ("print('x' * 10**7); os.kill(os.getpid(), 9)", "exit code -9 before it had a turn; it printed: x+$", None),
    ],
)
def test_a_program_that_fails_costs_its_reward_and_says_why(
    tmp_path: Path, program: str, said: str, reward: float | None
) -> None:
    """Its sample is dropped only before the policy's first turn, or if the program says so."""
    good = "ask(FIRST); report(reward=1)"
    branched = f"""
        if TASK["seed"] % 2:
            {program}
        else:
            {good}
        """
    agents = Agents(tmp_path, branched, samples_per_prompt=8)
    samples = agents.samples()
    assert {s.reward for s in samples} == {1, reward}, "the seeds of eight samples are odd and even"
    for end in (s.need for s in samples if s.reward != 1):
        assert isinstance(end, Ended)
        assert (end.reason, end.problem) == ("failed" if reward is None else "stop", "error")
        assert re.search(said, end.message)
    assert agents.driver.metrics()["environment/errors"] >= sum(s.reward != 1 for s in samples)


def test_a_program_that_never_ends_is_killed_with_its_children(tmp_path: Path) -> None:
    program = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"])
        open({str(tmp_path / "ids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        ask(FIRST)
        time.sleep(999)
        """
    agents = Agents(tmp_path, program)
    sample = Sample.of("0.0", Questions().next(), need=NeedsEnvironment(None))
    started: list[int] = []

    async def run() -> Sample:
        (asked,) = await agents.driver.advance([sample])
        started.extend(os.pidfd_open(int(pid)) for pid in (tmp_path / "ids").read_text().split())
        agents.programs.timeout_s = 0.1
        request = agents.scheduler.dispatcher._request(asked, "r")
        (grown,) = [agents.scheduler.dispatcher._grown(asked, agents.engine.answer(request), 0)]
        (ended,) = await agents.driver.advance([grown])
        return ended

    ended = agents.run(run())
    assert isinstance(ended.need, Ended)
    assert (ended.need.reward, ended.need.problem) == (0.0, "timeout")
    assert "neither asked nor ended within environment.timeout_s=0.1" in ended.need.message
    assert len(started) == 2
    for process in started:
        assert select.select([process], [], [], HANG_S)[0], "the child ends too"
        os.close(process)


@pytest.mark.parametrize("begins", ["", "ask(FIRST); "])
def test_a_run_stops_if_all_of_the_first_programs_fail(tmp_path: Path, begins: str) -> None:
    agents = Agents(tmp_path, f"{begins}raise SystemExit('no display')", samples_per_prompt=8)

    async def four_steps() -> None:
        for step in range(4):
            await agents.take(step)

    with pytest.raises(UserError, match=r"failed on all of the first 32 turns.*exit code 1.*no display"):
        agents.run(four_steps())


class Odd(Says):
    """An engine that says something else in each turn, but nothing odd in a summary."""

    def __init__(self, says: Sequence[str]) -> None:
        super().__init__()
        self.left_to_say = [*says]

    def answer(self, request: GenerateRequest) -> GenerateResult:
        self.says = "Well, " if "Summary" in TOKENIZER.decode(request.token_ids) else self.left_to_say.pop(0)
        return super().answer(request)


def test_what_the_policy_says_comes_back_in_a_history_and_ends_nothing(tmp_path: Path) -> None:
    def said(arguments: str, name: str = "f") -> str:
        return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {arguments}}}}}</tool_call>'

    calls = {
        said(r'"\ud800"'): False,
        said("0", name=r"\ud800"): False,
        said("[" * 97 + "0" + "]" * 97): True,
        said("[" * 98 + "0" + "]" * 98): True,
        said("[" * 99 + "0" + "]" * 99): False,
        said("[" * 330 + "]" * 330): False,
        said("[" * 900): False,
        said("NaN"): False,
        said('0, "a": 0'): False,
        "<function=f><parameter=x>5</parameter></function>": True,
        "<tool_call>f<arg_key>x</arg_key><arg_value>5</arg_value></tool_call>": True,
    }
    program = f"""
        TOOLS = [{offered({"properties": {"x": True}})!r}]
        for is_call in {[*calls.values()]}:
            first = ask(FIRST, tools=TOOLS)
            calls = first.get("tool_calls", [])
            assert bool(calls) == is_call, first
            ask([user("Summary"), first, *(tool(call, "3") for call in calls), user("So?")], tools=TOOLS)
        report(reward=1)
        """
    limits = {"max_response_tokens": 20_000, "max_prompt_tokens": 9000, "samples_per_prompt": 1, "max_turns": 50}
    agents = Agents(tmp_path, program, Odd([*calls]), **limits)
    assert [s.reward for group in agents.run(agents.take()) for s in group.samples] == [1]


def test_a_judge_scores_programs_that_fail_after_a_turn_so_that_the_policy_cannot_drop_a_sample(tmp_path: Path) -> None:
    program = "import sys; ask(FIRST); sys.exit(3) if TASK['seed'] % 2 else os.kill(os.getpid(), 9)"
    agents = Agents(tmp_path, program, Says("1"), judge="text", samples_per_prompt=34)
    samples = agents.samples()
    ends = [s.need for s in samples if isinstance(s.need, Ended)]
    assert [s.reward for s in samples].count(1) == 1, "one of them said the answer, and 32 failures end no run"
    assert [s.reward for s in samples].count(0) == 33
    assert {(one.reason, one.problem) for one in ends} == {("stop", "error")}
    assert all("the program ended with exit code" in one.message for one in ends)
    assert agents.driver.metrics()["environment/errors"] == 34


def test_an_error_of_one_sample_is_its_own_and_the_log_has_its_traceback_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised, except for what is wrong with the run."""
    agents = Agents(tmp_path, "ask(FIRST); report(reward=1)", samples_per_prompt=8)
    right, raised = AgentDriver._ended, Counter[type[Exception]]()
    kinds = [KeyError, RecursionError, MemoryError, OverflowError]

    async def wrong(self: AgentDriver, sample: Sample, session: Session, exit_code: int | None) -> Sample:
        if (number := int(sample.sample_id.rpartition(".")[2])) < 6:
            kind = kinds[number % 4]
            raised[kind] += 1
            raise kind("a sample failed")
        return await right(self, sample, session, exit_code)

    monkeypatch.setattr(AgentDriver, "_ended", wrong)
    samples = agents.samples()
    assert sorted(s.reward for s in samples if s.reward is not None) == [0.0] * 6 + [1.0] * 2
    reasons = Counter(s.need.message for s in samples if isinstance(s.need, Ended) and s.need.problem)
    assert reasons["RecursionError: a sample failed"] == raised[RecursionError] == 2
    assert caplog.text.count("Traceback") == 1
    assert not agents.driver._sessions, "and its program has ended"


@pytest.mark.parametrize("kind", [AssertionError, UserError, WorkersError])
def test_what_is_wrong_with_the_run_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    async def wrong(self: AgentDriver, *arguments: Any) -> Sample:
        raise kind("of the run")

    monkeypatch.setattr(AgentDriver, "_ended", wrong)
    with pytest.raises(kind, match="of the run"):
        Agents(tmp_path, "ask(FIRST)").samples()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"needs environment.options=\{command="),
        ({"command": "python x.py"}, "not {'command': 'python x.py'}"),
        ({"command": ["python", 3]}, "all of it texts"),
        ({"command": ["no-such-program"]}, "the program 'no-such-program' cannot be found"),
    ],
)
def test_a_command_that_cannot_be_started_is_found_before_the_run(options: dict[str, Any], said: str) -> None:
    config = Config.model_validate({"environment": {"kind": "agent", "options": options}})
    with pytest.raises(UserError, match=said):
        environment_of(config)


def test_drivers_that_share_programs_share_no_sample(tmp_path: Path) -> None:
    """The sets of an evaluation are asked at the same time, and number their samples in the same way."""
    agents = Agents(tmp_path, """report(reward=float(ask(FIRST)["content"]))""")
    other = AgentDriver(agents.programs, agents.driver.chat, agents.driver.decode, 50, 400, 9)
    drivers = (agents.driver, other)
    begun = Sample.of("0.0", Questions().next(), need=NeedsEnvironment(None))
    turns = [TOKENIZER.encode(f"{number}<|im_end|>") for number in (7, 8)]

    async def all_of(samples: Sequence[Sample]) -> list[Sample]:
        found = await asyncio.gather(*(one.advance([s]) for one, s in zip(drivers, samples, strict=True)))
        return [sample for (sample,) in found]

    async def run() -> list[Sample]:
        asked = await all_of([begun, begun])
        said = [Segment.sampled(0, 0, turn, [-1.0] * len(turn)) for turn in turns]
        return await all_of([s.extended([turn], "stop") for s, turn in zip(asked, said, strict=True)])

    assert [sample.reward for sample in agents.run(run())] == [7.0, 8.0]


def test_programs_work_between_steps_if_sampling_overlaps(tmp_path: Path) -> None:
    program = """
        messages = FIRST
        for _ in range(1 + TASK["seed"] % 3):
            messages = [*messages, ask(messages), user("So?")]
        report(reward=len(messages))
        """
    agents = Agents(tmp_path, program, overlap=True, max_staleness=3, groups_in_flight=3, tokens_per_round=5)

    async def run() -> list[Group]:
        groups = [group for step in range(4) for group in await agents.take(step)]
        await agents.scheduler.close()
        return groups

    samples = [s for group in agents.run(run()) for s in group.samples]
    check_trained_once(samples)
    assert len({s.sample_id for s in samples}) == 8
    for sample in samples:
        (trajectory,) = sample.trajectories[1:]
        assert sample.reward == 2 + 2 * len(trajectory.turns), "system, user, and two messages for each turn"


def test_what_a_program_needs_besides_is_checked_before_the_run() -> None:
    def settings(**data: Any) -> list[tuple[str, ...]]:
        agent = {"kind": "agent", "options": {"command": ["python"]}, "concurrency": 4}
        config = Config.model_validate({"environment": agent, "data": data})
        return [found.settings for found in (*check_environment(config, None), *idle_settings(resolve(config)))]

    assert ("data.chat_template", "environment.kind") in settings()
    found = settings(chat_template=True)
    assert ("data.chat_template", "environment.kind") not in found
    assert any(one[0] == "environment.concurrency" for one in found), "it has no effect"


def test_an_unfinished_sample_begins_anew_after_a_restart(tmp_path: Path) -> None:
    program = """
        messages = FIRST
        for _ in range(1 + 3 * (TASK["seed"] % 3)):
            messages = [*messages, ask(messages), user("So?")]
        report(reward=1)
        """
    settings: dict[str, Any] = {"tokens_per_round": 4, "groups_in_flight": 4, "max_turns": 9}
    agents = Agents(tmp_path, program, **settings)

    async def first_step() -> dict[str, Any]:
        await agents.take()
        return agents.scheduler.state_dict()

    state = through_checkpoint(agents.run(first_step()))
    held = [s for s in agents.scheduler.book.buffered() if not isinstance(s.need, Ended)]
    num_lost = sum(s.num_sampled_tokens for s in held)
    assert num_lost, "otherwise nothing is lost"
    again = Agents(tmp_path, program, **settings)
    again.scheduler.load_state_dict(state)
    ledger = again.scheduler.ledger
    assert ledger.num_samples["restarted"] == len(held)
    assert ledger.num_tokens["dropped"] == num_lost
    (sample, *_) = [s for s in again.scheduler.book.buffered() if s.sample_id == held[0].sample_id]
    assert sample == Sample.of(sample.sample_id, sample.prompt, need=NeedsEnvironment(None))
    samples = again.samples()
    assert all(s.reward == 1 for s in samples)


@pytest.mark.parametrize(
    ("variables", "left_out"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:9", "http_proxy": "http://proxy:3128"}, ["ALL_PROXY"]),
        ({"HTTPS_PROXY": "socks5h://x:1", "https_proxy": "https://u:p@proxy"}, ["HTTPS_PROXY"]),
        ({"HTTP_PROXY": "http://proxy:port", "all_proxy": "proxy:3128"}, ["HTTP_PROXY"]),
        ({"NO_PROXY": "fd00::/8,127.0.0.1,::1", "no_proxy": "[::1]:80"}, ["fd00::/8", "::1", "[::1]:80"]),
        ({"NO_PROXY": " .corp.example, 10.0.0.0/8,localhost:80,*", "no_proxy": ""}, []),
        ({}, []),
    ],
)
def test_programs_inherit_no_proxy_that_their_client_cannot_read(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], left_out: list[str]
) -> None:
    openai = pytest.importorskip("openai")
    environment, found = inherited({**variables, KEY_VARIABLE: "secret", "HOME": "/h"})
    assert [name.partition(" of ")[0] for name in found] == left_out
    assert KEY_VARIABLE not in environment
    assert environment["HOME"] == "/h"
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("NO_PROXY", "no_proxy"):
        assert environment[name].endswith("127.0.0.1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="x").close()  # it reads the variables
