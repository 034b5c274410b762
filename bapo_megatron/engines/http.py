"""A rollout engine behind HTTP: SGLang, or the embedded engine, which speaks the same API.

Every reply is checked before it is used (replies.py); a bad one becomes an `EngineError` that names server and request.
Retrying is up to the dispatcher.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

import aiohttp
import msgspec

from bapo_megatron.engines.base import (
    ALL_MEMORY,
    Capabilities,
    GenerateRequest,
    GenerateResult,
    Memory,
    PauseMode,
    TokenScores,
)
from bapo_megatron.engines.replies import (
    REPLIES,
    REPLY,
    SCORES,
    BadReplyError,
    UnfitServerError,
    are_tokens,
    count_of,
    decode,
    parse_reply,
    parse_scores,
    parse_version,
    plain_json,
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
from bapo_megatron.tokens import SAMPLER_STREAMS, SAMPLER_TOP_IDS

RELEASED_ROUTE = "/released_memory"  # ours, on the embedded engine and on SGLang (engines/sglang_memory.py)
_HEALTH_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 20.0
IDLE_S = 1.0  # an idle connection is not reused after this time: uvicorn closes it after 5 s, and would lose a request
_REFUSALS = (400, 401, 403, 404, 405, 413, 422)  # the request is wrong; 408 and 429 mean try again later
_LOST_BROADCAST = "Failed to receive weights"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)
_JSON_HEADERS = {"Content-Type": "application/json"}
_MAX_SHOWN = 1000  # bytes of an answer shown in a message
_OWN_ROUTES = ("return_routed_experts", "routed_experts_start_len")  # SGLang's fields that ask for routes
# The longest valid replies, in bytes, with room to spare:
_MAX_REPLY = 4 << 20  # SGLang's /server_info repeats its arguments for each data-parallel rank, 20 kB each
_MAX_REPLY_BASE = 16 << 10  # per request: all that does not grow with its tokens
_MAX_REPLY_TOKEN = 256  # per output token: its id twice, its log-probs and its text
_MAX_REPLY_KEPT = 12  # per token that a cut keeps: SGLang lists their ids
_MAX_REPLY_NUMBER = 32  # per number in JSON
_MAX_REPLY_BYTE = 6  # per byte of a larger row, which grows by a third; SGLang sends a byte as four
_MAX_KEPT = 4096  # tokens kept per output token: SGLang's limit

_T = TypeVar("_T")


class HttpEngine:
    """A client of one server. Belongs to the event loop of its first call."""

    def __init__(
        self,
        url: str,
        *,
        request_timeout_s: float,
        vocab_size: int | None = None,
        key: str | None = None,
        whole_cache: bool = False,
        key_setting: str = "rollout.api_key",
    ) -> None:
        """Make a client that connects with its first call.

        Args:
            vocab_size: bounds the accepted token ids. None means unknown.
            key: what the server asks for. None means nothing.
            whole_cache: refuse a server whose key-value cache is smaller than it was started with, because it has found
                less memory free than planned.
            key_setting: the setting that names the file with the key.
        """
        self.url = url.rstrip("/")
        self._timeout_s = request_timeout_s
        self._vocab_size = vocab_size
        self._whole_cache = whole_cache
        self._key_setting = key_setting
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
        body |= {name: bodies[0][name] for name in (*_OWN_ROUTES, "top_logprobs_num") if name in bodies[0]}
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
        # Input: the prompt "abc" with num_fed=1; the first reply, "xy", has fed rows [b c x y], this one, "z", has [z].
        # Output: this reply with [b c z]; rows of sampled tokens stay as they are.
        num, rows = len(request.token_ids) - request.num_fed, dict(result.rows)
        rows |= {s: s.joined([first.rows[s][:num], values]) for s, values in rows.items() if s.on == "fed"}
        return replace(result, rows=rows)

    def _result(self, reply: Any, request: GenerateRequest, *, own_routes: bool) -> GenerateResult | EngineError:
        try:
            return parse_reply(reply, request, self._vocab_size, own_routes=own_routes)
        except UnfitServerError as problem:  # asking again, or later, would not help
            raise RequestRefusedError(f"{self.url}, request {request.rid}: {problem}") from None
        except BadReplyError as problem:
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
            return parse_scores(decode(raw, SCORES), request.token_ids[first:], top_k)
        except BadReplyError as problem:
            raise EngineError(f"{self.url}, {what}: {problem}") from None

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded reply of any route, None if it is not JSON. Raises EngineError."""
        return await self._call(method, path, body)

    async def hold(self, memory: Set[Memory]) -> None:
        """Hold memory as `Engine.hold`. The server says what its process has released: a restarted one has nothing.

        SGLang ends when it is told to release what is released, or to restore what is not.
        """
        if "release" not in (await self.capabilities()).extras:
            raise EngineError(f"{self.url} cannot release its memory; SGLang can with --enable-memory-saver, on a GPU")
        released = as_dict(await self._call("GET", RELEASED_ROUTE)).get("released")
        if not isinstance(released, list) or not all(tag in [*ALL_MEMORY] for tag in released):
            raise EngineError(f"{self.url}{RELEASED_ROUTE}: the reply does not say what is released")
        if more := sorted(ALL_MEMORY - memory - {*released}):
            await self._call("POST", "/release_memory_occupation", {"tags": more})
        if missing := sorted(memory & {*released}):
            await self._call("POST", "/resume_memory_occupation", {"tags": missing})

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
        """Return the server's description of itself, always with `weight_version`.

        Raises:
            EngineError: no such reply, or a smaller cache, see `whole_cache`.
        """
        info = as_dict(await self._call("GET", "/server_info"))
        if self._whole_cache:
            self._check_cache(info)
        # SGLang's /server_info repeats its start arguments; the current version is in /model_info.
        model_info = as_dict(await self._call("GET", "/model_info"))
        return info | {"weight_version": model_info.get("weight_version")}

    def _check_cache(self, info: Mapping[str, Any]) -> None:
        """Compare SGLang's cache, which is a whole number of pages, with its --max-total-tokens. Raises EngineError."""
        asked, found, page = (info.get(n) for n in ("max_total_tokens", "max_total_num_tokens", "page_size"))
        if isinstance(asked, int) and isinstance(found, int) and found <= asked - max(1, page or 1):
            raise EngineError(
                f"{self.url} has a cache of {found:,} tokens, and the plan gives it {asked:,}: less of its GPU is free "
                "than planned; does another process use it?"
            )

    async def load(self) -> tuple[int, int, int]:
        """Return the weight version (-1: the initial one), and running and waiting requests, of all parallel parts."""
        model = as_dict(await self._call("GET", "/model_info", timeout_s=_HEALTH_TIMEOUT_S))
        reply = as_dict(await self._call("GET", "/v1/loads", timeout_s=_HEALTH_TIMEOUT_S))
        loads = reply.get("loads")
        parts = [as_dict(part) for part in loads] if isinstance(loads, list) else []
        try:
            running, waiting = (
                sum(count_of(part, name, 0) for part in parts) for name in ("num_running_reqs", "num_waiting_reqs")
            )
            return parse_version(model.get("weight_version")), running, waiting
        except BadReplyError as problem:
            raise EngineError(f"{self.url}/v1/loads: {problem}") from None

    async def start_profile(self, folder: str) -> None:
        await self._call("POST", "/start_profile", {"output_dir": folder, "with_stack": False})

    async def stop_profile(self) -> None:
        await self._call("POST", "/stop_profile")

    def _check_vocabulary(self, request: GenerateRequest) -> None:
        """Check the token ids, because SGLang would read past its embedding. Raises EngineError."""
        if self._vocab_size is None or are_tokens(request.token_ids, self._vocab_size):
            return
        foreign = next(i for i in request.token_ids if not are_tokens([i], self._vocab_size))
        if not isinstance(foreign, int):
            raise TypeError(f"token id {foreign!r} is not an int: give tokens of an array with `.tolist()`")
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
        reply = plain_json(raw)
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
                f"{where}: HTTP 401: {message}; set {self._key_setting} to the file with the server's key"
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


async def _decoded(read: Callable[[], _T], request: GenerateRequest) -> _T:
    """Read replies: those with rows, which may be 30 MB each, in a thread, so that the event loop does not wait."""
    return await asyncio.to_thread(read) if request.streams else read()


def _firsts(requests: Sequence[GenerateRequest]) -> list[int]:
    """Return for each request the index of the first one that lacks rows of the same tokens; mostly its own."""
    # Input: four requests for a group's prompt "ab", of which the last has grown to "abc"; each has rows of one token.
    # Output: [0, 0, 0, 3]. Only 0 and 3 ask for rows of their input; 1 and 2 take the rows of 0 (`_with_rows`).
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
    named = {stream.name: stream for stream in request.streams}
    if (top := named.get(SAMPLER_TOP_IDS)) is not None:
        body["top_logprobs_num"] = top.shape[0]
    if names := [name for name in named if name not in SAMPLER_STREAMS and not (own_routes and name == ROUTES)]:
        body |= {"return_rows": names, "num_fed": request.num_fed}
    if own_routes:
        body |= dict(zip(_OWN_ROUTES, (True, request.num_fed - 1), strict=True))
    return body
