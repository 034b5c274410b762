"""A teacher on servers: the rows of a sample, servers that fail or do not fit, and prompts with a hint."""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from numpy.typing import NDArray

from bapo_megatron.assets import demo_model_path, shipped_model_path
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import TeacherConfig
from bapo_megatron.engines.base import TokenScores
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, RequestRefusedError, UserError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.mixture import prompts_of
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.teacher import Hint, OwnServers, Teacher, TeacherServers
from bapo_megatron.simulate.clock import run_on_clock
from bapo_megatron.tokens import TEACHER_LOGPROBS, TEACHER_VERSIONS, Rows
from bapo_megatron.types import Ended, Prompt, Sample, Segment, Trajectory
from tests.unit.test_continuation import tokenizer_of

PROMPT = Prompt(7, (1, 2), "3+5=", "8", "chains")
GIVEN = Segment.given("prompt", PROMPT.token_ids)


def sampled(*token_ids: int) -> Segment:
    return Segment.sampled(0, 0, token_ids, [-1.0] * len(token_ids))


def sample_of(*trajectories: Sequence[Segment]) -> Sample:
    return Sample("7.0", PROMPT, tuple(Trajectory((GIVEN, *segments)) for segments in trajectories), Ended("stop", 1.0))


async def by_place(prompt: Prompt, token_ids: Sequence[int], first: int) -> TokenScores:
    """Score the token 5 at place 9 of 12 with -5.0912, by weights of version 12."""
    places = range(first, len(token_ids))
    logprobs = [-(token_ids[i] + i / 100 + len(token_ids) / 10_000) for i in places]
    return TokenScores(np.array(logprobs, "float32"), np.empty(0), np.empty(0), len(token_ids))


def logprobs(rows: Rows) -> list[float]:
    return [round(float(value), 4) for value in rows[TEACHER_LOGPROBS]]


def test_the_sampled_tokens_of_every_trajectory_are_scored_where_they_lie() -> None:
    answer = Segment.given("environment", (9, 9))
    sample = sample_of([sampled(3, 4), answer, sampled(5), answer], [], [Segment.given("trajectory", (3,)), sampled(6)])
    rows = asyncio.run(Teacher(by_place, 5.0).rows(sample))
    assert logprobs(rows) == [-3.0207, -4.0307, -5.0607, -6.0304], "nothing behind the last sampled token is sent"
    assert rows[TEACHER_VERSIONS].tolist() == [7, 7, 7, 4]


def test_a_hint_takes_the_place_of_the_prompt() -> None:
    hinted = Teacher(by_place, 5.0, lambda prompt: (*prompt.token_ids, 8, 8), 6)
    assert logprobs(asyncio.run(hinted.rows(sample_of([sampled(3, 4)])))) == [-3.0406, -4.0506]
    with pytest.raises(ValueError, match=r"7 tokens with teacher.hint, and servers have room for 6: raise data.max"):
        asyncio.run(hinted.rows(sample_of([sampled(3, 4, 5)])))


def test_a_dead_teacher_costs_its_rows_and_never_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def dead(*_: Any) -> TokenScores:
        raise EngineError("http://node3:1/generate: no answer")

    async def silent(*_: Any) -> TokenScores:
        await asyncio.sleep(1e9)
        raise AssertionError

    for score, reason in ((dead, "EngineError('http://node3:1/generate: no answer')"), (silent, "no rows in 5 s")):
        sample, annotators = sample_of([sampled(3)]), Annotators([Teacher(score, 5.0)], {0})

        async def annotate(annotators: Annotators = annotators, sample: Sample = sample) -> None:
            for _ in range(40):
                assert await annotators.annotated([sample]) == [sample]

        run_on_clock(annotate())
        assert annotators.num_failed == 40
        assert f"annotator Teacher, sample 7.0 of prompt 7: {reason}" in caplog.messages


@dataclass
class Server:
    """A server, or an engine, that answers with what it is given in turn."""

    url: str
    answers: list[TokenScores | EngineError]
    num_asked: int = 0

    async def score(self, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
        self.num_asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, EngineError):
            raise answer
        return answer


def scores(version: int = 0) -> TokenScores:
    return TokenScores(np.array([-1.0], "float32"), np.empty(0), np.empty(0), version)


def test_another_server_scores_if_one_is_down() -> None:
    servers = TeacherServers(TeacherConfig(urls=("http://a", "http://b")), 10, 5.0)

    async def ask(*clients: Server) -> TokenScores:
        servers._clients = [*clients]  # type: ignore[list-item]
        return await servers.score(PROMPT, (1, 2), 1)

    down, good = Server("b", [EngineError("down")]), scores()
    assert asyncio.run(ask(Server("a", [good]), down)) is good
    assert down.num_asked == 1, "it caches the prompt"
    with pytest.raises(EngineError, match="also down"):
        asyncio.run(ask(Server("a", [EngineError("also down")]), Server("b", [EngineError("down")])))
    with pytest.raises(RequestRefusedError, match="too long"):  # every server would say so
        asyncio.run(ask(Server("a", [good]), Server("b", [RequestRefusedError("too long")])))


def test_the_runs_engines_are_asked_until_one_has_pushed_weights() -> None:
    """The engine restarts, and scores with the weights on its disk until the next push."""
    good = scores(4)
    engine: Any = Server("a", [EngineError("down"), scores(-1), scores(5), good])
    pool = EnginePool([engine])
    pool.expect(4)
    asked = OwnServers(pool)
    found: list[TokenScores] = []

    async def ask() -> None:
        found.append(await asked.score(PROMPT, (1, 2), 1))

    run_on_clock(ask())
    assert found == [good]
    assert engine.num_asked == 4
    engine.answers = [RequestRefusedError("too long")]
    with pytest.raises(RequestRefusedError):
        run_on_clock(ask())


# whether a server can teach


@pytest.fixture(scope="module")
def run() -> Resolved:
    return resolve(load_config(["demo"], []), demo_model_path())


@pytest.fixture(scope="module")
def tokenizer(run: Resolved) -> Any:
    return load_tokenizer(run.folder)


class Bigrams:
    """A server with SGLang's API whose model reads one token: right, or with one fault."""

    def __init__(self, vocab_size: int, fault: str, seed: int = 3) -> None:
        self.fault, self.vocab_size = fault, vocab_size + (2 if fault == "beyond" else 0)
        logits = np.random.default_rng(seed).normal(0, 2, (self.vocab_size, self.vocab_size))
        logits[:, vocab_size:] += 3  # matters only with tokens beyond the policy's
        self.table: NDArray[Any] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        if fault == "tempered":
            halved = self.table / 2
            self.scoring = halved - np.log(np.exp(halved).sum(-1, keepdims=True))
        else:
            self.scoring = np.minimum(self.table + (0.7 if fault == "total" else 0), 0)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/server_info", self.info), web.get("/model_info", self.info)])
        app.add_routes([web.post("/generate", self.generate), web.post("/tokenize", self.tokenize)])
        return app

    async def info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = {"weight_version": "default", "model_path": "somebody/model"}
        other = str(shipped_model_path("tool"))
        of_fault: dict[str, dict[str, Any]] = {
            "mute": {"capabilities": []},
            "short": {"context_length": 20},
            "small": {"vocab_size": 9},
            "other file": {"tokenizer_path": other},
            "same file": {"model_path": str(demo_model_path())},
        }
        return web.json_response(info | of_fault.get(self.fault, {}))

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.fault != "other text":
            raise web.HTTPNotFound
        assert "prompt" in await request.json()
        return web.json_response({"tokens": [1, 2, 3]})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        token_ids, params = body["input_ids"], body["sampling_params"]
        if params["max_new_tokens"]:
            draw, new = np.random.default_rng(0), [token_ids[-1]]
            for _ in range(params["max_new_tokens"]):
                new.append(int(draw.choice(self.vocab_size, p=np.exp(self.table[new[-1]]))))
            entries = [[self.table[a, b], b, None] for a, b in itertools.pairwise(new)]
            ids = [i % 14 for i in new[1:]] if self.fault == "beyond" else new[1:]
            meta = {
                "output_token_logprobs": [[p, i, None] for (p, _, _), i in zip(entries, ids, strict=True)],
                "finish_reason": {"type": "length"},
                "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
            }
            return web.json_response({"output_ids": ids, "meta_info": meta})
        start = 0 if self.fault == "whole" else body["logprob_start_len"]
        pairs = [*itertools.pairwise(token_ids[start:])]
        shift = 1 if self.fault == "shifted" else 0
        scored = [[self.scoring[a, (b + shift) % self.vocab_size], b, None] for a, b in pairs]
        meta = {"input_token_logprobs": [[None, token_ids[start], None], *scored]}
        if top_k := body["top_logprobs_num"]:
            order = np.argsort(-self.scoring, -1)[:, :top_k].tolist()
            meta["input_top_logprobs"] = [None, *([[self.scoring[a, i], i, None] for i in order[a]] for a, _ in pairs)]
        return web.json_response({"output_ids": [], "meta_info": meta})


REFUSED = {
    "mute": "cannot score tokens; use SGLang 0.5.23, or `bapo serve`",
    "short": "has a context of 20 tokens, and the run's longest sequence has 64; start it with a longer one",
    "small": "has a vocabulary of 9 tokens, but the policy's has 16; serve a model with the policy's tokenizer",
    "other file": "its tokenizer is another one: token 3 is '0' there, and ' ' in the policy's",
    "other text": "has another tokenizer: '12+34=46, and 46-12=34.'... is [1, 2, 3], not [",
    "whole": "input_token_logprobs is not a list of 9 entries; does the server score prompts?",
    "beyond": "gives tokens beyond the policy's vocabulary of 16 a probability of 0.9",
    "total": "scores its likeliest tokens with probabilities that add up to 2.0",
    "shifted": "scores tokens otherwise than the same tokens among its likeliest ones",
    "tempered": "nats off, on average; serve a model of the policy's family, with SGLang 0.5.23 or `bapo serve`",
}


@pytest.mark.parametrize("fault", ["none", "same file", *REFUSED])
def test_a_server_that_cannot_teach_is_refused_in_one_message(fault: str, run: Resolved, tokenizer: Any) -> None:
    async def check() -> str:
        async with TestServer(Bigrams(run.shape.vocab_size, fault).app()) as server:
            url = str(server.make_url("")).rstrip("/")
            servers = TeacherServers(TeacherConfig(urls=(url,)), run.shape.vocab_size, 5.0)
            try:
                await servers.check(run, tokenizer)
            except UserError as error:
                return str(error).replace(url, "URL")
            finally:
                await servers.close()
        return ""

    message = asyncio.run(check())
    if fault in REFUSED:
        assert message.startswith("teacher.urls: URL")
    assert REFUSED.get(fault, "") in message
    assert bool(message) == (fault in REFUSED)


def test_each_source_has_its_own_teacher(run: Resolved, tokenizer: Any) -> None:
    sources, size = ("sums", "chains", "words"), run.shape.vocab_size
    teachers = [Bigrams(size, "none", seed) for seed in range(3)]

    async def rows() -> list[list[float]]:
        async with contextlib.AsyncExitStack() as stack:
            served = [await stack.enter_async_context(TestServer(one.app())) for one in teachers]
            urls = {name: (str(one.make_url("")).rstrip("/"),) for name, one in zip(sources, served, strict=True)}
            servers = TeacherServers(TeacherConfig(urls_by_source=urls), size, 5.0)
            await servers.check(run, tokenizer)
            samples = [replace(sample_of([sampled(3, 4)]), prompt=replace(PROMPT, source=name)) for name in sources]
            found = [logprobs(await Teacher(servers.score, 5.0).rows(sample)) for sample in samples]
            await servers.close()
            return found

    want = [[round(float(one.table[a, b]), 4) for a, b in ((2, 3), (3, 4))] for one in teachers]
    assert asyncio.run(rows()) == want
    assert len({tuple(of_one) for of_one in want}) == 3


def test_no_server_is_one_message(run: Resolved, tokenizer: Any) -> None:
    servers = TeacherServers(TeacherConfig(urls=("http://127.0.0.1:9",)), 16, 5.0)
    with pytest.raises(UserError, match=r"teacher\.urls: http://127\.0\.0\.1:9/server_info: .*; is the server running"):
        asyncio.run(servers.check(run, tokenizer))


# prompts with a hint


def hinted(words: str, change: Callable[[Prompt], Prompt] = lambda prompt: prompt, *settings: str) -> tuple[str, str]:
    """Return the first prompt's text and the text of its hinted tokens."""
    config = load_config(["demo"], settings)
    tokenizer = load_tokenizer(demo_model_path())
    prompts = prompts_of(config, tokenizer)
    prompt = change(prompts.next())
    return prompt.text, tokenizer.decode(Hint(words, prompts)(prompt))


def test_words_and_answer_of_the_row_stand_in_the_hint() -> None:
    text, found = hinted("{answer},{prompt}", lambda p: replace(p, answer="12"))
    assert found == f"12,{text}"
    assert hinted("{prompt}{answer}", lambda p: replace(p, answer=[3, 4]))[1] == f"{text}<unk>3, 4<unk>"
    assert hinted("{answer[b][0]}{prompt}", lambda p: replace(p, answer={"b": [4]}))[1] == f"4{text}"
    assert hinted("{{answer}}{prompt}", lambda p: replace(p, answer=None))[1].endswith(text), "it has no field"
    sources = 'data.sources=[{name="a",weight=1},{name="b",weight=3}]'
    mixed, found = hinted("1{prompt}", lambda p: p, sources)
    assert found == f"1{mixed}"


@pytest.mark.parametrize(
    ("words", "change", "reason"),
    [
        ("{prompt}{answer}", {"answer": None}, "teacher.hint has {answer}, and prompt 0 of chains has none"),
        ("{prompt}{answer[x]}", {"answer": {"y": 1}}, "does not fit the answer of prompt 0 of chains: KeyError"),
        ("1{prompt}", {"token_ids": (3, 4)}, "no row gives the tokens of prompt 0 of chains, whose words are to be"),
    ],
)
def test_a_prompt_without_room_for_the_hint_is_one_message(words: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        hinted(words, lambda prompt: replace(prompt, **change))


USER: dict[str, Any] = {"role": "user", "content": "3 + 5?"}
ASKS = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": 5}}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    {"messages": [{**USER, "content": "2 + 2?"}, {"role": "assistant", "content": "4"}, USER]},
    {"messages": [{**USER, "content": "2 + 1?"}, {"role": "assistant", "content": "3"}, USER]},
    {"messages": [USER], "tools": [TOOL]},
    {
        "messages": [USER, ASKS, {"role": "tool", "content": "8"}],
        "tools": [TOOL],
    },
    {"messages": [USER]},
]


def prompts_of_rows(folder: Path, rows: Sequence[dict[str, Any]], *settings: str) -> tuple[Any, PromptStream]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data.source=jsonl", f"data.path={file}", "data.chat_template=true", "data.max_prompt_tokens=600")
    tokenizer = tokenizer_of("qwen3")
    prompts = prompts_of(load_config(["demo"], [*data, *settings]), tokenizer)
    assert isinstance(prompts, PromptStream)
    return tokenizer, prompts


def test_a_hint_stands_in_the_users_last_message_and_all_else_stays(tmp_path: Path) -> None:
    """Rows are told apart by their tokens, also if their last messages are the same."""
    rows = [{"answer": f"8.{number}"} | row for number, row in enumerate(ROWS)]
    tokenizer, prompts = prompts_of_rows(tmp_path, rows)
    hint, found = Hint("{prompt} It is {answer}.", prompts), set()
    hint.check(600)
    for prompt in (prompts.next() for _ in rows):
        text, with_hint = tokenizer.decode(prompt.token_ids), tokenizer.decode(hint(prompt))
        assert text.count("3 + 5?") == 1
        assert with_hint == text.replace("3 + 5?", f"3 + 5? It is {prompt.answer}.")
        found.add(with_hint)
    assert len(found) == len(rows)
    assert any("<tool_response>" in text for text in found), "a conversation may end with a tool's message"


def test_a_row_that_a_hint_does_not_fit_is_told_before_the_run(tmp_path: Path) -> None:
    """The rows before it do fit."""
    cases = {
        r"prompts\.jsonl:3: no message of the conversation is the user's": {
            "messages": [{"role": "system", "content": "Add."}, ASKS, {"role": "tool", "content": "8"}],
            "answer": {"of": "8"},
        },
        r"teacher\.hint does not fit the answer of .*prompts\.jsonl:3: KeyError: 'of'": {
            "messages": [USER],
            "answer": {"is": "8"},
        },
    }
    for reason, last in cases.items():
        rows = [{"messages": ROWS[i]["messages"], "answer": {"of": "8"}} for i in range(2)]
        _, prompts = prompts_of_rows(tmp_path, [*rows, last])
        with pytest.raises(UserError, match=reason):
            Hint("{prompt} It is {answer[of]}.", prompts).check(600)


def test_a_hint_that_leaves_no_room_for_a_response_is_told_before_the_run(tmp_path: Path) -> None:
    """The longest row is named. Rows that are left out are not asked."""
    words = ["2 + 2?", "3 + 5, and nothing else?", "2 + 1?"]
    rows = [{"prompt": text, "answer": "8"} for text in words] + [{"prompt": "3 + 5? " * 300, "answer": "8"}]
    _, prompts = prompts_of_rows(tmp_path, rows, "data.on_bad_prompt=skip")
    hint = Hint("{prompt} It is {answer}.", prompts)
    given = {prompt.text: prompt for prompt in (prompts.next() for _ in words)}
    longest = len(hint(given[words[1]]))
    assert longest > len(given[words[1]].token_ids)
    hint.check(longest)
    told = rf"prompts\.jsonl:2: .* {longest} tokens, and servers have room for {longest - 3} .*max_prompt_tokens by 3"
    with pytest.raises(UserError, match=told):
        hint.check(longest - 3)


def test_what_tools_and_turns_have_added_stays_behind_a_hinted_prompt(tmp_path: Path) -> None:
    """An environment's tools are in the hinted prompt, and its answers in the sample stay as they are."""
    environment = ("environment.kind=tools", 'environment.options={tools=["calculator"]}')
    row = {"prompt": "3 + 5?", "answer": "8"}
    tokenizer, prompts = prompts_of_rows(tmp_path, [row], *environment)
    prompt = prompts.next()
    assert "calculator" in tokenizer.decode(prompt.token_ids)
    hint = Hint("{prompt} It is {answer}.", prompts)
    assert tokenizer.decode(hint(prompt)) == tokenizer.decode(prompt.token_ids).replace("5?", "5? It is 8.")
    answer, asked = Segment.given("environment", (9, 9)), list[list[int]]()

    async def score(_: Prompt, token_ids: Sequence[int], first: int) -> TokenScores:
        asked.append([*token_ids])
        return await by_place(prompt, token_ids, first)

    segments = [sampled(3, 4), answer, sampled(5), answer]
    rows = asyncio.run(Teacher(score, 5.0, hint).rows(Sample.of("0.0", prompt, segments, Ended("stop", 1.0))))
    assert asked == [[*hint(prompt), 3, 4, 9, 9, 5]]
    assert len(rows[TEACHER_LOGPROBS]) == 3
