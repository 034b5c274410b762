"""Agent programs: a program of the user's drives a sample by asking an OpenAI-compatible endpoint for turns.

    environment.kind = "agent", environment.options = {command = ["python", "my_agent.py"]}

A sample begins as its program does. What the program asks becomes given tokens, the policy's turn becomes its reply
(conversations.py, agent_endpoint.py), and its exit ends the sample. While the program works, the sample waits for its
environment, as for any other. Programs are trusted; they and their children do not outlive the sample
(runtime/subreaper.py).

A judge scores the sample, or the program does. Only then it learns the answer, and gives the reward, by a socket:

    ours: '"6"\n'  <-- socket -->  descriptor 3: reads '"6"\n', writes '{"reward": 1.0}'

What a program prints may be the policy's words, and its environment goes to commands that it runs for the policy. No
path leads to a socket, and Python's and Node's child processes do not inherit it.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.key import KEY_VARIABLE
from bapo_megatron.errors import UserError, plural
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.tool_calls import Call, parse_turn
from bapo_megatron.rewards.environments import End, Failed, as_answer
from bapo_megatron.rollout.agent_endpoint import MODEL, Endpoint, Inbox, Reply, Request
from bapo_megatron.rollout.conversations import ContextError, Conversations
from bapo_megatron.rollout.dispatch import sample_seed
from bapo_megatron.rollout.drivers import Answers, SampleDriver, ended
from bapo_megatron.runtime.bodies import BadRequestError
from bapo_megatron.runtime.subreaper import REWARD_FD, below_subreaper
from bapo_megatron.types import Need, NeedsEnvironment, Prompt, Sample, TurnEnd

log = logging.getLogger(__name__)

_MAX_OUTPUT_BYTES = 64 << 10  # kept of what a program prints, from its end
_MAX_SHOWN = 500  # characters of it that a message shows
_MAX_REWARD_BYTES = 64 << 10  # JSON that a program writes; a socket holds more
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_HOST = re.compile(r"\*|(?:https?://)?[*.]*[\w-][\w.-]*(?:/\d+)?(?::\d+)?")  # a name, IPv4 address or network
_END_TIMEOUT_S = 10.0  # how long to wait for a killed program
_MAX_SCRIPT_BYTES = 1 << 20
_NAMES_REWARD = re.compile(r"""["']reward["']\s*:""")  # {"reward": 1.0}
REWARD_VARIABLE = "BAPO_REWARD_FD"  # where a program without a judge finds its descriptor
WRITE = f'write {{"reward": 1.0}} to the descriptor {REWARD_VARIABLE} (docs/agents.md), or let reward.kind name a judge'
_EXPECTED = 'environment.kind="agent" needs environment.options={command=["python", "my_agent.py"]}'


class Program:
    """A running program, below a process that ends it with its children."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket | None, answer: bytes) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.written = b""  # the reward that it has written, as JSON; complete after `end`
        self._process = process
        self._channel = channel
        if channel is not None:
            channel.setblocking(False)  # for `end`, even if the telling never begins
        self._readers = [asyncio.create_task(_tail(stream)) for stream in (process.stdout, process.stderr)]
        self._telling = asyncio.create_task(_tell(channel, answer))

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], answer: str | None = None) -> "Program":
        """Start a program with these environment variables; without a judge, with an answer as JSON. Raises OSError."""
        channel, theirs = socket.socketpair() if answer is not None else (None, None)
        try:
            fd = None if theirs is None else theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *below_subreaper(fd),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=() if fd is None else (fd,),
                env=variables,
            )
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        return cls(process, channel, f"{answer}\n".encode())

    async def end(self) -> int:
        """Wait for the end of the program and its children, read its reward, and return its exit code."""
        code = await self._process.wait()
        self._telling.cancel()
        await asyncio.wait([self._telling])
        if self._channel is not None:
            with self._channel, contextlib.suppress(BlockingIOError, ConnectionError):
                while len(self.written) <= _MAX_REWARD_BYTES and (data := self._channel.recv(_MAX_REWARD_BYTES)):
                    self.written += data
        return code

    def kill(self) -> None:
        """End the program and its children. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def output(self) -> tuple[str, str]:
        """Kill what is left of the program; return the end of its output and of its error output."""
        self.kill()
        try:
            await asyncio.wait_for(self._process.wait(), _END_TIMEOUT_S)
        except TimeoutError:  # a child may be stuck in the kernel
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait(self._readers, timeout=_END_TIMEOUT_S)  # such a child keeps them open
        for reader in self._readers:
            reader.cancel()
        out, error = (r.result() if r.done() and not r.cancelled() else b"" for r in self._readers)
        return out.decode(errors="replace").strip(), error.decode(errors="replace").strip()


async def _tell(channel: socket.socket | None, answer: bytes) -> None:
    """Write the answer, of any length, until the program has read it or has ended."""
    if channel is not None:
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(channel, answer)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end; return its last bytes."""
    kept = b""
    while data := await stream.read(_MAX_OUTPUT_BYTES):
        kept = (kept + data)[-_MAX_OUTPUT_BYTES:]
    return kept


class Session:
    """A program, what it asks, and where its turns are in the sample that it drives."""

    def __init__(self, program: Program, inbox: Inbox, conversations: Conversations) -> None:
        self.program, self.inbox, self.conversations = program, inbox, conversations
        self.request: Request | None = None  # whose turn is being sampled
        self.limit: Literal["turns", "length"] | None = None  # for which its latest request was refused
        self.num_calls = 0  # of tools, so far
        self.watch = asyncio.create_task(program.end())
        self.watch.add_done_callback(lambda _: inbox.changed.set())

    async def next(self) -> Request | int:
        """Return the program's next request, or its exit code once it has ended."""
        while True:
            self.inbox.changed.clear()
            if self.watch.done():
                return self.watch.result()
            if (request := self.inbox.take()) is not None:
                return request
            await self.inbox.changed.wait()


class AgentPrograms:
    """The programs of all samples: how to start them, those that run, and the endpoint that they ask.

    Raises:
        UserError: the command is missing or cannot be found.
    """

    def __init__(self, config: Config) -> None:
        self.timeout_s = config.environment.timeout_s
        self.endpoint = Endpoint()
        self._sessions: set[Session] = set()
        self._seed = config.run.seed
        self._command = _command(config.environment.options)
        self._has_judge = config.has_judge
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inherited, left_out = inherited(os.environ)
        if left_out:
            log.warning(
                "agents: programs start without %s: OpenAI's client would refuse to start with it; a program that "
                'needs it gets it by its command, such as ["env", "ALL_PROXY=...", "python", ...]',
                ", ".join(left_out),
            )

    async def start(self, sample: Sample, conversations: Conversations) -> Session:
        """Start the program of a sample. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        await self.endpoint.start()
        inbox = self.endpoint.open()
        answer = None if self._has_judge else json.dumps(sample.prompt.answer)
        try:
            program = await Program.start(self._words(sample.prompt), self._variables(sample, inbox), answer)
        except BaseException:
            self.endpoint.shut(inbox)
            raise
        session = Session(program, inbox, conversations)
        self._sessions.add(session)
        return session

    def end(self, session: Session) -> None:
        """Kill a program, if it still runs, and forget its key. Safe to call twice."""
        if session in self._sessions:
            self._sessions.remove(session)
            session.program.kill()
            self.endpoint.shut(session.inbox)

    def close(self) -> None:
        """Kill all programs, and stop the endpoint. Safe to call twice."""
        for session in self._sessions:
            session.program.kill()
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(3 * _END_TIMEOUT_S)

    async def _close(self) -> None:
        sessions = [*self._sessions]
        self._sessions.clear()
        for session in sessions:
            self.endpoint.shut(session.inbox)
        if sessions:
            await asyncio.wait([session.watch for session in sessions], timeout=_END_TIMEOUT_S)
        await self.endpoint.close()

    def _words(self, prompt: Prompt) -> list[str]:
        return [word.replace("{prompt}", prompt.text) for word in self._command]

    def _variables(self, sample: Sample, inbox: Inbox) -> dict[str, str]:
        """Return a program's environment: this process's, without the engines' key, and what it should ask. It holds no
        answer: commands that a program runs for the policy inherit it."""
        of, seed = sample.prompt, sample_seed(self._seed, sample.sample_id)
        task = {"prompt": of.text, "source": of.source, "seed": seed}
        rewards = {} if self._has_judge else {REWARD_VARIABLE: str(REWARD_FD)}
        return {
            **self._inherited,
            **rewards,
            "OPENAI_BASE_URL": self.endpoint.url,
            "OPENAI_API_KEY": inbox.key,
            "OPENAI_MODEL": MODEL,
            "BAPO_TASK": json.dumps(task),
        }


def inherited(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment that programs inherit, and the names of proxies that they do not: an HTTP client may be
    unable to read those. The engines' key is left out too. Programs ask the policy on loopback, past every proxy.

    Source: httpx 0.28, which OpenAI's client uses, _utils.py: get_environment_proxies.
    """
    kept = {name: value for name, value in variables.items() if name != KEY_VARIABLE}
    left_out = [name for name, value in kept.items() if name.lower() in _PROXIES and not _is_http_proxy(value)]
    for name in left_out:
        del kept[name]
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for text in kept.get(name, "").split(",") if (host := text.strip())]
        left_out += [f"{host} of {name}" for host in hosts if not _HOST.fullmatch(host)]
        kept[name] = ",".join([*filter(_HOST.fullmatch, hosts), "127.0.0.1"])
    return kept, left_out


def _is_http_proxy(value: str) -> bool:
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        return not value or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:  # its port is not a number
        return False


def _command(options: Mapping[str, Any]) -> tuple[str, ...]:
    command = options.get("command")
    if options.keys() != {"command"} or not isinstance(command, list) or not command:
        raise UserError(f"{_EXPECTED}, a program and its arguments, not {dict(options)!r:.200}")
    if not all(isinstance(word, str) and "\0" not in word for word in command):
        raise UserError(f"{_EXPECTED}, all of it texts, not {command!r:.200}")
    if shutil.which(command[0]) is None:
        raise UserError(
            f"environment.options: the program {command[0]!r} cannot be found: give its path, or the name of one on "
            "PATH"
        )
    return tuple(command)


@dataclass(slots=True)
class AgentDriver(SampleDriver):
    """The driver of samples whose programs ask for turns."""

    programs: AgentPrograms
    chat: Continuation  # called in a thread of its own, so that long texts stop no other sample: nobody shares it
    decode: Callable[[Sequence[int]], str]  # the text of a turn, without special tokens
    max_response_tokens: int  # sampled tokens over all turns
    max_given_tokens: int  # the program's, in one trajectory
    max_turns: int
    answers: Answers = field(default_factory=Answers)
    by_group: bool = field(default=False, init=False)
    first_need: Need = field(default=NeedsEnvironment(None), init=False)
    _sessions: dict[str, Session] = field(default_factory=dict, init=False)  # by sample id
    _tokeniser: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "tokeniser"), init=False)

    @property
    def deadline_s(self) -> float:
        return self.programs.timeout_s + 2 * _END_TIMEOUT_S + self.answers.deadline_s

    def close(self) -> None:
        """End all programs, and the judge's processes. Safe to call twice."""
        self.programs.close()
        self._tokeniser.shutdown(wait=False, cancel_futures=True)
        self.answers.close()

    def _forget(self, sample: Sample) -> None:
        """End the program of a sample, if it has one."""
        if (session := self._sessions.pop(sample.sample_id, None)) is not None:
            self.programs.end(session)

    async def _advance(self, sample: Sample) -> Sample:
        """Hand the program the turn that it asked for; return its sample with its next request, or its end."""
        began_s = time.monotonic()
        try:
            return await self._answered(sample)
        finally:
            self.answers.wait(time.monotonic() - began_s)

    async def _answered(self, sample: Sample) -> Sample:
        assert isinstance(sample.need, NeedsEnvironment), f"{sample.sample_id} does not wait for its program"
        if sample.need.turn_end is None:
            self._forget(sample)  # asked again, a sample begins again
            try:
                session = await self.programs.start(sample, Conversations(self.chat, self.max_given_tokens))
            except (OSError, ValueError) as problem:  # ValueError: a prompt with a null character
                answer = Failed(f"the program cannot be started: {problem}")
                return await self.answers.failed(sample, answer, self.decode)
            self._sessions[sample.sample_id] = session
        else:
            session = self._sessions[sample.sample_id]
            self._reply(sample, session, sample.need.turn_end)
        exit_code: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.programs.timeout_s):
                while isinstance(found := await session.next(), Request):
                    if (grown := await self._asked(sample, session, found)) is not None:
                        return grown
                exit_code = found
        return await self._ended(sample, session, exit_code)

    def _reply(self, sample: Sample, session: Session, turn_end: TurnEnd) -> None:
        """Hand the turn that has ended to the request that asked for it, if that has not been done yet."""
        if (request := session.request) is None:
            return
        session.request = None
        asked, turn = request.asked, sample.turn.turns[-1].tolist()
        text = self.decode(turn)
        tools = {one["function"]["name"]: one["function"].get("parameters", {}) for one in asked.tools}
        parsed = parse_turn(text, tools if asked.calls else {})
        calls = [call for call in parsed.calls if isinstance(call, Call)]
        if len(calls) < len(parsed.calls):  # a call that cannot be read stays text
            parsed, calls = parse_turn(text, {}), []
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call{session.num_calls + number:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
            ]
            session.num_calls += len(calls)
        session.conversations.keep(sample, asked, message, is_cut=turn_end == "length")
        reason: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else turn_end
        num_before = sample.turn.num_tokens - len(turn)
        request.reply.set_result(Reply(message, parsed.thought, reason, num_before, len(turn)))

    async def _asked(self, sample: Sample, session: Session, request: Request) -> Sample | None:
        """Return the sample, which needs the turn that a request asks for; or refuse the request, and return None."""
        try:
            if (num_turns := sum(len(t.turns) for t in sample.trajectories)) >= self.max_turns:
                raise TurnsError(f"this sample has taken the {plural(num_turns, 'turn')} of environment.max_turns")
            if sample.num_sampled_tokens >= self.max_response_tokens:
                raise ContextError(f"this sample has all {self.max_response_tokens} tokens that its turns may have")
            loop = asyncio.get_running_loop()
            grown = await loop.run_in_executor(self._tokeniser, session.conversations.continued, sample, request.asked)
        except BadRequestError as refusal:
            is_too_long = isinstance(refusal, ContextError)
            session.limit = "turns" if isinstance(refusal, TurnsError) else "length" if is_too_long else None
            session.inbox.refuse(request, refusal)
            return None
        session.request, session.limit = request, None
        return grown

    async def _ended(self, sample: Sample, session: Session, exit_code: int | None) -> Sample:
        """Return the sample as its program's end leaves it, after `exit_code`, or killed at its deadline (None)."""
        out, error = await session.program.output()
        self._forget(sample)
        how = f"ended with exit code {exit_code}"
        if exit_code is None:
            how = f"neither asked nor ended within environment.timeout_s={self.programs.timeout_s:g}"
        shown = f"; it printed: {(error or out)[-_MAX_SHOWN:]}" if error or out else "; it printed nothing"
        problem: Literal["timeout", "error"] = "timeout" if exit_code is None else "error"
        when = "" if sample.num_sampled_tokens else " before it had a turn"
        if when or (exit_code != 0 and session.limit is None):
            return await self.answers.failed(sample, Failed(f"the program {how}{when}{shown}", problem), self.decode)
        is_full = sample.num_sampled_tokens >= self.max_response_tokens
        reason = session.limit or ("length" if is_full else "stop")
        if self.answers.scorer is not None:
            return replace(sample, need=await self.answers.judged(sample, self.decode, reason))
        if exit_code == 0 and session.program.written:
            answer = _written(session.program.written)
        elif session.limit is not None:
            answer = End(0.0)
        elif _is_about_a_reward(out):
            told = "the program printed its reward, but what it prints may be the policy's words"
            answer = Failed(f"{told}: it must {WRITE}{shown}")
        else:
            answer = Failed(f"the program ended without a reward: {WRITE}{shown}")
        if isinstance(answer, Failed):
            return await self.answers.failed(sample, answer, self.decode)
        self.answers.end()
        return replace(sample, need=ended(reason, [answer.reward]))


class TurnsError(BadRequestError):
    """A request for more turns than a sample may have."""

    code = "turn_limit_exceeded"


def _written(data: bytes) -> End | Failed:
    """Return what a program has written to its descriptor, such as {"reward": 1.0} or {"failed": "no screen"}."""
    if len(data) > _MAX_REWARD_BYTES:
        return Failed(f"the program wrote more than {_MAX_REWARD_BYTES} bytes to the descriptor {REWARD_VARIABLE}")
    try:
        answer = as_answer(json.loads(data))
    except (TypeError, ValueError, RecursionError) as misfit:
        problem = str(misfit)
    else:
        if isinstance(answer, End | Failed):
            return answer
        problem = "it has neither a reward nor a failure"
    shown = data[:200].decode(errors="replace")
    return Failed(f"what the program wrote to the descriptor {REWARD_VARIABLE} is not a reward: {problem}: {shown}")


def _is_about_a_reward(out: str) -> bool:
    """Return whether the last line of a program's output is an object with a reward or a failure."""
    try:
        value = json.loads(out.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.keys() & {"reward", "failed"})


def prints_its_reward(options: Mapping[str, Any]) -> str | None:
    """Return the file in a command that names a reward, but not the descriptor for it; None if there is none."""
    for word in options.get("command", ()):
        with contextlib.suppress(OSError, TypeError, ValueError):  # it is not a path, or not a text
            if (path := Path(word)).is_file() and path.stat().st_size < _MAX_SCRIPT_BYTES:
                text = path.read_text(encoding="utf-8")
                if _NAMES_REWARD.search(text) and REWARD_VARIABLE not in text:
                    return word
    return None
