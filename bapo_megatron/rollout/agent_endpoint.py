"""The OpenAI-compatible endpoint of agent programs: Chat Completions, streamed or not, on loopback.

A key names the sample that a program drives. Its requests wait in the sample's `Inbox` until the policy's turn is
sampled. A client that repeats a request gets the turn that it has asked for already.

The run decides how tokens are sampled: temperature, top_p, seed and the like are accepted and have no effect. A field
that would need another effect is refused, unless its value asks for nothing.
"""

import asyncio
import json
import secrets
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field, field_validator

from bapo_megatron.prompts.json_values import json_problem, read_json
from bapo_megatron.rollout.conversations import Asked, Message
from bapo_megatron.runtime.bodies import (
    BadRequestError,
    OpenAIBody,
    StreamOptions,
    TextPart,
    UnknownModelError,
    openai_errors,
    parse,
    send_event,
)
from bapo_megatron.runtime.site import Site, listen
from bapo_megatron.runtime.web import Guard

MODEL = "policy"
"""The only model's name."""
_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 16 * 2**20
_MAX_TOOLS, _MAX_NAME_CHARS = 1024, 256  # their names become one regular expression
_SHUTDOWN_S = 5.0  # for connections that are still open; their programs have ended
_RETRIES_HEADER = "x-stainless-retry-count"  # OpenAI's clients count in it how often a request was sent before


class _UnknownKeyError(BadRequestError):
    """A request whose key names no sample."""

    status, code = 401, "invalid_api_key"


class _Ignored(OpenAIBody):
    """Fields without effect."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    user: str | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


class _Function(OpenAIBody):
    name: str
    arguments: str


class _Call(OpenAIBody):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None


class _Message(OpenAIBody):
    """A message. A program may send back what it got, with thoughts under any of their names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    provider_specific_fields: dict[str, Any] | None = None
    refusal: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    audio: None = None

    def plain(self) -> Message:
        """Return the message as chat templates read it. Raises ValueError if a call's arguments are not JSON."""
        parts = [] if self.content is None else self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.role == "tool":
            message |= {k: v for k, v in (("name", self.name), ("tool_call_id", self.tool_call_id)) if v is not None}
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        return message


def _plain_call(call: _Call) -> dict[str, Any]:
    try:
        arguments = read_json(call.function.arguments or "{}")
    except ValueError as problem:
        raise BadRequestError(f"messages: the arguments of a call are not JSON: {problem}") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


class _Offer(OpenAIBody):
    name: str = Field(min_length=1, max_length=_MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _describe_arguments(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        properties = (schema or {}).get("properties", {})
        if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
            raise ValueError("properties must be an object of JSON schemas")
        if problem := json_problem(schema):
            raise ValueError(f"it {problem}")
        return schema


class _Tool(OpenAIBody):
    type: Literal["function"]
    function: _Offer


class _Text(OpenAIBody):
    type: Literal["text"]


class _ChatBody(_Ignored):
    model: str
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[_Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: Literal[1] | None = None
    stop: None = None
    logit_bias: None = None
    logprobs: Literal[False] | None = None
    response_format: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def asked(self) -> Asked:
        return Asked(
            messages=tuple(message.plain() for message in self.messages),
            tools=tuple(
                tool.model_dump(exclude={"function": {"strict"}}, exclude_none=True) for tool in self.tools or ()
            ),
            calls=self.tool_choice != "none",
            max_tokens=self.max_completion_tokens or self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy, as its program gets it."""

    message: Message  # as chat templates read it, without thoughts
    thought: str
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_turn_tokens: int

    def wire(self) -> dict[str, Any]:
        """Return the message as OpenAI writes it."""
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in self.message.get("tool_calls", ())
        ]
        content = self.message["content"] or (None if calls else "")
        thought = {"reasoning_content": self.thought} if self.thought else {}
        return {"role": "assistant", "content": content, **thought, **({"tool_calls": calls} if calls else {})}


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits for its turn, or has got it."""

    asked: Asked
    reply: asyncio.Future[Reply]
    num_listening: int = 0  # connections that wait for it
    is_delivered: bool = False  # whether one of them got it whole


@dataclass(slots=True)
class Inbox:
    """The requests of one sample's program, answered one after the other."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[Request] = field(default_factory=deque)
    _taken: list[Request] = field(default_factory=list)  # being answered, or answered

    def put(self, asked: Asked, *, is_repeated: bool) -> Request:
        """Return the request that a client has sent before, or a new one.

        Args:
            is_repeated: whether the client says that it repeats a request. Otherwise it does so if the same request
                has lost its connection before it got its turn.
        """
        same = [r for r in (*self._waiting, *self._taken) if r.asked == asked and not r.reply.cancelled()]
        lost = [r for r in same if not (r.num_listening or r.is_delivered)]
        if found := lost or (same if is_repeated else []):
            return found[-1]
        request = Request(asked, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.changed.set()
        return request

    def take(self) -> Request | None:
        """Return the next request that somebody waits for, or None."""
        while self._waiting:
            request = self._waiting.popleft()
            if request.num_listening:
                self._taken.append(request)
                return request
        return None

    def refuse(self, request: Request, reason: BadRequestError) -> None:
        """Answer a request with a refusal; repeated, it is a new one."""
        self._taken.remove(request)
        if request.num_listening:  # otherwise nobody would retrieve the exception
            request.reply.set_exception(reason)
        else:
            request.reply.cancel()

    def close(self) -> None:
        """Drop the requests without a reply: their program has ended."""
        for request in (*self._waiting, *self._taken):
            request.reply.cancel()


class Endpoint:
    """The server, on the event loop that starts it."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}  # by key
        self._site: Site | None = None
        self._port = 0
        self._started_s = int(time.time())

    @property
    def url(self) -> str:
        """The base URL for clients; the server must have started."""
        return f"http://{_HOST}:{self._port}/v1"

    async def start(self) -> None:
        """Listen on a free port, unless it does already."""
        if self._site is not None:
            return
        self._site = Site(Guard(_HOST, self._inboxes.keys()))
        sockets = listen(_HOST, 0)  # before anything is awaited: others start programs meanwhile
        self._port = sockets[0].getsockname()[1]
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._site.guarded])
        app.add_routes(
            [
                web.get("/v1/models", openai_errors(self._models)),
                web.post("/v1/chat/completions", openai_errors(self._chat)),
            ]
        )
        await self._site.start(app, sockets, _SHUTDOWN_S)

    async def close(self) -> None:
        """Stop listening."""
        if self._site is not None:
            await self._site.close()
            self._site = None

    def open(self) -> Inbox:
        """Return a new inbox, whose key lets a program in."""
        inbox = Inbox()
        self._inboxes[inbox.key] = inbox
        return inbox

    def shut(self, inbox: Inbox) -> None:
        """Refuse further requests from the inbox's program."""
        del self._inboxes[inbox.key]
        inbox.close()

    def _inbox(self, request: web.Request) -> Inbox:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (inbox := self._inboxes.get(key)) is None:
            raise _UnknownKeyError("the key is not OPENAI_API_KEY of a program that runs")
        return inbox

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._inbox(request)
        card = {"id": MODEL, "object": "model", "created": self._started_s, "owned_by": "bapo_megatron"}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        inbox = self._inbox(request)
        body = parse(_ChatBody, await request.read())
        if body.model != MODEL:
            raise UnknownModelError(f"model: there is no {body.model!r:.80} here; the policy is {MODEL!r}")
        is_repeated = request.headers.get(_RETRIES_HEADER, "0") != "0"
        found = inbox.put(body.asked(), is_repeated=is_repeated)
        found.num_listening += 1
        try:
            reply = await asyncio.shield(found.reply)
            response = await (_streamed(request, body, reply) if body.stream else _whole(request, reply))
            found.is_delivered = True
        finally:
            found.num_listening -= 1
        return response


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL, "object": kind}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, turn = reply.num_prompt_tokens, reply.num_turn_tokens
    return {"prompt_tokens": prompt, "completion_tokens": turn, "total_tokens": prompt + turn}


async def _whole(request: web.Request, reply: Reply) -> web.StreamResponse:
    choice = {"index": 0, "message": reply.wire(), "finish_reason": reply.finish_reason, "logprobs": None}
    body = {**_head("chat.completion"), "choices": [choice], "usage": _usage(reply)}
    response = web.json_response(body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def _streamed(request: web.Request, body: _ChatBody, reply: Reply) -> web.StreamResponse:
    """Send the turn in two events: all of it, then why it ended."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    head, message = _head("chat.completion.chunk"), reply.wire()
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    if calls:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    for delta, reason in ((message, None), ({}, reply.finish_reason)):
        await send_event(response, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    if body.stream_options is not None and body.stream_options.include_usage:
        await send_event(response, {**head, "choices": [], "usage": _usage(reply)})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
