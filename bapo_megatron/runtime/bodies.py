"""Bodies of HTTP requests: how our servers read them, and how they refuse bad ones; OpenAI's API among them.

A field that a server lacks is refused by name, unless its value asks for nothing.
"""

import functools
import itertools
import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from bapo_megatron.errors import UserError

_MAX_NAMED, _MAX_SHOWN = 20, 200  # bad fields in a refusal, and characters of each
_TAGS = ("prompt", "batch", "dict", "list")  # pydantic names them in a path, but no JSON has them


class BadRequestError(UserError):
    """A request that the server refuses, with its HTTP status and OpenAI's name for the reason, if there is one."""

    status: ClassVar[int] = 400
    code: ClassVar[str | None] = None


class NotNowError(BadRequestError):
    """A request that the server's state does not allow."""

    status = 409


class RequestBody(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Body = TypeVar("Body", bound=RequestBody)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Read a JSON body. Raises BadRequestError naming each bad field."""
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as problem:
        fields = {_path(e["loc"]): _reason(e) for e in problem.errors(include_url=False)}
        first = [f"{field}{reason}"[:_MAX_SHOWN] for field, reason in itertools.islice(fields.items(), _MAX_NAMED)]
        raise BadRequestError("; ".join(first)) from None


def _reason(error: ErrorDetails) -> str:
    """Explain in plain words why a field is refused; the text follows the field's name."""
    only = error.get("ctx", {}).get("expected")
    if error["type"] in ("extra_forbidden", "none_required") or only in ("0", "False"):
        return " is not supported"
    if error["type"] == "missing":
        return " is missing"
    return ": " + error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part not in _TAGS) or "body"


class UnknownModelError(BadRequestError):
    """A request for a model that this server does not have."""

    status, code = 404, "model_not_found"


_NOTHING: tuple[Any, ...] = (None, "", [], {})
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "echo": (False,),
}
"""Values of fields that ask for nothing else than what a server does without the field."""


class OpenAIBody(RequestBody):
    """A part of a request of OpenAI's clients, which may send fields that ask for nothing: a refused field that is
    empty, or has OpenAI's, vLLM's or SGLang's default."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if not cls._asks_for_nothing(key, value)}

    @classmethod
    def _asks_for_nothing(cls, key: str, value: Any) -> bool:
        if key in cls.model_fields and cls.model_fields[key].annotation is not NoneType:
            return False
        defaults = [one for one in _DEFAULTS.get(key, ()) if isinstance(one, bool) == isinstance(value, bool)]
        return value in _NOTHING or value in defaults  # to Python, true is 1


class StreamOptions(OpenAIBody):
    """What a streamed reply contains besides its text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(OpenAIBody):
    """A part of a message's content. Images and sounds are refused."""

    type: Literal["text"]
    text: str


async def send_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Send one event of a streamed reply."""
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def openai_error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return what OpenAI's API says of an error."""
    return {"message": message, "type": kind, "param": None, "code": code}


def openai_errors(handler: Handler) -> Handler:
    """Answer a bad request with OpenAI's error body."""

    @functools.wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequestError as error:
            refusal = error
        except web.RequestPayloadError as error:  # cut off, or not in the encoding that its header names
            refusal = BadRequestError(f"body: {' '.join(str(error).split())}")
        body = {"error": openai_error(str(refusal), "invalid_request_error", refusal.code)}
        return web.json_response(body, status=refusal.status)

    return answer
