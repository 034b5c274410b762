"""Replies of an engine, as SGLang writes them: decoded into typed entries and checked as arrays, field by field.

Rank 0 reads every token of a step (benchmarks/replies.py). Start at `parse_reply`.
"""

import itertools
import json
import reprlib
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypedDict

import msgspec
import numpy as np
import pybase64

from bapo_megatron.engines.base import GenerateRequest, GenerateResult, TokenScores, VersionSpan
from bapo_megatron.engines.transport import as_dict
from bapo_megatron.errors import plural
from bapo_megatron.hf.streams import ROUTES
from bapo_megatron.tokens import (
    BEHAVIOUR_LOGPROBS,
    SAMPLER_TOP_IDS,
    SAMPLER_TOP_LOGPROBS,
    Array,
    Rows,
    TokenStream,
    read_only,
)

_LOGPROB_SLACK = 1e-4  # rounding may put a log-prob of exactly 0 this much above it
_MAX_FLOAT = sys.float_info.max
_MAX_TOKENS = 1 << 63  # an unknown vocabulary has at most these: ids are int64
_UNVERSIONED = "default"  # what a server calls the weights it started with
_FINISH_REASONS = ("stop", "length", "abort")
_MAX_DIGITS = 18  # digits of a weight version
_ROUTES_PIECE = 1 << 20  # characters decoded together: whole numbers
ROUTES_FLAG = "with --enable-return-routed-experts (sglang.extra.enable_return_routed_experts=true)"


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """An output token's log-prob; the token's text, which may follow, is not read. Millions exist at a time: no GC."""

    logprob: float
    token_id: int


class _Given(msgspec.Struct, array_like=True, gc=False):
    """A prompt token's log-prob, which the token before the first scored one lacks."""

    logprob: float | None
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
    output_top_logprobs: list[list[_Entry]]
    rows: Any
    routed_experts: Any


class _MetaOfScores(TypedDict, total=False):
    """The fields of `meta_info` that `parse_scores` reads and checks."""

    weight_version: Any
    input_token_logprobs: list[_Given]
    input_top_logprobs: list[list[_Entry] | None]


class _Scores(TypedDict, total=False):
    """A reply of /generate to a prompt that is only scored."""

    meta_info: _MetaOfScores


class _Reply(TypedDict, total=False):
    """A reply of /generate."""

    output_ids: list[int]
    meta_info: _Meta


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
REPLY = msgspec.json.Decoder(_Reply)
REPLIES = msgspec.json.Decoder(list[_Reply])
SCORES = msgspec.json.Decoder(_Scores)


def decode(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the typed reply; if its form differs (NaN for a number, say), the plain JSON value; None if not JSON."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return plain_json(raw)


def plain_json(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None


class BadReplyError(ValueError):
    """A fault in a reply."""


class UnfitServerError(BadReplyError):
    """A fault that the server will repeat: it does not return the log-probs of a cut, or a stream as declared."""


def parse_reply(
    reply: Any, request: GenerateRequest, vocab_size: int | None, *, own_routes: bool = False
) -> GenerateResult:
    """Check a /generate reply, typed or plain JSON, field by field.

    Args:
        own_routes: whether routes are in SGLang's own field, rather than in `rows`.

    Raises:
        BadReplyError (a ValueError): names the first fault.
    """
    meta = as_dict(as_dict(reply).get("meta_info"))
    token_ids = as_dict(reply).get("output_ids")
    if not isinstance(token_ids, list):
        raise BadReplyError("the reply has no output_ids")
    if (rid := meta.get("id", request.rid)) != request.rid:
        raise BadReplyError(f"the reply is for request {shortened(rid)}")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in _FINISH_REASONS:
        raise BadReplyError(f"finish_reason {shortened(finish)} is not one of {_FINISH_REASONS}")
    if len(token_ids) > request.max_new_tokens:
        raise BadReplyError(
            f"{plural(len(token_ids), 'token')} returned, but at most {request.max_new_tokens} were asked for"
        )
    if not token_ids and reason != "abort":
        raise BadReplyError(f"no token was returned, and finish_reason is {shortened(reason)}")
    if not are_tokens(token_ids, vocab_size):
        foreign = next(i for i in token_ids if not are_tokens([i], vocab_size))
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise BadReplyError(f"token id {shortened(foreign)} is outside the vocabulary{size}")
    num_prompt_tokens = count_of(meta, "prompt_tokens", len(request.token_ids))
    if num_prompt_tokens != len(request.token_ids):
        raise BadReplyError(
            f"it continues {plural(num_prompt_tokens, 'prompt token')}, but {len(request.token_ids)} were sent"
        )
    logprobs = _tempered_logprobs(meta, token_ids)
    return GenerateResult(
        rid=request.rid,
        token_ids=read_only(np.array(token_ids, np.int64)),
        behaviour_logprobs=_cut_logprobs(meta, len(token_ids)) if request.is_cut else logprobs,
        spans=_spans(meta, len(token_ids)),
        finish_reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=count_of(meta, "cached_tokens", 0),
        rows=_rows(meta, request, len(token_ids), own_routes=own_routes),
    )


def _rows(meta: dict[str, Any], request: GenerateRequest, num_new: int, *, own_routes: bool) -> Rows:
    """Return the rows of the request's streams; fed ones start at input token `num_fed`."""
    sent, rows = dict(as_dict(meta.get("rows"))), {}
    for stream in request.streams if num_new else ():
        num_rows = num_new + (len(request.token_ids) - request.num_fed if stream.on == "fed" else 0)
        if own_routes and stream.name == ROUTES:
            sent[ROUTES] = _own_routes(meta, stream, request.num_fed - 1, num_rows)
        if stream.name == SAMPLER_TOP_IDS:
            sent |= _sampler_top(meta, num_new, stream.shape[0])
        if stream.name not in sent:
            if stream.is_needed:
                raise UnfitServerError(f"stream {stream.name}: the reply has no rows for it")
            rows[stream] = read_only(stream.filled(num_rows))
            continue
        try:
            rows[stream] = stream.checked(sent[stream.name], num_rows)
        except ValueError as problem:
            raise UnfitServerError(str(problem)) from None
    return rows


def _sampler_top(meta: dict[str, Any], num_new: int, top_k: int) -> dict[str, Array]:
    """Read the sampler's likeliest tokens at each new token, and their log-probs."""
    given = meta.get("output_top_logprobs")
    if not isinstance(given, list) or len(given) != num_new or (given and not isinstance(given[0], list)):
        raise UnfitServerError(f"output_top_logprobs is not a list for each of {plural(num_new, 'output token')}")
    if not (given[0] and isinstance(given[0][0], _Entry)):  # plain JSON
        try:
            given = msgspec.convert(given, list[list[_Entry]])
        except msgspec.ValidationError as problem:
            raise BadReplyError(f"output_top_logprobs: {problem}") from None
    if not {*map(len, given)} <= {top_k}:
        raise UnfitServerError(f"output_top_logprobs does not have {top_k} entries for each token")
    entries = [*itertools.chain.from_iterable(given)]
    ids = [entry.token_id for entry in entries]
    logprobs = np.fromiter(map(attrgetter("logprob"), entries), np.float64, len(entries))
    if not ((logprobs >= -_MAX_FLOAT) & (logprobs <= _LOGPROB_SLACK)).all():
        raise BadReplyError("output_top_logprobs: a log-prob is not a finite number <= 0")
    if not are_tokens(ids, 2**31):
        raise BadReplyError("output_top_logprobs: a token id is outside the vocabulary")
    shape = (num_new, top_k)
    return {
        SAMPLER_TOP_IDS: np.array(ids, np.int32).reshape(shape),
        SAMPLER_TOP_LOGPROBS: _as_float32(np.minimum(logprobs, 0.0)).reshape(shape),
    }


def _own_routes(meta: dict[str, Any], stream: TokenStream, start: int, num_rows: int) -> Array:
    """Read SGLang's routes: base64 of int32 [tokens, layers, experts chosen], from input token `start` on.

    Returns rows of the stream's type. The field is decoded in pieces, because decoding keeps other threads from
    running.
    """
    given = meta.get("routed_experts")
    if not isinstance(given, str):
        raise UnfitServerError(f"the reply has no routed_experts: start SGLang {ROUTES_FLAG}")
    rows = np.empty((num_rows, *stream.shape), stream.dtype)
    flat, num_read = rows.reshape(-1), 0
    most = np.iinfo(stream.dtype).max if stream.most is None else int(stream.most)
    if (num_sent := (len(given) // 4 * 3 - given[-2:].count("=")) / 4) != flat.size:
        shape = " x ".join(map(str, stream.shape))
        raise UnfitServerError(
            f"routed_experts has {num_sent:g} numbers instead of {flat.size}, for {plural(num_rows, 'token')} from "
            f"{start} on x {shape} (layers x chosen experts): does the server serve this model?"
        )
    for first in range(0, len(given), _ROUTES_PIECE):
        try:
            values = np.frombuffer(pybase64.b64decode(given[first : first + _ROUTES_PIECE], validate=True), "<i4")
        except ValueError:
            raise BadReplyError("routed_experts is not base64") from None
        if (is_bad := (values < 0) | (values > most)).any():
            bad = int(is_bad.argmax())
            row, layer, _ = np.unravel_index(num_read + bad, rows.shape)
            raise UnfitServerError(
                f"routed_experts: input token {start + row} has expert {values[bad]} in layer {layer}, but the last of "
                f"the model's experts is {most}"
            )
        flat[num_read : num_read + len(values)] = values
        num_read += len(values)
    return rows


def parse_scores(reply: Any, token_ids: Sequence[int], top_k: int) -> TokenScores:
    """Read the log-probs of a prompt's last tokens, `token_ids`, from a reply, typed or plain JSON.

    The first entry, of the token before them, is skipped. SGLang calls the vocabulary's last token 0 in an entry that
    has this token's log-prob (srt/managers/scheduler_components/logprob_result_processor.py, 0.5.23).
    """
    meta = as_dict(as_dict(reply).get("meta_info"))
    scored = _entries(meta, "input_token_logprobs", len(token_ids), _Given)
    named = map(attrgetter("token_id"), scored)
    if not all(name in (token_id, 0) for name, token_id in zip(named, token_ids, strict=True)):
        raise BadReplyError("input_token_logprobs are of other tokens than those that were sent")
    likeliest: list[list[_Entry]] = []
    if top_k:
        likeliest = _entries(meta, "input_top_logprobs", len(token_ids), list[_Entry])
        if any(len(row) != top_k for row in likeliest):
            raise BadReplyError(f"input_top_logprobs does not have {top_k} entries for each token")
    shape = (len(token_ids), top_k)
    top_logprobs_NK = _input_logprobs([entry.logprob for row in likeliest for entry in row]).reshape(shape)
    top_ids_NK = np.array([entry.token_id for row in likeliest for entry in row], np.int32).reshape(shape)
    logprobs_N = _input_logprobs([*map(attrgetter("logprob"), scored)])
    try:
        version = parse_version(meta.get("weight_version"))
    except BadReplyError:  # a server of the user's own may call its weights anything
        version = -1
    return TokenScores(logprobs_N, read_only(top_ids_NK), top_logprobs_NK, version)


def _entries(meta: dict[str, Any], name: str, num_scored: int, kind: Any) -> list[Any]:
    given = meta.get(name)
    if not isinstance(given, list) or len(given) != num_scored + 1:
        raise BadReplyError(f"{name} is not a list of {num_scored + 1} entries; does the server score prompts?")
    if isinstance(given[1], _Given):  # decoded with its type
        return given[1:]
    try:
        return msgspec.convert(given[1:], list[kind])
    except msgspec.ValidationError as problem:
        raise BadReplyError(f"{name}: {problem}") from None


def _input_logprobs(logprobs: list[Any]) -> Array:
    """Return log-probs as float32, read-only."""
    values = np.array(logprobs, np.float64)  # None becomes nan
    if not ((values >= -_MAX_FLOAT) & (values <= _LOGPROB_SLACK)).all():
        raise BadReplyError("a log-prob of a prompt's token is not a finite number <= 0")
    return _as_float32(np.minimum(values, 0.0))


def count_of(meta: dict[str, Any], name: str, default: int) -> int:
    value = meta.get(name, default)
    if type(value) is not int or value < 0:
        raise BadReplyError(f"{name} {shortened(value)} is not a count")
    return value


def are_tokens(values: Sequence[Any], vocab_size: int | None) -> bool:
    if not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= 0 and max(values, default=-1) < (vocab_size or _MAX_TOKENS)


def _tempered_logprobs(meta: dict[str, Any], token_ids: list[int]) -> Array:
    entries = meta.get("output_token_logprobs")
    if entries is None and not token_ids:
        return BEHAVIOUR_LOGPROBS.joined([])
    if not isinstance(entries, list):
        raise BadReplyError("the reply has no output_token_logprobs")
    if len(entries) != len(token_ids):
        raise BadReplyError(f"output_token_logprobs has length {len(entries)}, output_ids has length {len(token_ids)}")
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
    return _as_float32(logprobs_T)


def _cut_logprobs(meta: dict[str, Any], num_tokens: int) -> Array:
    """Return the log-probs under the distribution that top_p and top_k leave, renormalised."""
    if not num_tokens:
        return BEHAVIOUR_LOGPROBS.joined([])
    if (given := meta.get("output_token_sampling_logprobs")) is None:
        raise UnfitServerError(
            "the reply has no output_token_sampling_logprobs, the log-probs that top_p and top_k need; use a server "
            "that returns them, such as SGLang 0.5.23, or leave top_p and top_k out"
        )
    try:
        logprobs_T = np.array(msgspec.convert(given, list[float]), np.float64)
    except msgspec.ValidationError as problem:
        raise BadReplyError(f"output_token_sampling_logprobs: {problem}") from None
    if len(logprobs_T) != num_tokens:
        raise BadReplyError(
            f"output_token_sampling_logprobs has length {len(logprobs_T)}, output_ids has length {num_tokens}"
        )
    is_good_T = (logprobs_T >= -_MAX_FLOAT) & (logprobs_T <= _LOGPROB_SLACK)
    if not is_good_T.all():
        index = int(is_good_T.argmin())
        raise BadReplyError(
            f"output_token_sampling_logprobs: {float(logprobs_T[index])!r} at output token {index} is not a finite "
            "number <= 0"
        )
    return _as_float32(np.minimum(logprobs_T, 0.0))


def _as_float32(logprobs_T: Array) -> Array:
    with np.errstate(over="ignore"):  # what is below the least float32 becomes -inf
        return read_only(logprobs_T.astype(np.float32))


def _bad_entry(entries: list[Any], token_ids: list[int]) -> BadReplyError:
    """Describe the first entry that is not the log-prob of its token."""
    for index, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int or entry[1] != token_id:
            start = entry[:2] if isinstance(entry, list) else entry
            return BadReplyError(
                f"log-prob entry {shortened(start)} at output token {index} does not belong to token {token_id}"
            )
        logprob = entry[0]
        if type(logprob) not in (int, float) or not -_MAX_FLOAT <= logprob <= _LOGPROB_SLACK:
            return BadReplyError(f"log-prob {shortened(logprob)} at output token {index} is not a finite number <= 0")
    raise AssertionError("every entry is good")


def _spans(meta: dict[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.get("weight_versions")
    if not isinstance(raw, list):
        raise BadReplyError("the reply has no weight_versions; the server is older than SGLang 0.5.23")
    uncovered = f"weight_versions {shortened(raw)} do not cover the {plural(num_tokens, 'output token')} in order"
    spans: list[VersionSpan] = []
    covered = 0
    for entry in raw:
        start, end = as_dict(entry).get("start"), as_dict(entry).get("end")
        if start != covered or type(end) is not int or end < covered:
            raise BadReplyError(uncovered)
        if end > covered:
            spans.append(VersionSpan(parse_version(entry.get("version")), covered, end))
        covered = end
    if covered != num_tokens:
        raise BadReplyError(uncovered)
    return tuple(spans)


def parse_version(version: object) -> int:
    """Return a server's weight version as a number, -1 for the weights it started with. Raises BadReplyError."""
    if version == _UNVERSIONED:
        return -1
    if type(version) is int and 0 <= version < 10**_MAX_DIGITS:
        return version
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) <= _MAX_DIGITS:
        return int(version)
    raise BadReplyError(f"weight version {shortened(version)} is not a whole number")


def shortened(value: object) -> str:
    """Return a shortened representation of what a server sent."""
    return _SHORT.repr(value)
