"""Tools: functions, calculator and Python, called from a turn; what is wrong with a call goes back to the policy."""

import asyncio
import contextlib
import copy
import json
import operator
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.schema import Config, RolloutConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import UserError
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.stop_tokens import stop_token_ids
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.prompts.tools import ToolOptions, load_tools, schemas_of
from bapo_megatron.rewards.arithmetic import MAX_BITS, shown, worked_out
from bapo_megatron.rewards.environments import (
    Continue,
    EnvironmentSpec,
    Failed,
    ForJudge,
    StepAnswer,
    TurnJson,
    as_answer,
    build_environment,
)
from bapo_megatron.rewards.interpreter import MAX_CHARS, Interpreter
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.rollout.turn_tokens import TurnTokens, check_tools, turn_driver
from bapo_megatron.types import Given
from tests.hang import HANG_S
from tests.unit.test_continuation import tokenizer_of
from tests.unit.test_drivers import hurry_only_hangs
from tests.unit.test_scheduler import ScriptedEngine

MODULE = "tests.unit.tool_functions"


def spec(*tools: str, timeout_s: float = HANG_S, **options: Any) -> EnvironmentSpec:
    return EnvironmentSpec("tools", timeout_s, 4 << 30, {"tools": [*tools], **options})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(text: str) -> TurnJson:
    return TurnJson(prompt="", answer=None, source="", number=1, text=text, token_ids=[], end="stop")


def asked(one: EnvironmentSpec, text: str, state: Any = None) -> StepAnswer:
    """Ask with a new environment, as after a crash, and with the state as a file keeps it."""
    step = build_environment(one)
    value = step({"turn": turn(text), "state": json.loads(json.dumps(state))})
    return as_answer(asyncio.run(value) if step.is_async else value)


def messages(one: EnvironmentSpec, text: str) -> list[str]:
    answer = asked(one, text)
    assert isinstance(answer, Continue)
    assert answer.messages is not None
    assert {message["role"] for message in answer.messages} == {"tool"}
    return [message["content"] for message in answer.messages]


def test_every_call_of_a_turn_gets_its_answer_in_order() -> None:
    tools = spec("calculator", f"{MODULE}:search", f"{MODULE}:shout")
    text = f"First {call('shout', text='hi')} then {call('calculator', expression='6*7')}{call('search', query='é')}"
    assert messages(tools, text) == ["HI", "42", '{"query": "é", "limit": 1, "kinds": null}']
    assert not build_environment(tools).is_async
    assert build_environment(spec("calculator", f"{MODULE}:shout")).is_async, "then one process serves all samples"


def test_a_turn_without_a_call_goes_to_the_judge() -> None:
    for text in ("It is 42.", f"<think>{call('calculator', expression='6*7')}</think>42", ""):
        assert asked(spec("calculator"), text) == ForJudge()
    assert isinstance(asked(spec("calculator"), "```python\n1\n```"), ForJudge), "no tool python is offered"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("find", query="x"), "Error: there is no tool 'find'; the tools are: search"),
        (call("search"), "Error: argument 'query' is missing; the arguments are: query, limit, kinds"),
        (call("search", query="x", page=2), "Error: unknown argument 'page'; the arguments are: query, limit, kinds"),
        (call("search", query=3), "Error: argument 'query': Input should be a valid string, not 3"),
        (call("search", query="x", limit="2"), "Error: argument 'limit': Input should be a valid integer, not '2'"),
        (call("search", query="x", kinds=["cow"]), "Error: argument 'kinds'[0]: Input should be 'cat' or 'dog', not "),
        (call("search", query="\ud800"), "Error: the call is not JSON: it is not valid Unicode"),
        ("<tool_call>search(x)</tool_call>", "Error: the call is not JSON: Expecting value, at 'search(x)"),
    ],
)
def test_what_is_wrong_with_a_call_goes_back_to_the_policy(text: str, answer: str) -> None:
    good = call("search", query="cat", limit=2, kinds=["cat"])
    first, *others = messages(spec(f"{MODULE}:search"), f"{text}{good}")
    assert first.startswith(answer)
    assert others == ['{"query": "cat", "limit": 2, "kinds": ["cat"]}']


def test_what_a_check_of_the_users_raises_goes_to_the_policy_too() -> None:
    (found,) = messages(spec(f"{MODULE}:weather"), call("weather", city={"name": "x"}))
    assert found == "Error: argument 'city': LookupError: no city x"


def test_arguments_without_a_type_get_it_from_the_hints() -> None:
    text = "<function=search><parameter=query>3</parameter><parameter=limit>3</parameter></function>"
    assert messages(spec(f"{MODULE}:search"), text) == ['{"query": "3", "limit": 3, "kinds": null}']


def test_what_a_tool_raises_or_cannot_return_goes_to_the_policy_and_one_that_hangs_fails_the_sample(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hurry_only_hangs(monkeypatch)
    tools = spec(f"{MODULE}:broken", timeout_s=2.0)
    assert messages(tools, call("broken", kind="raise")) == ["LookupError: no such page"]
    assert messages(tools, call("broken", kind="none")) == ["null"]
    assert messages(tools, call("broken", kind="surrogate")) == ["?"]
    assert messages(tools, call("broken", kind="nan")) == ["NaN"]
    assert messages(tools, call("broken", kind="exit")) == ["SystemExit: usage"]
    assert messages(tools, call("broken", kind="object")) == ["TypeError: broken returned no JSON value but object"]
    assert "tool 'broken' returned no JSON value but object" in caplog.text, "its author should know"
    environment = EnvironmentProcesses(tools, concurrency=1)
    try:
        found = asyncio.run(environment.step(turn(call("broken", kind="hang")), None))
        assert isinstance(found, Failed)
        assert found.problem == "timeout"
    finally:
        environment.close()


def test_answers_may_be_one_message_of_the_user() -> None:
    text = call("calculator", expression="1+1") + call("calculator", expression="1/0")
    answer = asked(spec("calculator", role="user"), text)
    assert isinstance(answer, Continue)
    assert answer.messages == [{"role": "user", "content": "2\nZeroDivisionError: division by zero"}]


def test_many_long_answers_fit_into_a_reply() -> None:
    found = messages(spec(f"{MODULE}:shout"), call("shout", text="x" * 90_000) * 20)
    assert {*map(len, found)} == {2500}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": ["no_hint"]}, '"no_hint"'),
        ({"tools": [f"{MODULE}:no_hint"]}, "its parameter query has no type hint"),
        ({"tools": [f"{MODULE}:no_docstring"]}, "it has no schema: .* no docstring"),
        ({"tools": [f"{MODULE}:no_description"]}, "it has no schema: .* no description for the argument 'query'"),
        ({"tools": [f"{MODULE}:any_number"]}, r"its parameter \*queries: str cannot be passed by name"),
        ({"tools": [f"{MODULE}:unknown_hint"]}, "it has no schema: name 'NoSuchType' is not defined"),
        ({"tools": [f"{MODULE}:NUMBER"]}, "it is of type int, which is not callable"),
        ({"tools": [f"{MODULE}:Other"]}, "it is of type type, not a function"),
        ({"tools": [f"{MODULE}:search", f"{MODULE}:Other.search"]}, 'has the name "search", as ".*:search" has'),
        ({"tools": "calculator"}, r"tools is a list of names, such as \[.*\], not 'calculator'"),
        ({"tools": []}, "tools is a list of names"),
        ({}, "tools is a list of names"),
        ({"tools": 3}, r"tools is a list of names, .* not 3"),
        ({"tools": ["calculator"], "toolz": 1}, "there is no option 'toolz'; they are tools, role and in_prompt"),
        ({"tools": ["calculator"], "role": "assistant"}, 'role is "tool" or "user", not \'assistant\''),
        ({"tools": ["calculator"], "in_prompt": 1}, "in_prompt is true or false, not 1"),
    ],
)
def test_a_tool_that_cannot_work_is_one_error(options: dict[str, Any], problem: str) -> None:
    def load() -> None:
        names = ToolOptions.of(options).tools
        load_tools(names)
        schemas_of(names)

    with pytest.raises(UserError, match=rf"environment\.options.*{problem}"):
        load()


def test_workers_import_neither_torch_nor_the_configuration() -> None:
    program = f"""
import sys
from bapo_megatron.rewards.environments import EnvironmentSpec, build_environment
build_environment(EnvironmentSpec("tools", 9.0, 1 << 30, {{"tools": ["calculator", "python", "{MODULE}:search"]}}))
print([name for name in ("torch", "transformers", "bapo_megatron.config.schema") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


NUMBERS = st.integers(-(10**6), 10**6) | st.decimals(-1000, 1000, places=3)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv}


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Fraction | None]:
    """Return an expression and its value; None if it divides by zero."""
    if depth == 0 or draw(st.booleans()):
        number = draw(NUMBERS)
        return f"({number})", Fraction(str(number))
    (left, a), (right, b), sign = (
        draw(expressions(depth - 1)),
        draw(expressions(depth - 1)),
        draw(st.sampled_from([*OPERATORS])),
    )
    if a is None or b is None or (b == 0 and "/" in sign):
        return f"({left} {sign} {right})", None
    return f"({left} {sign} {right})", Fraction(OPERATORS[sign](a, b))


@given(case=expressions())
def test_the_calculator_is_exact(case: tuple[str, Fraction | None]) -> None:
    text, value = case
    if value is None:
        with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
            worked_out(text)
        return
    assert worked_out(text) == value
    assert Fraction(shown(value).partition(" ")[0]) == value


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("1/3", "1/3 (about 0.3333333333)"),
        ("-1/8", "-0.125"),
        ("2^10 - 2**3", "1016"),
        ("7 % 3", "1"),
        ("0x1F", "31"),
        ("1_000 * 1e2", "100000"),
        ("--5", "5"),
        (f"2**{MAX_BITS - 1} - 2**{MAX_BITS - 1} + 1", "1"),
    ],
)
def test_what_the_calculator_shows(expression: str, answer: str) -> None:
    assert shown(worked_out(expression)) == answer


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "2**0.5", "1e999999999", "1e-999999999", f"2**{MAX_BITS + 1}", "(2**5000)**2*2**5000"),
        *("", "1 +", "a", "'a'", "True", "1,000", "f(1)", "__import__('os')", "[1]", "1 < 2", "1j", "\0"),
        *("(" * 400 + "1", "1" * 1001, "-" * 1000),
    ],
)
def test_what_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError, match=r"bits|not an expression|only numbers|whole number|at most|too deeply"):
        worked_out(expression)


@settings(max_examples=200)
@given(st.text(alphabet="0123456789.e+-*/%^() x\"'[],", max_size=40))
def test_the_calculator_takes_any_text(expression: str) -> None:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        assert isinstance(shown(worked_out(expression)), str)


def python(*codes: str) -> list[str]:
    """Return what the tool answers to one call after the other."""
    found, state = [], None
    for code in codes:
        answer = asked(spec("python"), call("python", code=code), state)
        assert isinstance(answer, Continue)
        assert answer.messages is not None
        found.append(answer.messages[0]["content"])
        state = answer.state
    return found


def test_python_keeps_its_variables_and_repeats_nothing() -> None:
    codes = (
        "x = 3\nprint('once')\nx + 1",
        "open('file', 'w').write(str(x))",
        "open('file').read()",
        "def f(): return x",
    )
    assert python(*codes, "f() + 1") == ["once\n4\n", "1\n", "'3'\n", "(It printed nothing.)", "4\n"]


def test_python_goes_on_after_an_exception_and_forgets_a_call_that_ends_it() -> None:
    raised, value, ended, kept = python("x = 1\n1 / 0", "x", "x = 2\nimport os\nos._exit(0)", "x")
    assert raised.startswith('Traceback (most recent call last):\n  File "<call 1>", line 2, in <module>\n    1 / 0\n')
    assert raised.endswith("ZeroDivisionError: division by zero\n")
    assert (value, kept) == ("1\n", "1\n")
    assert ended.startswith("The code ended its interpreter")
    syntax, left = python("a b", "raise SystemExit(3)")
    assert syntax.startswith('  File "<call 1>", line 1\n    a b\n')
    assert syntax.endswith("SyntaxError: invalid syntax\n")
    assert left.endswith("SystemExit: 3\n")


def test_python_is_seeded_and_says_when_a_replay_differs() -> None:
    random = "import random\n[random.random(), {'a', 'b', 'c'}]"
    first, second = python(random, random)
    assert python(random, random, "1") == [first, second, "1\n"]
    assert first != second
    clock = "import time\ntime.time_ns()"
    assert python(clock, "5")[1] == "(The code of earlier calls ran again, and call 1 printed something else.)\n5\n"


def test_python_is_bounded() -> None:
    tool = Interpreter(HANG_S)
    _, state = tool.run("x = 1", [])
    text, state = Interpreter(1.0).run("while True: pass", state)
    assert text.startswith("TimeoutError: the code, after the code of earlier calls had run again, did not end in 1 s")
    text, kept = tool.run(f"print('x' * {MAX_CHARS + 5})", state, deadline_s=None)
    assert text == "x" * MAX_CHARS + "\n... and 6 more characters"
    assert tool.run("x", kept, deadline_s=0.0)[0].startswith("TimeoutError"), "the calls of a turn share a deadline"
    refused, _ = tool.run("import socket\nsocket.socket()", [])
    assert refused.endswith("PermissionError: [Errno 1] Operation not permitted\n")


def test_python_answers_fenced_code_and_checks_its_arguments() -> None:
    tools = spec("python")
    assert messages(tools, "I run\n```python\n6 * 7\n```\nand\n```py\n2\n```") == ["42\n", "2\n"]
    assert messages(tools, call("python")) == ["Error: argument 'code' is missing; the arguments are: code"]


class OneQuestion:
    """A source with one question."""

    name = "one"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Question:
        return Question("6*7?", "42", "the question")


def tools_config(max_prompt_tokens: int = 999, **options: Any) -> Config:
    options = {"tools": ["calculator", f"{MODULE}:search"], **options}
    environment = {"kind": "tools", "options": options, "max_turns": 3, "max_answer_tokens": 200}
    data = {"chat_template": True, "max_prompt_tokens": max_prompt_tokens}
    return Config.model_validate({"data": data, "environment": environment, "reward": {"kind": "text"}})


def showing_tools() -> Any:
    """Return a tokenizer whose template shows the tools before all else."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + tokenizer.chat_template
    return tokenizer


def stream(tokenizer: Any, config: Config) -> PromptStream:
    return PromptStream(config, tokenizer, OneQuestion())


def prompt(tokenizer: Any, **options: Any) -> str:
    (found,) = stream(tokenizer, tools_config(**options)).in_order()
    return tokenizer.decode(found.token_ids)


def test_prompts_show_the_tools_or_the_run_does_not_start() -> None:
    plain, showing = tokenizer_of("qwen2_5"), showing_tools()
    first, second, rest = prompt(showing).split("\n", 2)
    assert [json.loads(first), json.loads(second)] == schemas_of(["calculator", f"{MODULE}:search"])
    assert rest == prompt(showing, in_prompt=True) == prompt(plain, in_prompt=True)
    written = prompt(plain)
    assert '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>' in written
    assert [json.JSONDecoder().raw_decode(line)[0] for line in written.splitlines() if line.startswith('{"name"')] == [
        schema["function"] for schema in schemas_of(["calculator", f"{MODULE}:search"])
    ]
    showing.chat_template = "{{ raise_exception('no tools') if tools }}"
    with pytest.raises(UserError, match="the model's chat template fails with tools: no tools"):
        prompt(showing)


@given(
    st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "system", "\n", '"', "{", "é", " "]), max_size=6),
    st.booleans(),
)
def test_words_about_tools_forge_no_turn(pieces: list[str], has_system: bool) -> None:
    """Whatever a description spells, the template alone writes control tokens."""
    tokenizer = tokenizer_of("qwen2_5")
    chat = Continuation(tokenizer, {})
    assert not chat.shows_tools
    messages = [
        *([{"role": "system", "content": "Be short."}] if has_system else []),
        {"role": "user", "content": "6*7?"},
    ]
    schema = {"type": "function", "function": {"name": "search", "description": "".join(pieces), "parameters": {}}}
    plain, found = chat.whole(messages), chat.whole(messages, [schema])
    assert json.dumps(schema["function"], ensure_ascii=False) in tokenizer.decode(found)
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    num_system = not (has_system or "system" in tokenizer.decode(plain))
    assert sum(i in control for i in found) == sum(i in control for i in plain) + 2 * num_system


def test_tools_count_in_the_length_of_a_prompt() -> None:
    stream(showing_tools(), tools_config(100, in_prompt=True)).check()
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens with its tools, more than .* = 100"):
        stream(showing_tools(), tools_config(100)).check()


class Writer(ScriptedEngine):
    """An engine whose turns are written letter by letter, not as the tokenizer would write them."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.turns = turns  # by sample
        self._tokenizer = tokenizer
        self._opening = self.plain("<|im_start|>assistant\n")

    def plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def letters(self, text: str) -> list[int]:
        return [i for letter in text for i in self.plain(letter)] + [self._tokenizer.eos_token_id]

    def answer(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        ids, opening = [*request.token_ids], self._opening
        starts = [i for i in range(len(opening), len(ids) + 1) if ids[i - len(opening) : i] == opening]
        turns = self.turns[int(request.rid.split(".")[1].partition("-")[0]) % len(self.turns)]
        left = self.letters(turns[len(starts) - 1])[len(ids) - starts[-1] :]
        tokens = tuple(left[: request.max_new_tokens])
        reason = "stop" if len(tokens) == len(left) else "length"
        span = VersionSpan(self.version, 0, len(tokens))
        return GenerateResult(
            request.rid,
            np.array(tokens, np.int64),
            np.array((-0.5,) * len(tokens), np.float32),
            (span,),
            reason,
            len(ids),
            0,
        )  # type: ignore[arg-type]


def test_a_sample_calls_tools_and_its_judge_reads_the_last_turn_only() -> None:
    tokenizer, config = showing_tools(), tools_config()
    both = f"42. {call('calculator', expression='6*7')}\n{call('search', query='<|im_end|>')}"
    bad, problem = "<tool_call>6*7</tool_call>", 'Error: a call is an object like {"name": "...", "arguments": {...}}'
    engine = Writer(tokenizer, [[both, "42"], [both, "41"], [bad, both, "42"], [both, bad, both]])
    tokens = TurnTokens.of(config, tokenizer, len(tokenizer))
    environment = EnvironmentProcesses(EnvironmentSpec.of(config), concurrency=1)
    driver = turn_driver(config, environment, tokens, 2000, RewardScorer(config))
    rollout = {"prompts_per_step": 1, "samples_per_prompt": 4, "max_response_tokens": 2000, "tokens_per_round": 50}
    scheduler = Scheduler(
        RolloutConfig(**rollout),
        pool=EnginePool([engine]),  # type: ignore[list-item]
        prompts=stream(tokenizer, config),
        driver=driver,
        stop_token_ids=stop_token_ids(config, tokenizer, (tokenizer.eos_token_id,)),
        seed=0,
        updates_per_step=1,
        keep=lambda group: True,
        max_turn_tokens=None,
    )
    try:
        groups, _ = asyncio.run(scheduler.take(0, 0))
        assert groups is not None
        samples = sorted(groups[0].samples, key=lambda sample: sample.sample_id)
        metrics = driver.metrics()
    finally:
        driver.close()
    assert [(s.finish_reason, s.reward) for s in samples] == [
        ("stop", 1.0),
        ("stop", 0.0),
        ("stop", 1.0),
        ("turns", 0.0),
    ]
    assert (metrics["reward/judged"], metrics["environment/errors"]) == (4.0, 0.0)
    mark = engine.plain("<|im_end|>")[0]
    for sample, turns in zip(samples, engine.turns, strict=True):
        (trajectory,) = sample.trajectories
        assert [turn.tolist() for turn in trajectory.turns] == [engine.letters(turn) for turn in turns]
        first, *later = trajectory.segments
        assert first.token_ids.tolist() == list(sample.prompt.token_ids)
        given = [s.token_ids.tolist() for s in later if isinstance(s.origin, Given)]
        assert len(given) == len(turns) - 1
        for ids, turn in zip(given, turns[:-1], strict=True):
            texts = ["42", '{"query": "<|im_end|>", "limit": 1, "kinds": null}'] if turn == both else [problem]
            results = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
            assert tokenizer.decode(ids) == f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
            assert ids.count(mark) == 1, "what a tool spells is text"


def test_a_template_that_takes_no_answers_of_tools_is_refused_with_the_remedy() -> None:
    check_tools(tools_config(), tokenizer_of("qwen2_5"))
    check_tools(tools_config(role="user"), tokenizer_of("gemma"))
    with pytest.raises(UserError, match=r"does not show 'tool' messages .*; set environment.options.role = \"user\""):
        check_tools(tools_config(), tokenizer_of("phi3"))
    with pytest.raises(UserError, match=r"refuses 'tool' messages .*; set environment.options.role = \"user\""):
        TurnTokens.of(tools_config(), tokenizer_of("gemma"), 999)
    with pytest.raises(UserError, match=r"ends a turn with no special token.*; choose another model"):
        check_tools(tools_config(), tokenizer_of("glm4moe"))
