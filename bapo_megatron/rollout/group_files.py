"""Groups in files, as JSON: in a checkpoint's state (book.py), and in recordings (recorded.py).

    {"prompt": {...}, "prompt_values": {}, "samples": [{"sample_id": "12.0", "need": {"needs": "tokens", ...},
      "trajectories": [{"segments": [{"version": 4, "step": 2, "values": {"token_ids": [7], ...}}]}], ...}]}

The prompt and its rows are there once. A checkpoint has numbers of rows in place of the rows (`tokens.JoinedRows`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationInfo
from typing_extensions import TypedDict

from bapo_megatron.tokens import BEHAVIOUR_LOGPROBS, TOKEN_IDS, Array, Rows, TokenStream
from bapo_megatron.types import (
    Ended,
    FinishReason,
    Given,
    Giver,
    Group,
    Natural,
    Need,
    NeedsEnvironment,
    NeedsTokens,
    Number,
    Prompt,
    Sample,
    Sampled,
    Segment,
    Trajectory,
    TurnEnd,
)


def _in_vocabulary(token_ids: list[int], info: ValidationInfo) -> list[int]:
    vocab_size = (info.context or {}).get("vocab_size")
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        raise ValueError(f"token {max(token_ids)} is not in the model's vocabulary of {vocab_size}")
    return token_ids


TokenIds = Annotated[list[Natural], AfterValidator(_in_vocabulary)]
"""Tokens in JSON. With "vocab_size" in the context, each must be below it."""


def _not_newer(version: int, info: ValidationInfo) -> int:
    newest = (info.context or {}).get("version")
    if newest is not None and version > newest:
        raise ValueError(f"weight version {version} is newer than the weights, which have version {newest}")
    return version


def _origin(segment: SegmentJson) -> SegmentJson:
    has = [name for name in ("version", "step", "by") if name in segment]
    if has not in (["version", "step"], ["by"]):
        raise ValueError(f"a segment has version and step, or by; this one has {' and '.join(has) or 'none'}")
    return segment


class SegmentJson(TypedDict):
    """A `Segment` in a file: its values by the name of their stream."""

    version: NotRequired[Annotated[Natural, AfterValidator(_not_newer)]]
    step: NotRequired[Natural]
    by: NotRequired[Giver]  # for given tokens
    values: dict[str, Any]


class TrajectoryJson(TypedDict):
    """A `Trajectory` in a file, without its prompt."""

    segments: list[Annotated[SegmentJson, AfterValidator(_origin)]]


RewardJson = Number | Annotated[dict[str, Number], Field(min_length=1)]


class NeedsTokensJson(TypedDict):
    """`NeedsTokens` in a file."""

    needs: Literal["tokens"]
    trajectory: Natural
    max_turn_tokens: NotRequired[Natural | None]


class NeedsEnvironmentJson(TypedDict):
    """`NeedsEnvironment` in a file."""

    needs: Literal["environment"]
    turn_end: TurnEnd | None
    trajectory: Natural


class EndedJson(TypedDict):
    """`Ended` in a file."""

    needs: Literal["nothing"]
    reason: FinishReason
    reward: Number | None
    problem: Literal["timeout", "error"] | None
    message: str
    parts: NotRequired[dict[str, Number]]


NeedJson = Annotated[NeedsTokensJson | NeedsEnvironmentJson | EndedJson, Field(discriminator="needs")]
_NEEDS: dict[str, type[Need]] = {"tokens": NeedsTokens, "environment": NeedsEnvironment, "nothing": Ended}


def _fits(sample: SampleJson) -> SampleJson:
    need, num = sample["need"], len(sample["trajectories"])
    if need["needs"] != "nothing" and need["trajectory"] >= num:
        raise ValueError(f"trajectory {need['trajectory']} is not one of {num}")
    if need["needs"] == "nothing" and (need["reward"] is None) != (need["reason"] == "failed"):
        raise ValueError(f"it ended by {need['reason']!r} {'without' if need['reward'] is None else 'with'} a reward")
    return sample


class SampleJson(TypedDict):
    """A `Sample` in a file, without its prompt."""

    sample_id: str
    trajectories: Annotated[list[TrajectoryJson], Field(min_length=1)]
    need: NeedJson
    state: Any
    turn_rewards: list[RewardJson | None]


class PromptJson(TypedDict):
    """A `Prompt` in a file."""

    prompt_id: Natural
    token_ids: TokenIds
    text: str
    answer: Any
    source: str


def _is_utf8(prompt: PromptJson) -> PromptJson:
    json.dumps(prompt, ensure_ascii=False, allow_nan=False).encode()
    return prompt


class GroupJson(TypedDict):
    """A `Group` in a file."""

    prompt: Annotated[PromptJson, AfterValidator(_is_utf8)]
    prompt_values: dict[str, Any]
    samples: list[Annotated[SampleJson, AfterValidator(_fits)]]


_GROUP = TypeAdapter(GroupJson)


def group_to_json(group: Group) -> dict[str, Any]:
    """Return JSON whose `values` are arrays, for the writer to encode. It has the prompt and its rows once."""

    def of_segment(segment: Segment) -> dict[str, Any]:
        return {**segment.origin.facts, "values": _named(segment.values)}

    def of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
        is_shared = group.is_prompt(trajectory.segments[0])
        return {"segments": [of_segment(s) for s in trajectory.segments[is_shared:]]}

    samples = [
        {
            "sample_id": s.sample_id,
            "trajectories": [of_trajectory(t) for t in s.trajectories],
            "need": {"needs": next(n for n, kind in _NEEDS.items() if type(s.need) is kind), **asdict(s.need)},
            "state": s.state,
            "turn_rewards": list(s.turn_rewards),
        }
        for s in group.samples
    ]
    rows = group.prompt_segment.rows if group.samples else {}
    return {"prompt": asdict(group.prompt), "prompt_values": _named(rows), "samples": samples}


def group_from_json(
    value: Any,
    streams: Iterable[TokenStream] = (),
    vocab_size: int | None = None,
    *,
    skip_others: bool = False,
) -> Group:
    """Return the group that `group_to_json` described; the values may be arrays or encoded.

    Args:
        streams: the streams of models and plugins that its tokens have.
        skip_others: leave out rows of other streams, which are otherwise an error.

    Raises:
        ValueError: a field is missing or wrong; names prompt, sample and stream.
    """
    group = _GROUP.validate_python(value)
    p, named = group["prompt"], {stream.name: stream for stream in streams}
    if skip_others:
        read = {*named, TOKEN_IDS.name, BEHAVIOUR_LOGPROBS.name}
        group = with_values(group, lambda values: {name: values[name] for name in values if name in read})
    prompt = Prompt(p["prompt_id"], tuple(p["token_ids"]), p["text"], p["answer"], p["source"])
    where = f"prompt {prompt.prompt_id}"
    try:
        rows = _checked(group["prompt_values"], len(prompt.token_ids), named)
        first = Segment.given("prompt", prompt.token_ids, rows)
        samples = []
        for s in group["samples"]:
            where = f"response {s['sample_id']} of prompt {prompt.prompt_id}"
            trajectories = []
            for t in s["trajectories"]:
                segments = [_segment(segment, named, vocab_size) for segment in t["segments"]]
                has_own = bool(segments) and segments[0].origin == Given("prompt")
                trajectories.append(Trajectory(tuple(segments if has_own else [first, *segments])))
                trajectories[-1].check_complete(named.values())
            facts: dict[str, Any] = {name: fact for name, fact in s["need"].items() if name != "needs"}
            need = _NEEDS[s["need"]["needs"]](**facts)
            sample = Sample(s["sample_id"], prompt, tuple(trajectories), need, s["state"], tuple(s["turn_rewards"]))
            samples.append(sample)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from problem
    return Group(prompt, tuple(samples))


def _segment(s: SegmentJson, streams: Mapping[str, TokenStream], vocab_size: int | None) -> Segment:
    """Return the segment that the JSON describes. Raises ValueError naming a stream that does not fit."""
    origin = Sampled(s["version"], s["step"], BEHAVIOUR_LOGPROBS.filled(0)) if "version" in s else Given(s["by"])
    found = s["values"]
    needed = {TOKEN_IDS, BEHAVIOUR_LOGPROBS} if isinstance(origin, Sampled) else {TOKEN_IDS}
    if absent := [stream.name for stream in needed if stream.name not in found]:
        raise ValueError(f"stream {absent[0]}: is missing")
    num_tokens = len(found[TOKEN_IDS.name]) if isinstance(found[TOKEN_IDS.name], list | Array) else 0
    values = _checked(found, num_tokens, {stream.name: stream for stream in needed} | dict(streams))
    if vocab_size is not None and num_tokens and (most := int(values[TOKEN_IDS].max())) >= vocab_size:
        raise ValueError(f"token {most} is not in the model's vocabulary of {vocab_size}")
    return Segment.of_values(values, origin)


def _checked(values: Mapping[str, Any], num_rows: int, streams: Mapping[str, TokenStream]) -> Rows:
    if unknown := sorted(values.keys() - streams.keys()):
        raise ValueError(f"stream {unknown[0]}: is not one of this run, which has {', '.join(sorted(streams))}")
    return {streams[name]: streams[name].checked(rows, num_rows, filled=True) for name, rows in values.items()}


def _named(rows: Rows) -> dict[str, Array]:
    return {stream.name: values for stream, values in rows.items()}


def with_values(group: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to all values of a `GroupJson` in order, the prompt's, then each segment's; return the result."""

    def of_sample(sample: Any) -> dict[str, Any]:
        trajectories = [
            {**t, "segments": [{**s, "values": change(s["values"])} for s in t["segments"]]}
            for t in sample["trajectories"]
        ]
        return {**sample, "trajectories": trajectories}

    prompt_values = change(group["prompt_values"])
    return {**group, "prompt_values": prompt_values, "samples": [of_sample(s) for s in group["samples"]]}
