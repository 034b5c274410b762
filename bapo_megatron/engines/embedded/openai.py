"""OpenAI's routes on an embedded engine: /v1/models, /v1/completions and /v1/chat/completions, streamed or not.

Source: the API reference at platform.openai.com (2026-11), and the openai client 2.8. Fields without effect here
are accepted and ignored. A field that needs something this engine lacks is refused, unless its value asks for nothing.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field, StrictInt

from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.text import Reply, TextModel
from bapo_megatron.runtime.bodies import (
    BadRequestError,
    OpenAIBody,
    StreamOptions,
    TextPart,
    UnknownModelError,
    openai_error,
    openai_errors,
    parse,
    send_event,
)

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
_MAX_CHOICES = 128


class _Common(OpenAIBody):
    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1  # top_k and min_p: as vLLM and SGLang extend the API
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        """The stop texts; an empty one stops nothing."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    def sampling(self, max_new_tokens: int, stop_ids: Sequence[int]) -> SamplingParams:
        """Return the engine's parameters. Raises BadRequestError, naming the field."""
        params = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": [*stop_ids],
            "sampling_seed": None if self.seed is None else self.seed % 2**63,
        }
        return parse(SamplingParams, json.dumps(params).encode())


class _CompletionBody(_Common):
    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]]
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: None = None


class _Message(OpenAIBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class _ChatBody(_Common):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = None


class OpenAIRoutes:
    """OpenAI's routes for one model."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._started_s = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", openai_errors(self.models)),
            web.get("/v1/models/{name:.+}", openai_errors(self.one_model)),
            web.post("/v1/completions", openai_errors(self.completions)),
            web.post("/v1/chat/completions", openai_errors(self.chat)),
        ]

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        self._check_name(request.match_info["name"])
        return web.json_response(self._card())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(_CompletionBody, await request.read())
        self._check_name(body.model)
        given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if given and isinstance(given[0], int):
            given = [given]
        if not given or len(given) * body.n > _MAX_CHOICES:
            raise BadRequestError(f"prompt: prompts x n must be 1 to {_MAX_CHOICES}, got {len(given) * body.n}")
        encode = self._model.encode
        prompts = await self._model.in_thread(lambda: [encode(one) if isinstance(one, str) else one for one in given])
        limits = [min(body.max_tokens or _DEFAULT_COMPLETION_TOKENS, self._model.room(ids)) for ids in prompts]

        def choice(text: str) -> dict[str, Any]:
            return {"text": text, "logprobs": None}

        return await self._answer(request, body, prompts, limits, "text_completion", choice, choice)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(_ChatBody, await request.read())
        self._check_name(body.model)
        messages = [message.plain() for message in body.messages]
        prompt_ids = await self._model.in_thread(lambda: self._model.encode_chat(messages))
        room = self._model.room(prompt_ids)
        limit = min(body.max_completion_tokens or body.max_tokens or room, room)

        def whole(text: str) -> dict[str, Any]:
            return {"message": {"role": "assistant", "content": text}, "logprobs": None}

        def delta(text: str) -> dict[str, Any]:
            return {"delta": {"role": "assistant", "content": text}, "logprobs": None}

        ends = self._model.chat_stop_ids
        return await self._answer(request, body, [prompt_ids], [limit], "chat.completion", whole, delta, ends)

    async def _answer(
        self,
        request: web.Request,
        body: _Common,
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        kind: str,
        whole: Callable[[str], dict[str, Any]],
        delta: Callable[[str], dict[str, Any]],
        stop_ids: Sequence[int] = (),
    ) -> web.StreamResponse:
        """Sample n replies to each prompt, which `stop_ids` end too; `whole` and `delta` put text into a choice."""
        replies = [
            Reply(self._model, ids, body.sampling(limit, stop_ids), body.stops, index)
            for ids, limit in zip(prompts, limits, strict=True)
            for index in range(body.n)
        ]
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model.name}
        if not body.stream:
            texts = [""] * len(replies)
            async with contextlib.aclosing(merged(replies)) as pieces:
                async for number, text in pieces:
                    texts[number] += text
            choices = [
                {"index": i, **whole(text), "finish_reason": reply.finish_reason}
                for i, (text, reply) in enumerate(zip(texts, replies, strict=True))
            ]
            return web.json_response({**head, "object": kind, "choices": choices, "usage": _usage(prompts, replies)})
        head["object"] = kind if kind == "text_completion" else f"{kind}.chunk"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            async with contextlib.aclosing(merged(replies)) as pieces:
                async for number, text in pieces:
                    choice = {"index": number, **delta(text), "finish_reason": None}
                    await send_event(response, {**head, "choices": [choice]})
            for number, reply in enumerate(replies):
                choice = {"index": number, **delta(""), "finish_reason": reply.finish_reason}
                await send_event(response, {**head, "choices": [choice]})
            if body.stream_options and body.stream_options.include_usage:
                await send_event(response, {**head, "choices": [], "usage": _usage(prompts, replies)})
        except FloatingPointError as error:  # too late for an HTTP status
            await send_event(response, {"error": openai_error(str(error), "server_error")})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "bapo_megatron",
            "max_model_len": self._model.engine.max_context,  # as vLLM and SGLang extend the API
        }

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            raise UnknownModelError(f"model: there is no {name!r} here; this server has {self._model.name!r}")


async def merged(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, str], None]:
    """Sample all replies at the same time; yield the number of a reply and its next piece of text."""
    queue: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def follow(number: int, reply: Reply) -> None:
        async with contextlib.aclosing(reply.pieces()) as pieces:
            async for text in pieces:
                queue.put_nowait((number, text))

    following = asyncio.gather(*(follow(number, reply) for number, reply in enumerate(replies)))
    try:
        while not (following.done() and queue.empty()):
            get = asyncio.ensure_future(queue.get())
            await asyncio.wait((get, following), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                yield get.result()
            else:
                get.cancel()
        await following  # raises what went wrong
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _usage(prompts: Sequence[list[int]], replies: Sequence[Reply]) -> dict[str, int]:
    num_prompt = sum(len(ids) for ids in prompts)
    num_completion = sum(len(reply.sequence.output_ids) for reply in replies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
