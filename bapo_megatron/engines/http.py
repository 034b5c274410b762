"""A rollout engine behind HTTP: SGLang, or the embedded engine, which speaks the same API.

Every reply is checked before it is used; a bad one becomes an `EngineError` that names server and request. Retrying
is up to the dispatcher. Replies of many tokens are decoded into typed entries and checked as arrays: rank 0 reads every
token of a step (benchmarks/replies.py).
"""

import asyncio
import base64
import json
import reprlib
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypedDict, TypeVar

import aiohttp
import msgspec
import numpy as np

from bapo_megatron.engines.base import (
    Capabilities,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    TokenScores,
    VersionSpan,
)
from bapo_megatron.engines.transport import HttpTransport, as_dict
from bapo_megatron.errors import (
    BroadcastLostError,
    EngineError,
    KeyRefusedError,
    RequestRefusedError,
    UnreachableEngineError,
    escaped,
    plural,
)
from bapo_megatron.hf.streams import ROUTES
from bapo_megatron.tokens import Array, Rows, TokenStream, read_only

_HEALTH_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 20.0
IDLE_S = 1.0  # an idle connection is not reused after this time: uvicorn closes it after 5 s, and would lose a request
_LOGPROB_SLACK = 1e-4  # rounding may put a log-prob of exactly 0 this much above it
_MAX_FLOAT = sys.float_info.max
_UNVERSIONED = "default"  # what a server calls the weights it started with
_REFUSALS = (400, 401, 403, 404, 405, 413, 422)  # the request is wrong; 408 and 429 mean try again later
_LOST_BROADCAST = "Failed to receive weights"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)
_FINISH_REASONS = ("stop", "length", "abort")
_JSON_HEADERS = {"Content-Type": "application/json"}
_MAX_DIGITS = 18  # digits of a weight version
_MAX_SHOWN = 1000  # bytes of an answer shown in a message
_OWN_ROUTES = ("return_routed_experts", "routed_experts_start_len")  # SGLang's fields that ask for routes
_ROUTES_PIECE = 1 << 20  # characters decoded together: whole numbers
ROUTES_FLAG = "with --enable-return-routed-experts (sglang.extra.enable_return_routed_experts=true)"
# The longest valid replies, in bytes, with room to spare:
_MAX_REPLY = 4 << 20  # SGLang's /server_info repeats its arguments for each data-parallel rank, 20 kB each
_MAX_REPLY_BASE = 16 << 10  # per request: all that does not grow with its tokens
_MAX_REPLY_TOKEN = 256  # per output token: its id twice, its log-probs and its text
_MAX_REPLY_KEPT = 12  # per token that a cut keeps: SGLang lists their ids
_MAX_REPLY_NUMBER = 32  # per number in JSON
_MAX_REPLY_BYTE = 6  # per byte of a larger row, which grows by a third; SGLang sends a byte as four
_MAX_KEPT = 4096  # tokens kept per output token: SGLang's limit


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """An output token's log-prob; the token's text, which may follow, is not read. Millions exist at a time: no GC."""

    logprob: float
    token_id: int


class _Meta(TypedDict, total=False):
    """The fields of `meta_info` that are read. `parse_reply` checks the fields of type Any."""

    id: Any
    finish_reason: Any
    prompt_tokens: Any
    cached_tokens: Any
    weight_versions: Any
    output_token_logprobs: list[_Entry]
    output_token_sampling_logprobs: list[float]
    rows: Any
    routed_experts: Any


class _Reply(TypedDict, total=False):
    """A reply of /generate."""

    output_ids: list[int]
    meta_info: _Meta


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_T = TypeVar("_T")
REPLY = msgspec.json.Decoder(_Reply)
REPLIES = msgspec.json.Decoder(list[_Reply])


class HttpEngine:
    """A client of one server. Belongs to the event loop of its first call."""

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float,
        vocab_size: int | None = None,
        key: str | None = None,
    ) -> None:
        """Make a client that connects with its first call.

        Args:
            vocab_size: bounds the accepted token ids. None means unknown.
            key: what the server asks for. None means nothing.
        """
        self.url = url.rstrip("/")
        self._timeout_s = request_timeout_s
        self._vocab_size = vocab_size
        self._headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._session: aiohttp.ClientSession | None = None
        self._is_sglang: bool | None = None  # it returns routes in SGLang's fields; None means not asked yet
        self._asking = asyncio.Lock()
        self.transport = HttpTransport(self.url, self._call)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_vocabulary(request)
        what, max_bytes = f"request {request.rid}", max_reply_bytes([request])
        own_routes = await self._has_own_routes(request)
        body = _generate_body(request, own_routes=own_routes)
        raw = await self.send_request("POST", "/generate", body, what=what, max_bytes=max_bytes)
        result = await _decoded(lambda: self._result(decode(raw, REPLY), request, own_routes=own_routes), request)
        if isinstance(result, EngineError):
            raise result
        return result

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        """Sample as `Engine.generate_many` does. Rows of a prompt that several requests begin with come once.

        A call to SGLang has one number that says where routes begin, so requests that differ in it are sent in several.
        """
        for request in requests:
            self._check_vocabulary(request)
        firsts, own_routes = _firsts(requests), await self._has_own_routes(requests[0])
        asked = [
            request if requests[first] is request else replace(request, num_fed=len(request.token_ids))
            for request, first in zip(requests, firsts, strict=True)
        ]
        calls: dict[int, list[int]] = {}
        for index, request in enumerate(asked):
            calls.setdefault(request.num_fed if own_routes else 0, []).append(index)
        calling = (self._generate_together([asked[i] for i in call], own_routes=own_routes) for call in calls.values())
        results: dict[int, GenerateResult | EngineError] = {}
        for call, replies in zip(calls.values(), await asyncio.gather(*calling, return_exceptions=True), strict=True):
            if isinstance(replies, BaseException):
                raise replies
            results.update(zip(call, replies, strict=True))

        def complete() -> list[GenerateResult | EngineError]:
            return [
                results[index] if asked[index] is request else self._with_rows(results[index], results[first], request)
                for index, (request, first) in enumerate(zip(requests, firsts, strict=True))
            ]

        return await _decoded(complete, requests[0])

    async def _generate_together(
        self, requests: Sequence[GenerateRequest], *, own_routes: bool
    ) -> list[GenerateResult | EngineError]:
        """Send one call for all requests."""
        bodies = [_generate_body(request, own_routes=own_routes) for request in requests]
        body: dict[str, Any] = {name: [b[name] for b in bodies] for name in ("rid", "input_ids", "sampling_params")}
        what = f"{plural(len(requests), 'request')} from {requests[0].rid} to {requests[-1].rid}"
        body["return_logprob"] = True
        if any(request.is_cut for request in requests):
            body["return_sampling_mask"] = True
        if "return_rows" in bodies[0]:  # all requests of a run ask for the same streams
            body |= {"return_rows": bodies[0]["return_rows"], "num_fed": [b["num_fed"] for b in bodies]}
        body |= {name: bodies[0][name] for name in _OWN_ROUTES if name in bodies[0]}
        raw = await self.send_request("POST", "/generate", body, what=what, max_bytes=max_reply_bytes(requests))

        def read() -> list[GenerateResult | EngineError]:
            decoded = decode(raw, REPLIES)
            if not isinstance(decoded, list) or len(decoded) != len(requests):
                raise EngineError(f"{self.url}, {what}: the reply is not a list of {plural(len(requests), 'result')}")
            return [self._result(*one, own_routes=own_routes) for one in zip(decoded, requests, strict=True)]

        return await _decoded(read, requests[0])

    async def _has_own_routes(self, request: GenerateRequest) -> bool:
        """Return whether the request wants routes that the server returns in SGLang's fields, not as every stream."""
        if not any(stream.name == ROUTES for stream in request.streams):
            return False
        async with self._asking:
            if self._is_sglang is None:
                self._is_sglang = "streams" not in await self.server_info()
        return self._is_sglang

    def _with_rows(
        self, result: GenerateResult | EngineError, first: GenerateResult | EngineError, request: GenerateRequest
    ) -> GenerateResult | EngineError:
        """Return a result with the rows of its prompt, which came with the reply to the first such request.

        The server read both prompts with the same weights; otherwise the rows are missing, and the result is an error.
        It would return the same ones: equal prompts are computed once, or share SGLang's cache (srt/mem_cache).
        """
        if isinstance(result, EngineError) or not result.spans:
            return result
        if isinstance(first, EngineError) or not first.spans or first.spans[0].version != result.spans[0].version:
            return EngineError(
                f"{self.url}, request {result.rid}: no reply has its prompt's rows from the same weights"
            )
        num, rows = len(request.token_ids) - request.num_fed, dict(result.rows)
        rows |= {s: s.joined([first.rows[s][:num], values]) for s, values in rows.items() if s.on == "fed"}
        return replace(result, rows=rows)

    def _result(self, reply: Any, request: GenerateRequest, *, own_routes: bool) -> GenerateResult | EngineError:
        try:
            return parse_reply(reply, request, self._vocab_size, own_routes=own_routes)
        except _UnfitServerError as problem:  # asking again, or later, would not help
            raise RequestRefusedError(f"{self.url}, request {request.rid}: {problem}") from None
        except _BadReplyError as problem:
            return EngineError(f"{self.url}, request {request.rid}: {problem}")

    async def capabilities(self) -> Capabilities:
        return Capabilities.of(await self.server_info())

    async def score(self, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
        """Score by a prefill alone, as SGLang does; see `Engine.score`."""
        assert 0 < first < len(token_ids), "the first token follows nothing"
        rid = f"score-{uuid.uuid4().hex}"
        request = GenerateRequest(rid, tuple(token_ids), 0, 1.0, (), 0)
        self._check_vocabulary(request)
        body = {
            "rid": rid,
            "input_ids": request.token_ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,  # the entry of this token itself holds no log-prob
            "top_logprobs_num": top_k,
        }
        what, num_scored = f"scores of tokens {first} to {len(token_ids) - 1}", len(token_ids) - first
        max_bytes = _MAX_REPLY_BASE + (num_scored + 1) * (1 + top_k) * _MAX_REPLY_TOKEN
        raw = await self.send_request("POST", "/generate", body, what=what, max_bytes=max_bytes)
        try:
            return parse_scores(as_dict(as_dict(_plain(raw)).get("meta_info")), num_scored, top_k)
        except _BadReplyError as problem:
            raise EngineError(f"{self.url}, {what}: {problem}") from None

    async def release(self) -> None:
        await self._check_release()
        await self._call("POST", "/release_memory_occupation", {})

    async def restore(self) -> None:
        await self._check_release()
        await self._call("POST", "/resume_memory_occupation", {})

    async def _check_release(self) -> None:
        if "release" not in (await self.capabilities()).extras:
            raise EngineError(
                f"{self.url} cannot release its memory; an SGLang server can with --enable-memory-saver "
                "(sglang.extra.enable_memory_saver=true)"
            )

    async def abort(self, rid: str | None = None) -> None:
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._call("POST", "/abort_request", body, timeout_s=min(_ABORT_TIMEOUT_S, self._timeout_s))

    async def pause(self, mode: PauseMode) -> None:
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def health(self) -> bool:
        """Return whether the server and its engine answer; never raises."""
        try:
            await self.check_health()
        except EngineError:
            return False
        return True

    async def check_health(self) -> None:
        """Ask the server and its engine for a sign of life. Raises EngineError without one.

        SGLang's /health samples a token, which a paused server cannot do: after a failed push it would never be healthy
        again. /server_info asks the engine too.
        """
        await self._call("GET", "/server_info", timeout_s=_HEALTH_TIMEOUT_S)

    async def server_info(self) -> dict[str, Any]:
        """Return the server's description of itself, always with `weight_version`."""
        info = as_dict(await self._call("GET", "/server_info"))
        # SGLang's /server_info repeats its start arguments; the current version is in /model_info.
        model_info = as_dict(await self._call("GET", "/model_info"))
        return info | {"weight_version": model_info.get("weight_version")}

    async def load(self) -> tuple[int, int, int]:
        """Return the weight version (-1: the initial one), and running and waiting requests, of all parallel parts."""
        model = as_dict(await self._call("GET", "/model_info", timeout_s=_HEALTH_TIMEOUT_S))
        reply = as_dict(await self._call("GET", "/v1/loads", timeout_s=_HEALTH_TIMEOUT_S))
        loads = reply.get("loads")
        parts = [as_dict(part) for part in loads] if isinstance(loads, list) else []
        try:
            running, waiting = (
                sum(_count(part, name, 0) for part in parts) for name in ("num_running_reqs", "num_waiting_reqs")
            )
            return parse_version(model.get("weight_version")), running, waiting
        except _BadReplyError as problem:
            raise EngineError(f"{self.url}/v1/loads: {problem}") from None

    async def start_profile(self, folder: str) -> None:
        await self._call("POST", "/start_profile", {"output_dir": folder, "with_stack": False})

    async def stop_profile(self) -> None:
        await self._call("POST", "/stop_profile")

    def _check_vocabulary(self, request: GenerateRequest) -> None:
        """Check the token ids, since SGLang would read past its embedding. Raises EngineError."""
        if self._vocab_size is None or _are_tokens(request.token_ids, self._vocab_size):
            return
        foreign = next(i for i in request.token_ids if not _are_tokens([i], self._vocab_size))
        raise EngineError(
            f"{self.url}, request {request.rid}: token id {foreign} is outside the vocabulary of {self._vocab_size}; "
            "do tokenizer and model belong together?"
        )

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        what: str | None = None,
        timeout_s: float | None = None,
        max_bytes: int = _MAX_REPLY,
    ) -> Any:
        """Return the decoded reply, None if it is not JSON. Raises as `send_request`, also if it denies success."""
        raw = await self.send_request(method, path, body, what=what, timeout_s=timeout_s, max_bytes=max_bytes)
        reply = _plain(raw)
        if as_dict(reply).get("success") is False:
            raise self._failure(f"{self.url}{path}" + (f", {what}" if what else ""), 200, raw)
        return reply

    async def send_request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        max_bytes: int,
        what: str | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Return the body of the reply: unencoded, from this server itself, at most `max_bytes`.

        Raises:
            EngineError: any status but 200, another encoding, or more bytes. Redirects are not followed.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, headers=self._headers)
        where = f"{self.url}{path}" + (f", {what}" if what else "")
        deadline_s = timeout_s or self._timeout_s
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=None if body is None else _JSON_HEADERS,
                timeout=aiohttp.ClientTimeout(total=deadline_s),
                allow_redirects=False,
            ) as response:
                if (encoding := response.headers.get("Content-Encoding", "identity").lower()) != "identity":
                    raise EngineError(
                        f"{where}: the reply is compressed ({escaped(encoding[:20])}), which was not asked for"
                    )
                if 300 <= response.status < 400:
                    target = escaped(response.headers.get("Location", "nowhere")[:200])
                    raise EngineError(
                        f"{where}: HTTP {response.status}: the server redirects to {target}, which is not followed; is "
                        "the URL right?"
                    )
                if response.status != 200:
                    raise self._failure(where, response.status, await _start_of(response.content, _MAX_SHOWN))
                raw = await _start_of(response.content, max_bytes + 1)
        except asyncio.TimeoutError:  # noqa: UP041 - the name that aiohttp documents
            raise UnreachableEngineError(f"{where}: no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as problem:
            raise UnreachableEngineError(
                f"{where}: {type(problem).__name__}: {escaped(str(problem))[:_MAX_SHOWN]}; is the server running?"
            ) from None
        if len(raw) > max_bytes:
            raise EngineError(f"{where}: the reply is longer than any valid one, which has at most {max_bytes} bytes")
        return raw

    def _failure(self, where: str, status: int, raw: bytes) -> EngineError:
        """Return the error of a request that the server refused or could not do."""
        message = escaped(raw[:_MAX_SHOWN].decode(errors="replace"))
        if status == 401:
            return KeyRefusedError(
                f"{where}: HTTP 401: {message}; set rollout.api_key to the file with the server's key"
            )
        kind = RequestRefusedError if status in _REFUSALS else EngineError
        kind = BroadcastLostError if _LOST_BROADCAST in message else kind
        return kind(f"{where}: HTTP {status}: {message}")


def max_reply_bytes(requests: Sequence[GenerateRequest]) -> int:
    """Return the most bytes that a valid reply to these requests can have."""
    return sum(
        _MAX_REPLY_BASE
        + request.max_new_tokens
        * (_MAX_REPLY_TOKEN + (_MAX_REPLY_KEPT * (request.top_k or _MAX_KEPT) if request.is_cut else 0))
        + (len(request.token_ids) + request.max_new_tokens)
        * sum(_MAX_REPLY_BYTE * stream.row_bytes + _MAX_REPLY_NUMBER for stream in request.streams)
        for request in requests
    )


async def _start_of(content: aiohttp.StreamReader, num_bytes: int) -> bytes:
    """Read to the end, but return at most this many bytes."""
    parts, missing = [], num_bytes
    async for part in content.iter_any():
        parts.append(part[:missing])
        missing -= len(parts[-1])
        if missing <= 0:
            break
    return b"".join(parts)


def decode(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the typed reply; if its form differs (NaN for a number, say), the plain JSON value; None if not JSON."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _plain(raw)


def _plain(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None


async def _decoded(read: Callable[[], _T], request: GenerateRequest) -> _T:
    """Read replies: those with rows, which may be 30 MB each, in a thread, so that the event loop does not wait."""
    return await asyncio.to_thread(read) if request.streams else read()


def _firsts(requests: Sequence[GenerateRequest]) -> list[int]:
    """Return for each request the index of the first one that lacks rows of the same tokens; mostly its own."""
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    lacks_rows = any(stream.on == "fed" for stream in requests[0].streams)
    return [
        first.setdefault((r.num_fed, r.token_ids), index) if lacks_rows and r.num_fed < len(r.token_ids) else index
        for index, r in enumerate(requests)
    ]


def _generate_body(request: GenerateRequest, *, own_routes: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": request.stop_token_ids,
        "sampling_seed": request.seed,
    }
    body = {"rid": request.rid, "input_ids": request.token_ids, "sampling_params": sampling, "return_logprob": True}
    if request.is_cut:
        sampling |= {"top_p": request.top_p, "top_k": -1 if request.top_k is None else request.top_k}
        body["return_sampling_mask"] = True
    if names := [s.name for s in request.streams if not (own_routes and s.name == ROUTES)]:
        body |= {"return_rows": names, "num_fed": request.num_fed}
    if own_routes:
        body |= dict(zip(_OWN_ROUTES, (True, request.num_fed - 1), strict=True))
    return body


class _BadReplyError(ValueError):
    """A fault in a reply."""


class _UnfitServerError(_BadReplyError):
    """A fault that the server will repeat: it does not return the log-probs of a cut, or a stream as declared."""


def parse_reply(
    reply: Any, request: GenerateRequest, vocab_size: int | None, *, own_routes: bool = False
) -> GenerateResult:
    """Check a /generate reply, typed or plain JSON, field by field.

    Args:
        own_routes: whether routes are in SGLang's own field, rather than in `rows`.

    Raises:
        _BadReplyError (a ValueError): names the first fault.
    """
    meta = as_dict(as_dict(reply).get("meta_info"))
    token_ids = as_dict(reply).get("output_ids")
    if not isinstance(token_ids, list):
        raise _BadReplyError("the reply has no output_ids")
    if (rid := meta.get("id", request.rid)) != request.rid:
        raise _BadReplyError(f"the reply is for request {shortened(rid)}")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in _FINISH_REASONS:
        raise _BadReplyError(f"finish_reason {shortened(finish)} is not one of {_FINISH_REASONS}")
    if len(token_ids) > request.max_new_tokens:
        raise _BadReplyError(
            f"{plural(len(token_ids), 'token')} returned, but at most {request.max_new_tokens} were asked for"
        )
    if not token_ids and reason != "abort":
        raise _BadReplyError(f"no token was returned, and finish_reason is {shortened(reason)}")
    if not _are_tokens(token_ids, vocab_size):
        foreign = next(i for i in token_ids if not _are_tokens([i], vocab_size))
        raise _BadReplyError(f"token id {shortened(foreign)} is outside the vocabulary of {vocab_size}")
    num_prompt_tokens = _count(meta, "prompt_tokens", len(request.token_ids))
    if num_prompt_tokens != len(request.token_ids):
        raise _BadReplyError(
            f"it continues {plural(num_prompt_tokens, 'prompt token')}, but {len(request.token_ids)} were sent"
        )
    logprobs = _tempered_logprobs(meta, token_ids)
    return GenerateResult(
        rid=request.rid,
        token_ids=tuple(token_ids),
        behaviour_logprobs=_cut_logprobs(meta, len(token_ids)) if request.is_cut else logprobs,
        spans=_spans(meta, len(token_ids)),
        finish_reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=_count(meta, "cached_tokens", 0),
        rows=_rows(meta, request, len(token_ids), own_routes=own_routes),
    )


def _rows(meta: dict[str, Any], request: GenerateRequest, num_new: int, *, own_routes: bool) -> Rows:
    """Return the rows of the request's streams; fed ones start at input token `num_fed`."""
    sent, rows = dict(as_dict(meta.get("rows"))), {}
    for stream in request.streams if num_new else ():
        num_rows = num_new + (len(request.token_ids) - request.num_fed if stream.on == "fed" else 0)
        if own_routes and stream.name == ROUTES:
            sent[ROUTES] = _own_routes(meta, stream, request.num_fed - 1, num_rows)
        if stream.name not in sent:
            if stream.is_needed:
                raise _UnfitServerError(f"stream {stream.name}: the reply has no rows for it")
            rows[stream] = read_only(stream.filled(num_rows))
            continue
        try:
            rows[stream] = stream.checked(sent[stream.name], num_rows)
        except ValueError as problem:
            raise _UnfitServerError(str(problem)) from None
    return rows


def _own_routes(meta: dict[str, Any], stream: TokenStream, start: int, num_rows: int) -> Array:
    """Read SGLang's routes: base64 of int32 [tokens, layers, experts chosen], from input token `start` on.

    Returns rows of the stream's type. The field is decoded in pieces: each keeps other threads from running.
    """
    given = meta.get("routed_experts")
    if not isinstance(given, str):
        raise _UnfitServerError(f"the reply has no routed_experts: start SGLang {ROUTES_FLAG}")
    rows = np.empty((num_rows, *stream.shape), stream.dtype)
    flat, num_read = rows.reshape(-1), 0
    most = np.iinfo(stream.dtype).max if stream.most is None else int(stream.most)
    if (num_sent := (len(given) // 4 * 3 - given[-2:].count("=")) / 4) != flat.size:
        shape = " x ".join(map(str, stream.shape))
        raise _UnfitServerError(
            f"routed_experts has {num_sent:g} numbers instead of {flat.size}, for {plural(num_rows, 'token')} from "
            f"{start} on x {shape} (layers x chosen experts): does the server serve this model?"
        )
    for first in range(0, len(given), _ROUTES_PIECE):
        try:
            values = np.frombuffer(base64.b64decode(given[first : first + _ROUTES_PIECE], validate=True), "<i4")
        except ValueError:
            raise _BadReplyError("routed_experts is not base64") from None
        if (is_bad := (values < 0) | (values > most)).any():
            bad = int(is_bad.argmax())
            row, layer, _ = np.unravel_index(num_read + bad, rows.shape)
            raise _UnfitServerError(
                f"routed_experts: input token {start + row} has expert {values[bad]} in layer {layer}, but the last of "
                f"the model's experts is {most}"
            )
        flat[num_read : num_read + len(values)] = values
        num_read += len(values)
    return rows


def parse_scores(meta: dict[str, Any], num_scored: int, top_k: int) -> TokenScores:
    """Read the log-probs of a prompt's last tokens; the first entry, for the token before them, is skipped."""
    entries = [[entry] for entry in _entries(meta, "input_token_logprobs", num_scored, list[_Entry])]
    likeliest = _entries(meta, "input_top_logprobs", num_scored, list[list[_Entry]]) if top_k else [[]] * num_scored
    if any(len(row) != top_k for row in likeliest):
        raise _BadReplyError(f"input_top_logprobs does not have {top_k} entries for each token")
    logprobs_N1, top_logprobs_NK = _input_logprobs(entries), _input_logprobs(likeliest)
    top_ids_NK = np.array([[entry.token_id for entry in row] for row in likeliest], np.int32)
    return TokenScores(read_only(logprobs_N1[:, 0]), read_only(top_ids_NK), read_only(top_logprobs_NK))


def _entries(meta: dict[str, Any], name: str, num_scored: int, kind: Any) -> list[Any]:
    given = meta.get(name)
    if not isinstance(given, list) or len(given) != num_scored + 1:
        raise _BadReplyError(f"{name} is not a list of {num_scored + 1} entries; does the server score prompts?")
    try:
        return msgspec.convert(given[1:], kind)
    except msgspec.ValidationError as problem:
        raise _BadReplyError(f"{name}: {problem}") from None


def _input_logprobs(rows: list[list[_Entry]]) -> Array:
    """Return log-probs, float32 [rows, entries]."""
    logprobs = np.array([[entry.logprob for entry in row] for row in rows], np.float64)
    if not ((logprobs >= -_MAX_FLOAT) & (logprobs <= _LOGPROB_SLACK)).all():
        raise _BadReplyError("a log-prob of a prompt's token is not a finite number <= 0")
    return np.minimum(logprobs, 0.0).astype(np.float32)


def _count(meta: dict[str, Any], name: str, default: int) -> int:
    value = meta.get(name, default)
    if type(value) is not int or value < 0:
        raise _BadReplyError(f"{name} {shortened(value)} is not a count")
    return value


def _are_tokens(values: Sequence[Any], vocab_size: int | None) -> bool:
    if not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= 0 and (vocab_size is None or max(values, default=-1) < vocab_size)


def _tempered_logprobs(meta: dict[str, Any], token_ids: list[int]) -> tuple[float, ...]:
    entries = meta.get("output_token_logprobs")
    if entries is None and not token_ids:
        return ()
    if not isinstance(entries, list):
        raise _BadReplyError("the reply has no output_token_logprobs")
    if len(entries) != len(token_ids):
        raise _BadReplyError(f"output_token_logprobs has length {len(entries)}, output_ids has length {len(token_ids)}")
    if entries and not isinstance(entries[0], _Entry):
        try:
            entries = msgspec.convert(entries, list[_Entry])
        except msgspec.ValidationError:
            raise _bad_entry(entries, token_ids) from None
    logprobs_T = np.fromiter(map(attrgetter("logprob"), entries), np.float64, len(entries))
    is_good_T = (logprobs_T >= -_MAX_FLOAT) & (logprobs_T <= _LOGPROB_SLACK)
    if [*map(attrgetter("token_id"), entries)] != token_ids or not is_good_T.all():
        raise _bad_entry([[e.logprob, e.token_id] for e in entries], token_ids)
    logprobs_T[logprobs_T > 0] = 0.0
    return tuple(logprobs_T.tolist())


def _cut_logprobs(meta: dict[str, Any], num_tokens: int) -> tuple[float, ...]:
    """Return the log-probs under the distribution that top_p and top_k leave, renormalised."""
    if not num_tokens:
        return ()
    if (given := meta.get("output_token_sampling_logprobs")) is None:
        raise _UnfitServerError(
            "the reply has no output_token_sampling_logprobs, the log-probs that top_p and top_k need; use a server "
            "that returns them, such as SGLang 0.5.23, or leave top_p and top_k out"
        )
    try:
        logprobs_T = np.array(msgspec.convert(given, list[float]), np.float64)
    except msgspec.ValidationError as problem:
        raise _BadReplyError(f"output_token_sampling_logprobs: {problem}") from None
    if len(logprobs_T) != num_tokens:
        raise _BadReplyError(
            f"output_token_sampling_logprobs has length {len(logprobs_T)}, output_ids has length {num_tokens}"
        )
    is_good_T = (logprobs_T >= -_MAX_FLOAT) & (logprobs_T <= _LOGPROB_SLACK)
    if not is_good_T.all():
        index = int(is_good_T.argmin())
        raise _BadReplyError(
            f"output_token_sampling_logprobs: {float(logprobs_T[index])!r} at output token {index} is not a finite "
            "number <= 0"
        )
    return tuple(np.minimum(logprobs_T, 0.0).tolist())


def _bad_entry(entries: list[Any], token_ids: list[int]) -> _BadReplyError:
    """Describe the first entry that is not the log-prob of its token."""
    for index, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int or entry[1] != token_id:
            start = entry[:2] if isinstance(entry, list) else entry
            return _BadReplyError(
                f"log-prob entry {shortened(start)} at output token {index} does not belong to token {token_id}"
            )
        logprob = entry[0]
        if type(logprob) not in (int, float) or not -_MAX_FLOAT <= logprob <= _LOGPROB_SLACK:
            return _BadReplyError(f"log-prob {shortened(logprob)} at output token {index} is not a finite number <= 0")
    raise AssertionError("every entry is good")


def _spans(meta: dict[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.get("weight_versions")
    if not isinstance(raw, list):
        raise _BadReplyError("the reply has no weight_versions; the server is older than SGLang 0.5.23")
    uncovered = f"weight_versions {shortened(raw)} do not cover the {plural(num_tokens, 'output token')} in order"
    spans: list[VersionSpan] = []
    covered = 0
    for entry in raw:
        start, end = as_dict(entry).get("start"), as_dict(entry).get("end")
        if start != covered or type(end) is not int or end < covered:
            raise _BadReplyError(uncovered)
        if end > covered:
            spans.append(VersionSpan(parse_version(entry.get("version")), covered, end))
        covered = end
    if covered != num_tokens:
        raise _BadReplyError(uncovered)
    return tuple(spans)


def parse_version(version: object) -> int:
    """Return a server's weight version as a number, -1 for the weights it started with. Raises _BadReplyError."""
    if version == _UNVERSIONED:
        return -1
    if type(version) is int and 0 <= version < 10**_MAX_DIGITS:
        return version
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) <= _MAX_DIGITS:
        return int(version)
    raise _BadReplyError(f"weight version {shortened(version)} is not a whole number")


def shortened(value: object) -> str:
    """Return a shortened representation of what a server sent."""
    return _SHORT.repr(value)
