"""The checks of a /generate reply in plain Python, token by token: oracle of the fast ones, and their benchmark."""

import re
import sys
from typing import Any

from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.engines.http import shortened

_LOGPROB_SLACK = 1e-4
_MAX_FLOAT = sys.float_info.max
_UNVERSIONED = "default"
_FINISH_REASONS = ("stop", "length", "abort")


class BadReplyError(ValueError):
    """The fault of a reply."""


def plain_parse(reply: Any, request: GenerateRequest, vocab_size: int | None) -> GenerateResult:
    """Check a /generate reply field by field. Raises BadReplyError (a ValueError) naming the fault."""
    meta = _as_dict(_as_dict(reply).get("meta_info"))
    token_ids = _as_dict(reply).get("output_ids")
    if not isinstance(token_ids, list):
        raise BadReplyError("the reply has no output_ids")
    if (rid := meta.get("id", request.rid)) != request.rid:
        raise BadReplyError(f"the reply is of request {shortened(rid)}")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if reason not in _FINISH_REASONS:
        raise BadReplyError(f"finish_reason {shortened(finish)} is not one of {_FINISH_REASONS}")
    if len(token_ids) > request.max_new_tokens:
        raise BadReplyError(f"{len(token_ids)} tokens were returned, at most {request.max_new_tokens} were asked for")
    if not token_ids and reason != "abort":
        raise BadReplyError(f"no token was returned, and finish_reason is {shortened(reason)}")
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            raise BadReplyError(f"token id {shortened(token_id)} is outside the vocabulary of {vocab_size}")
    num_prompt_tokens = _count(meta, "prompt_tokens", len(request.token_ids))
    if num_prompt_tokens != len(request.token_ids):
        raise BadReplyError(f"it continues {num_prompt_tokens} prompt tokens, but {len(request.token_ids)} were sent")
    return GenerateResult(
        rid=request.rid,
        token_ids=tuple(token_ids),
        behaviour_logprobs=_behaviour_logprobs(meta, token_ids),
        spans=_spans(meta, len(token_ids)),
        finish_reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=_count(meta, "cached_tokens", 0),
    )


def _count(meta: dict[str, Any], name: str, default: int) -> int:
    value = meta.get(name, default)
    if type(value) is not int or value < 0:
        raise BadReplyError(f"{name} {shortened(value)} is not a count")
    return value


def _behaviour_logprobs(meta: dict[str, Any], token_ids: list[int]) -> tuple[float, ...]:
    triples = meta.get("output_token_logprobs")
    if triples is None and not token_ids:
        return ()
    if not isinstance(triples, list):
        raise BadReplyError("the reply has no output_token_logprobs")
    if len(triples) != len(token_ids):
        raise BadReplyError(f"{len(triples)} log-probs for {len(token_ids)} tokens")
    logprobs = []
    for index, (token_id, triple) in enumerate(zip(token_ids, triples, strict=True)):
        if not isinstance(triple, list) or len(triple) < 2 or type(triple[1]) is not int or triple[1] != token_id:
            start = triple[:2] if isinstance(triple, list) else triple
            raise BadReplyError(
                f"log-prob entry {shortened(start)} at output token {index} does not belong to token {token_id}"
            )
        logprob = triple[0]
        if type(logprob) not in (int, float) or not -_MAX_FLOAT <= logprob <= _LOGPROB_SLACK:
            raise BadReplyError(f"log-prob {shortened(logprob)} at output token {index} is not a finite number <= 0")
        logprobs.append(min(float(logprob), 0.0))
    return tuple(logprobs)


def _spans(meta: dict[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.get("weight_versions")
    if not isinstance(raw, list):
        raise BadReplyError("the reply has no weight_versions; the server is older than SGLang 0.5.23")
    uncovered = f"weight_versions {shortened(raw)} do not cover the {num_tokens} output tokens in order"
    spans: list[VersionSpan] = []
    covered = 0
    for entry in raw:
        start, end = _as_dict(entry).get("start"), _as_dict(entry).get("end")
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
    digits = str(version) if type(version) in (int, str) else ""
    if re.fullmatch("[0-9]{1,18}", digits):
        return int(digits)
    raise BadReplyError(f"weight version {shortened(version)} is not a whole number")


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
