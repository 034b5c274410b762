"""The meaning of SGLang's /generate replies: an oracle for `parse_reply`, and the plain way of benchmarks/replies.py.

A reply is right if it breaks none of the rules in `RULES`; each is judged alone, whatever else is wrong:

    output_ids               the new tokens
    meta_info
      id                     echo of the request's rid
      finish_reason.type     why they end here
      prompt_tokens          the tokens that were continued: all that were sent
      cached_tokens          the part of them that was not computed again
      output_token_logprobs  [log-prob, token, ...] of each new token
      weight_versions        which weights sampled which new tokens, as ranges in order
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan

_ROUNDING = 1e-4  # how far above 0 rounding may lift a log-prob


class FaultyReplyError(ValueError):
    """A reply with faults: keys of `RULES`."""

    def __init__(self, faults: set[str]) -> None:
        super().__init__(", ".join(sorted(faults)))
        self.faults = faults


@dataclass(frozen=True)
class Reply:
    """A reply with its request; a field that is missing or of another type counts as empty."""

    raw: Any
    request: GenerateRequest
    vocab_size: int | None

    def field(self, name: str, kind: type, default: Any) -> Any:
        found = self.meta.get(name)
        return found if isinstance(found, kind) else default

    @property
    def top(self) -> dict[str, Any]:
        return self.raw if isinstance(self.raw, dict) else {}

    @property
    def meta(self) -> dict[str, Any]:
        found = self.top.get("meta_info")
        return found if isinstance(found, dict) else {}

    @property
    def tokens(self) -> list[Any]:
        found = self.top.get("output_ids")
        return found if isinstance(found, list) else []

    @property
    def reason(self) -> Any:
        return self.field("finish_reason", dict, {}).get("type")

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Log-prob and token of each entry; (None, None) for an invalid entry."""
        entries = self.field("output_token_logprobs", list, [])
        return [tuple(e[:2]) if isinstance(e, list) and len(e) > 1 else (None, None) for e in entries]

    def ranges(self) -> Iterator[tuple[Any, Any, Any]]:
        for one in self.field("weight_versions", list, []):
            found = one if isinstance(one, dict) else {}
            yield found.get("start"), found.get("end"), found.get("version")


def _is_whole(value: Any, least: int = 0, below: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def _is_logprob(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value <= _ROUNDING
    except OverflowError:  # an integer too large for a float
        return False


def _join(reply: Reply) -> bool:
    """Return whether ranges are adjacent, the first begins at 0, and the last ends with the tokens."""
    ranges = [(start, end) for start, end, _ in reply.ranges()]
    if not all(_is_whole(end) for _, end in ranges):
        return False
    ends = [end for _, end in ranges]
    return (
        [start for start, _ in ranges] == [0, *ends][:-1]
        and ends == sorted(ends)
        and ends[-1:] in ([[len(reply.tokens)]] if reply.tokens else [[0], []])
    )


def _version(value: Any) -> int | None:
    """Return a version as a number: its digits, or -1 for SGLang's name of the first weights; otherwise None."""
    if value == "default":
        return -1
    text = str(value) if _is_whole(value) or isinstance(value, str) else ""
    return int(text) if 0 < len(text) <= 18 and set(text) <= set("0123456789") else None


def _versions_are_numbers(reply: Reply) -> bool:
    """Return whether each range with tokens has a number as its version; empty ranges are not read."""
    return all(_version(v) is not None for start, end, v in reply.ranges() if _is_whole(end) and start != end)


def _has_logprobs(reply: Reply) -> bool:
    """Return whether each token has a log-prob; a reply without tokens may leave them out."""
    found = reply.meta.get("output_token_logprobs")
    return isinstance(found, list) or (found is None and not reply.tokens)


RULES: dict[str, Callable[[Reply], bool]] = {
    "no output_ids": lambda r: isinstance(r.top.get("output_ids"), list),
    "is for request": lambda r: r.meta.get("id", r.request.rid) == r.request.rid,
    "finish_reason": lambda r: r.reason in ("stop", "length", "abort"),
    "were asked for": lambda r: len(r.tokens) <= r.request.max_new_tokens,
    "no token was returned": lambda r: bool(r.tokens) or r.reason == "abort",
    "outside the vocabulary": lambda r: all(_is_whole(t, below=r.vocab_size or 2**63) for t in r.tokens),
    "prompt_tokens": lambda r: _is_whole(r.meta.get("prompt_tokens", 0)),
    "it continues": lambda r: r.meta.get("prompt_tokens", len(r.request.token_ids)) == len(r.request.token_ids),
    "cached_tokens": lambda r: _is_whole(r.meta.get("cached_tokens", 0)),
    "no output_token_logprobs": _has_logprobs,
    "output_ids has length": lambda r: len(r.pairs) == len(r.tokens),
    "does not belong": lambda r: all(_is_whole(t) and t == i for (_, t), i in zip(r.pairs, r.tokens, strict=False)),
    "is not a finite number": lambda r: all(_is_logprob(logprob) for logprob, _ in r.pairs),
    "no weight_versions": lambda r: isinstance(r.meta.get("weight_versions"), list),
    "do not cover": _join,
    "is not a whole number": _versions_are_numbers,
}
"""What holds for a right reply, by words from the message about a reply that breaks it."""


def meaning(raw: Any, request: GenerateRequest, vocab_size: int | None) -> GenerateResult:
    """Return what a reply, as JSON, means. Raises FaultyReplyError."""
    reply = Reply(raw, request, vocab_size)
    if faults := {words for words, holds in RULES.items() if not holds(reply)}:
        raise FaultyReplyError(faults)
    spans = [VersionSpan(_version(v) or 0, start, end) for start, end, v in reply.ranges() if start != end]
    return GenerateResult(
        rid=request.rid,
        token_ids=np.array(reply.tokens, np.int64),
        behaviour_logprobs=np.array([0.0 if logprob > 0 else float(logprob) for logprob, _ in reply.pairs], np.float32),
        spans=tuple(spans),
        finish_reason=reply.reason,
        num_prompt_tokens=len(request.token_ids),
        num_cached_tokens=reply.meta.get("cached_tokens", 0),
    )
