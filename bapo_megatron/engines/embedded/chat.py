"""`bapo chat`: a conversation in the terminal, in which the model may call tools."""

import asyncio
import concurrent.futures
import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.text import Reply, TextModel
from bapo_megatron.errors import escaped_lines
from bapo_megatron.runtime.bodies import BadRequestError

_END_TIMEOUT_S = 60.0  # for one engine step

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTools:
    """What the model may call."""

    answer: Callable[[str, Any], tuple[Sequence[Message], Any] | None]
    """From the text of a turn and the state of the tools to messages and the next state; None for a turn without a
    call. Raises BadRequestError."""
    schemas: Sequence[Mapping[str, Any]]  # for the chat template; empty if it gets none
    max_turns: int  # that the model takes until it answers without a call


def chat(model: TextModel, *, temperature: float, system: str | None, tools: ChatTools | None = None) -> None:
    """Read messages and print replies as they grow, until input ends. Ctrl-C stops a reply.

    Args:
        tools: for a model whose chat template takes their answers.
    """
    start = [{"role": "system", "content": system}] if system else []
    try:
        _converse(model, temperature, _Plain(model, start) if tools is None else _WithTools(model, start, tools))
    finally:  # a thread inside torch can crash Python's shutdown, and a stopped reply may have a step to finish
        concurrent.futures.wait([model.engine.call(lambda: None, when_still=True)], _END_TIMEOUT_S)


@dataclass(slots=True)
class _Plain:
    """A conversation without tools: the chat template writes all of it again for each reply."""

    model: TextModel
    start: list[dict[str, Any]]
    _messages: list[dict[str, Any]] = field(default_factory=list)

    def clear(self) -> None:
        self._messages = []

    def asked(self, text: str) -> list[int]:
        """Return the tokens after which the model replies to a message. Raises BadRequestError."""
        self._messages.append({"role": "user", "content": text})
        return self.model.encode_chat([*self.start, *self._messages])

    def replied(self, text: str, token_ids: Sequence[int], *, is_cut: bool, is_stopped: bool) -> list[int] | None:
        """Take the model's reply; return the tokens after which it replies again, or None."""
        self._messages.append({"role": "assistant", "content": text})
        return None


class _WithTools:
    """A conversation with tools, whose tokens grow as in training: nothing is written again."""

    def __init__(self, model: TextModel, start: list[dict[str, Any]], tools: ChatTools) -> None:
        self._model, self._start, self._tools = model, start, tools
        assert model.template is not None, "check_tools checks this"
        self._template = model.template
        self.clear()

    def clear(self) -> None:
        self._token_ids: list[int] = []
        self._turn: tuple[Sequence[int], bool] = ((), False)
        self._state: Any = None
        self._num_turns = 0

    def asked(self, text: str) -> list[int]:
        """Return the tokens after which the model replies to a message. Raises BadRequestError."""
        self._num_turns = 0
        message = {"role": "user", "content": text}
        if self._token_ids:
            return self._continued([message])
        self._token_ids = self._model.encode_chat([*self._start, message], self._tools.schemas)
        return self._token_ids

    def replied(self, text: str, token_ids: Sequence[int], *, is_cut: bool, is_stopped: bool) -> list[int] | None:
        """Take the model's reply and print what its calls return; return the tokens after which it replies again, or
        None if it has called nothing or was stopped. Raises BadRequestError."""
        self._token_ids = [*self._token_ids, *token_ids]
        self._turn = (token_ids, is_cut)
        self._num_turns += 1
        if is_stopped or (answer := self._tools.answer(text, self._state)) is None:
            return None
        messages, self._state = answer
        for message in messages:
            print(escaped_lines(f"[{message.get('name', message['role'])}] {message['content'].rstrip()}"))
        if self._num_turns < self._tools.max_turns:
            return self._continued(messages)
        print(f"(stopped after {self._num_turns} turns)")
        return None

    def _continued(self, messages: Sequence[Message]) -> list[int]:
        turn, is_cut = self._turn
        room = self._model.room(self._token_ids)
        try:
            between, _ = self._template.ids(messages, turn, is_cut=is_cut, max_tokens=room)
        except ValueError as problem:
            raise BadRequestError(str(problem)) from None
        self._token_ids = [*self._token_ids, *between]
        return self._token_ids


def _converse(model: TextModel, temperature: float, conversation: _Plain | _WithTools) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and recalled

    if isinstance(sys.stdin, io.TextIOWrapper):  # what is not UTF-8 is answered, like text that does not fit
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        kept = "the conversation" if model.tokenizer.chat_template else "nothing: it has no chat template"
        print(f"{model.name} remembers {kept}; Ctrl-C stops a reply, Ctrl-D ends")
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:  # discard the line
            print()
            continue
        if not text.strip():
            continue
        try:
            prompt_ids: list[int] | None = conversation.asked(text)
            while prompt_ids is not None:
                prompt_ids = _reply(model, temperature, conversation, prompt_ids)
        except BadRequestError as error:
            print(f"{error}; starting over")
            conversation.clear()
        except KeyboardInterrupt:  # while a tool works
            print()


def _reply(
    model: TextModel, temperature: float, conversation: _Plain | _WithTools, prompt_ids: list[int]
) -> list[int] | None:
    """Print one reply as it grows; return the tokens after which the model replies again, or None."""
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=model.room(prompt_ids),
        stop_token_ids=list(model.chat_stop_ids),
    )
    reply = Reply(model, prompt_ids, params)
    said: list[str] = []
    is_stopped = True
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_print(reply, said))
        is_stopped = False
    print()
    is_cut, token_ids = is_stopped or reply.finish_reason == "length", list(reply.sequence.output_ids)
    return conversation.replied("".join(said), token_ids, is_cut=is_cut, is_stopped=is_stopped)


async def _print(reply: Reply, said: list[str]) -> None:
    """Print the reply as it grows, and collect its pieces."""
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for text in pieces:
            print(escaped_lines(text), end="", flush=True)
            said.append(text)
