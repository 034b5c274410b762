"""OpenAI's routes, asked by OpenAI's own client, and the terminal chat."""

import asyncio
import contextlib
import gc
import io
import json
import shlex
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.embedded import chat as terminal
from bapo_megatron.engines.embedded import openai as routes
from bapo_megatron.engines.embedded import server as server_module
from bapo_megatron.engines.embedded import text as text_module
from bapo_megatron.engines.embedded.openai import _ChatBody as ServedChat
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.server import Server, check_address
from bapo_megatron.engines.embedded.text import Reply, TextModel
from bapo_megatron.errors import UserError
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.rollout.agent_endpoint import _ChatBody as AgentChat
from bapo_megatron.runtime.bodies import BadRequestError, RequestBody, parse
from tests.distributed import HANG_S
from tests.unit.test_embedded_engine import stop

PROMPT = "3+5*2="
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model() -> Iterator[TextModel]:
    model = TextModel.load(demo_model_path(), name="demo", max_context=None, max_running=4, dtype=torch.float32)
    yield model
    stop(model.engine)


@pytest.fixture(scope="module")
def url(model: TextModel) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(
        Server(model.engine, model_path="demo", update_timeout_s=HANG_S, text=model).app(), handler_cancellation=True
    )

    async def start() -> int:
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        return listening.getsockname()[1]

    port = asyncio.run_coroutine_threadsafe(start(), loop).result(HANG_S)
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(HANG_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(HANG_S)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client


def post(url: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def greedy(model: TextModel, text: str) -> str:
    async def whole() -> str:
        prompt_ids = model.encode(text)
        params = SamplingParams(temperature=0.0, max_new_tokens=model.room(prompt_ids))
        return "".join([piece async for piece in Reply(model, prompt_ids, params).pieces()])

    return asyncio.run(whole())


def test_the_models(client: openai.OpenAI, model: TextModel) -> None:
    (card,) = client.models.list().data
    assert card.id == "demo"
    assert client.models.retrieve("demo").max_model_len == model.engine.max_context  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        client.models.retrieve("other/name")


def test_a_completion_counts_its_tokens(client: openai.OpenAI, model: TextModel) -> None:
    reply = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=200)
    want = greedy(model, PROMPT)
    assert want.startswith("3+5=")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (want, "stop")
    assert reply.usage.prompt_tokens == len(PROMPT)
    assert reply.usage.completion_tokens == len(want) + 1  # including the end of the text
    by_ids = client.completions.create(model="demo", prompt=model.encode(PROMPT), temperature=0, max_tokens=200)
    assert by_ids.choices[0].text == want
    assert client.completions.create(model="demo", prompt=PROMPT).usage.completion_tokens <= 16


def test_several_prompts_and_samples(client: openai.OpenAI, model: TextModel) -> None:
    prompts = [PROMPT, "1+1="]
    reply = client.completions.create(model="demo", prompt=prompts, n=2, temperature=0, max_tokens=50)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == [greedy(model, p) for p in prompts for _ in range(2)]
    seeded = [client.completions.create(model="demo", prompt=PROMPT, n=3, seed=5, temperature=1.5) for _ in range(2)]
    assert [c.text for c in seeded[0].choices] == [c.text for c in seeded[1].choices]
    assert len({choice.text for choice in seeded[0].choices}) > 1


def test_streams_are_the_same_text_in_pieces(client: openai.OpenAI, model: TextModel) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(texts) == greedy(model, PROMPT)
    assert len(texts) > 3
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(greedy(model, PROMPT)) + 1
    pieces = client.completions.create(model="demo", prompt=[PROMPT, "1+1="], temperature=0, max_tokens=9, stream=True)
    found = ["", ""]
    for piece in pieces:
        found[piece.choices[0].index] += piece.choices[0].text
    assert found == [greedy(model, PROMPT)[:9], greedy(model, "1+1=")[:9]]


def test_chat_and_its_limits(client: openai.OpenAI, model: TextModel) -> None:
    parts = [{"type": "text", "text": "3+5"}, {"type": "text", "text": "*2="}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert reply.choices[0].message.content == greedy(model, PROMPT)  # without a template, the last message
    short = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_completion_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == (greedy(model, PROMPT)[:3], "length")


def test_stop_texts_are_cut_off_wherever_pieces_end(client: openai.OpenAI, model: TextModel) -> None:
    whole = greedy(model, PROMPT)
    assert whole.startswith("3+5=")
    for stream in (False, True):
        reply = client.completions.create(
            model="demo", prompt=PROMPT, temperature=0, max_tokens=40, stop=["zzz", "=0,"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        assert "".join(choice.text for choice in choices) == "3+5"
        assert choices[-1].finish_reason == "stop"
    reply = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=200, stop=["zzz"])
    assert reply.choices[0].text == whole


def give_template(model: TextModel, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    monkeypatch.setattr(model, "template", Continuation(model.tokenizer, {}))


def test_a_chat_template_is_used(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    give_template(model, monkeypatch, TEMPLATE)
    messages = [{"role": "user", "content": "3+5"}, {"role": "user", "content": "*2="}]
    assert model.encode_chat(messages) == model.encode(PROMPT)
    with pytest.raises(BadRequestError, match="messages: the chat template refuses these messages: no user"):
        model.encode_chat([{"role": "assistant", "content": "1"}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-4"}, "there is no 'gpt-4' here; this server has 'demo'"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "1" * 5000}, "leaves no room in a context of"),
        ({"prompt": [99999]}, "token ids must be in"),
        ({"prompt": []}, "prompts x n must be 1 to 128"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": 0}, "top_k: must be -1"),
        ({"logprobs": 3}, "logprobs is not supported"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"best_of": 2}, "best_of: must be 1"),
        ({"echo": True, "suffix": "x"}, "echo is not supported; suffix is not supported"),
    ],
)
def test_bad_requests_are_explained(url: str, change: dict[str, object], message: str) -> None:
    status, reply = post(f"{url}/v1/completions", {"model": "demo", "prompt": PROMPT} | change)
    assert status == (404 if change.get("model") else 400)
    assert message in reply["error"]["message"]


NOTHING: dict[str, list[Any]] = {
    "logprobs": [None],
    "stop": [None, "", []],
    "tools": [None, []],
    "functions": [None, []],
    "function_call": [None, "none"],
    "logit_bias": [None, {}],
    "top_logprobs": [None, 0],
    "modalities": [None, ["text"]],
    "chat_template_kwargs": [None, {}],
    "response_format": [None, {"type": "text"}],
    "service_tier": [None, "auto", "default"],
    "repetition_penalty": [None, 1, 1.0],
    "ignore_eos": [None, False],
    "prediction": [None],
    "anything_new": [None, "", [], {}],
}
"""Values that ask for nothing."""
SOMETHING: dict[str, list[Any]] = {
    "logit_bias": [{"5": 1}],
    "top_logprobs": [2, True, False],
    "modalities": [["text", "audio"], "text"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "response_format": [{"type": "json_object"}],
    "repetition_penalty": [1.1, True],
    "ignore_eos": [True, 0],
    "anything_new": [0, False, "x", [None]],
}


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from([ServedChat, AgentChat]))
def test_what_asks_for_nothing_is_accepted(data: st.DataObject, kind: type[RequestBody]) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(NOTHING)), unique=True))
    body: dict[str, Any] = {name: data.draw(st.sampled_from(NOTHING[name])) for name in names}
    message = {"role": "assistant", "content": "a", "refusal": None, "thinking_blocks": [], "audio": {}}
    body |= {"model": "policy", "messages": [message, {"role": "user", "content": "hi", "cache_control": None}]}
    parse(kind, json.dumps(body).encode())
    name = data.draw(st.sampled_from(sorted(SOMETHING)))
    body[name] = data.draw(st.sampled_from(SOMETHING[name]))
    with pytest.raises(BadRequestError, match=name):
        parse(kind, json.dumps(body).encode())


def test_a_refused_message_is_named(url: str) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for messages, reason in (([image], "type: must be 'text'"), ([{"role": "tool", "content": "1"}], "role: must be")):
        status, reply = post(f"{url}/v1/chat/completions", {"model": "demo", "messages": messages})
        assert (status, reason in reply["error"]["message"]) == (400, True), reply
    status, reply = post(f"{url}/v1/chat/completions", {"model": "demo"})
    assert (status, reply["error"]["message"]) == (400, "messages is missing")


def test_a_server_says_what_it_is(url: str) -> None:
    with urllib.request.urlopen(url, timeout=HANG_S) as reply:
        about = json.load(reply)
    assert about["model"] == "demo"
    assert {"GET /", "GET /health", "GET /v1/models", "POST /v1/chat/completions", "POST /generate"} <= {
        *about["routes"]
    }
    with urllib.request.urlopen(f"{url}/health", timeout=HANG_S) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_banner_of_a_server_can_be_pasted(
    model: TextModel, url: str, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    monkeypatch.setattr(model, "encode", lambda _: [3])  # the demo's model has no text "Hello"
    server = Server(model.engine, model_path="demo", update_timeout_s=HANG_S, text=model)
    lines = [line.split(maxsplit=1) for line in server.banner(url).splitlines()]
    assert [label for label, _ in lines] == ["serving", "model", "try", "end"]
    curl, address, _, header, _, body = shlex.split(dict(lines)["try"])
    assert (curl, header) == ("curl", "Content-Type: application/json")
    monkeypatch.setattr(model, "encode_chat", lambda _: [3])
    status, reply = post(address, json.loads(body))
    assert (status, reply["model"]) == (200, "demo"), reply


def test_an_address_in_use_is_an_error_before_the_model_is_loaded(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = url.rpartition(":")[2]
    monkeypatch.setattr(TextModel, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert cli.main(["serve", "demo", "--port", port]) == 2
    assert capsys.readouterr().err == (
        f"bapo: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host\n"
    )
    check_address("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", {"text": PROMPT}),
        ("generate", {"text": [PROMPT]}),
        ("v1/completions", {"model": "demo", "prompt": PROMPT}),
        ("v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_a_server_is_healthy_while_a_long_text_becomes_tokens(
    route: str, body: dict[str, object], url: str, model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are ready only once another request has been answered."""
    begins, is_healthy, encode = threading.Event(), threading.Event(), model.encode

    def slow(text: str) -> list[int]:
        begins.set()
        assert is_healthy.wait(HANG_S)
        return encode(text)

    monkeypatch.setattr(model, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        replying = pool.submit(post, f"{url}/{route}", body)
        assert begins.wait(HANG_S)
        with urllib.request.urlopen(f"{url}/health", timeout=HANG_S) as health:
            assert health.status == 200
        is_healthy.set()
        assert replying.result(HANG_S)[0] == 200


def test_a_text_that_is_too_long_is_refused(url: str, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "3+5*2=" * 500_000
    monkeypatch.setattr(text_module, "prompt_ids", lambda *_: pytest.fail("all of it became tokens"))
    told = f"has more than {model.engine.max_context} tokens, which leaves no room"
    status, reply = post(f"{url}/v1/completions", {"model": "demo", "prompt": long})
    assert (status, told in str(reply["error"])) == (400, True), reply
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(model, "template", Continuation(model.tokenizer, {}))
    asked = {"model": "demo", "messages": [{"role": "user", "content": long}]}
    status, reply = post(f"{url}/v1/chat/completions", asked)
    assert (status, told in str(reply["error"])) == (400, True), reply


def test_generate_takes_text(url: str, model: TextModel) -> None:
    params = {"temperature": 0, "max_new_tokens": 100}
    status, reply = post(f"{url}/generate", {"text": PROMPT, "sampling_params": params})
    assert (status, reply["text"]) == (200, greedy(model, PROMPT))
    status, replies = post(f"{url}/generate", {"text": [PROMPT, "1+1="], "sampling_params": params})
    assert (status, [r["text"] for r in replies]) == (200, [greedy(model, PROMPT), greedy(model, "1+1=")])
    status, reply = post(f"{url}/generate", {"text": PROMPT, "input_ids": [3]})
    assert (status, "either input_ids or text" in reply["message"]) == (400, True)


def test_a_context_that_the_model_lacks() -> None:
    with pytest.raises(UserError, match="--max-context 100000: demo allows at most"):
        TextModel.load(demo_model_path(), name="demo", max_context=100_000, max_running=1, dtype=torch.float32)


def test_chat_in_a_terminal(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n\n{'1' * 5000}\n1+1=\n"))
    terminal.chat(model, temperature=0.0, system=None)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == greedy(model, PROMPT)
    assert "leaves no room" in second
    assert third == greedy(model, "1+1=")


CHAT_TEMPLATE = (
    "{% for m in tools or [] %}{{ m }}{% endfor %}{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("max_turns", [9, 1])
def test_chat_with_tools_goes_on_with_their_answers(
    model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    max_turns: int,
) -> None:
    prompts, outputs, states = [], [], []
    pieces, eos = Reply.pieces, model.tokenizer.eos_token_id

    async def watched(reply: Reply) -> AsyncIterator[str]:
        prompts.append(reply.sequence.prompt_ids)
        async with contextlib.aclosing(pieces(reply)) as texts:
            async for text in texts:
                yield text
        outputs.append(list(reply.sequence.output_ids))

    def answer(text: str, state: Any) -> tuple[list[dict[str, Any]], Any] | None:
        """Take the first two turns for calls."""
        states.append(state)
        if len(states) > 2:
            return None
        return [{"role": "tool", "name": "adder", "content": "7\n"}, {"role": "tool", "content": "8"}], [text]

    monkeypatch.setattr(Reply, "pieces", watched)
    give_template(model, monkeypatch, CHAT_TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n1+1=\n"))
    tools = terminal.ChatTools(answer, [], max_turns)
    terminal.chat(model, temperature=0.0, system=None, tools=tools)
    printed = capsys.readouterr().out.splitlines()
    first, second = model.encode(PROMPT), model.encode("1+1=")
    between = [*model.encode("7"), *model.encode("\n"), eos, *model.encode("8"), eos]
    assert prompts[0] == [*first, eos]
    assert outputs[0][-1] == eos
    said = [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    if max_turns == 1:
        assert printed[:4] == [said[0], "[adder] 7", "[tool] 8", "(stopped after 1 turns)"]
        assert prompts[1] == [*prompts[0], *outputs[0], *second, eos], "what did not fit is not shown to the model"
        return
    assert printed == [said[0], "[adder] 7", "[tool] 8", said[1], "[adder] 7", "[tool] 8", said[2], said[3]]
    assert prompts[1] == [*prompts[0], *outputs[0], *between]
    assert prompts[2] == [*prompts[1], *outputs[1], *between]
    assert prompts[3] == [*prompts[2], *outputs[2], *second, eos]
    assert states == [None, [said[0]], [said[1]], [said[1]]], "they keep their state"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run whose model has a chat template and whose prompts offer a calculator."""
    folder = tmp_path / "run" / "hf"
    shutil.copytree(demo_model_path(), folder)
    (tmp_path / "run" / "checkpoints").mkdir()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ style }}{% if tools %}{{ tools }}{% endif %}" + CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "run" / "config.toml").write_text("""
        data = {chat_template = true, system_prompt = "1+1=2", template_options = {style = "3+"}}
        environment = {kind = "tools", options = {tools = ["calculator"]}, max_turns = 7}
    """)
    return tmp_path / "run"


def test_chat_and_serve_take_what_a_run_says(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def chat(model: TextModel, *, temperature: float, system: str | None, tools: terminal.ChatTools) -> None:
        text = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        found, state = tools.answer(text, None) or ([], None)
        names = [schema["function"]["name"] for schema in tools.schemas]
        shown = model.tokenizer.decode(model.encode_chat([{"role": "user", "content": "5"}])).replace(" ", "")
        seen.append((shown, system, names, tools.max_turns, [m["content"] for m in found]))
        assert tools.answer("42", state) is None
        stop(model.engine)

    monkeypatch.setattr(terminal, "chat", chat)
    one_thread = ["--threads", "1"]
    assert cli.main(["chat", str(run), *one_thread]) == 0
    own = "calculator, tests.unit.tool_functions:search"
    assert cli.main(["chat", str(run / "hf"), "--tools", own, "--system", "be", *one_thread]) == 0
    assert seen == [
        ("3+5<eos>", "1+1=2", ["calculator"], 7, ["42"]),
        ("5<eos>", "be", ["calculator", "search"], 10, ["42"]),
    ]

    def serve_text(model: TextModel, *, host: str, port: int) -> int:
        messages = [{"role": "user", "content": "5"}]
        seen.append(model.tokenizer.decode(model.encode_chat(messages)))
        stop(model.engine)
        return 0

    monkeypatch.setattr(server_module, "serve_text", serve_text)
    assert cli.main(["serve", str(run), "--port", "0", *one_thread]) == 0
    assert seen[-1].replace(" ", "") == "3+5<eos>"


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("calculator", "the model has no chat template, which the answers of tools need"),
        ("calculater", 'environment.options.tools: must be "calculator", "python" or a path like'),
        ("json:dumps", 'environment.options.tools="json:dumps": its parameter obj has no type hint'),
    ],
)
def test_chat_with_tools_that_cannot_work(tools: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "demo", "--tools", tools, "--threads", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"bapo: {problem}")


@pytest.fixture
def held(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the engine after a reply's first token, until the returned event is set."""
    model.engine.call(model.engine.flush_cache, when_still=True).result(HANG_S)  # so the prefill gives the first token
    go_on, decode = threading.Event(), model.engine.model.decode

    def hold(*args: Any) -> Tensor:
        assert go_on.wait(HANG_S)
        return decode(*args)

    monkeypatch.setattr(model.engine.model, "decode", hold)
    yield go_on
    go_on.set()


def go_on_after_a_command(model: TextModel, held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine continue once it has received the next command."""
    call = model.engine.call

    def call_and_go_on(*args: Any, **how: Any) -> Future[Any]:
        job = call(*args, **how)
        held.set()
        return job

    monkeypatch.setattr(model.engine, "call", call_and_go_on)


def test_a_stream_that_is_left_frees_the_engine(
    client: openai.OpenAI, model: TextModel, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model.engine.num_generated_tokens
    stream = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=400, stream=True)
    next(iter(stream))
    go_on_after_a_command(model, held, monkeypatch)
    stream.close()
    assert held.wait(HANG_S), "the engine was not told"
    assert model.engine.call(model.engine.load, when_still=True).result(HANG_S)["num_waiting_reqs"] == 0
    assert model.engine.num_generated_tokens == before + 2, "one in the prefill, one before it hears of the end"


@contextlib.contextmanager
def ctrl_c(prompt_ids: list[int]) -> Iterator[None]:
    """Press Ctrl-C whenever a piece of the reply to this prompt is printed."""
    pieces = Reply.pieces

    async def interrupted(reply: Reply) -> AsyncIterator[str]:
        async with contextlib.aclosing(pieces(reply)) as texts:
            async for text in texts:
                yield text
                if reply.sequence.prompt_ids == prompt_ids:
                    signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background processes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reply, "pieces", interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_a_reply_and_not_the_chat(
    model: TextModel, held: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Typed(io.StringIO):
        """Return what is typed; the second message comes after the first reply has ended."""

        def readline(self, *args: Any) -> str:
            if self.tell():
                held.set()
            return super().readline(*args)

    monkeypatch.setattr("sys.stdin", Typed(f"{PROMPT}\n1+1=\n"))
    with ctrl_c(model.encode(PROMPT)):
        terminal.chat(model, temperature=0.0, system=None)
    first, second = capsys.readouterr().out.splitlines()
    assert (first, second) == (greedy(model, PROMPT)[:1], greedy(model, "1+1="))
    assert model.engine.failure is None


def test_chat_ends_after_the_step_of_a_stopped_reply(
    model: TextModel, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and Ctrl-D before the engine has seen it: Python would end under a thread inside torch, which aborts."""

    class Typed(io.StringIO):
        def readline(self, *args: Any) -> str:
            line = super().readline(*args)
            if not line:
                go_on_after_a_command(model, held, monkeypatch)
            return line

    monkeypatch.setattr("sys.stdin", Typed(f"{PROMPT}\n"))
    with ctrl_c(model.encode(PROMPT)):
        terminal.chat(model, temperature=0.0, system=None)
    assert held.is_set(), "the chat has ended in the middle of the engine's step"
    assert model.engine.load() == {"num_running_reqs": 0, "num_waiting_reqs": 0}


def test_replies_that_are_left_leave_no_exception_behind(model: TextModel, held: threading.Event) -> None:
    problems: list[dict[str, Any]] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        replies = [Reply(model, model.encode(PROMPT), SamplingParams(max_new_tokens=40)) for _ in range(2)]
        async with contextlib.aclosing(routes.merged(replies)) as pieces:
            await anext(pieces)

    asyncio.run(leave())
    gc.collect()  # an exception is reported when its future is freed
    assert problems == []


def test_an_engine_outlives_the_loop_of_a_reply(model: TextModel) -> None:
    async def begin() -> None:
        prompt_ids = model.encode(PROMPT)
        params = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
        pieces = Reply(model, prompt_ids, params).pieces()
        await anext(pieces)
        await pieces.aclose()

    for _ in range(5):
        asyncio.run(begin())
    assert greedy(model, "1+1=")
    assert model.engine.failure is None
