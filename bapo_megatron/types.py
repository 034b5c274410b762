"""The nouns: each hand-over between two rooms of the package is one of these types.

    Prompt -> Trajectory (of Segments) -> Group -> Batch -> MiniBatch (of MicroBatches) -> ClipBounds

Shape legend (suffix of a tensor's name):
    S  sequences (prompt + response) packed one after the other
    T  tokens of all sequences, prompts included
    R  response tokens: the rows of hidden states that predict one

A *weight version* counts the optimizer updates that the weights have seen; version 0 is the checkpoint the run started
from. The *age* of a token in training is the learner's version minus the version that sampled it. A token keeps one
`behaviour_logprobs` entry from the engine's reply to the loss: its log-prob under the tempered distribution that
sampled it, in nats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationInfo
from torch import Tensor
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A count, version or id in JSON."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number in JSON."""
LogProb = Annotated[float, Field(strict=True, ge=-3.4028235e38, le=0.0)]
"""A log-prob in JSON, as float32 can hold it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised question, with the data that its verifier needs to judge an answer.

    Example: Prompt(prompt_id=12, token_ids=(5, 9, 4), text="3+5=", answer="1", source="chains")
    """

    prompt_id: int  # position in the prompt stream, unique within a run
    token_ids: tuple[int, ...]
    text: str  # the user's words, before the chat template
    answer: Any  # JSON value for the verifier: a reference answer, or the entry of a procedural data set
    source: str  # name of the prompt source


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of response tokens sampled by one weight version in one training step.

    Example: Segment(version=4, step=2, token_ids=(7, 7, 1), behaviour_logprobs=(-0.1, -2.3, -0.7))
    """

    version: int  # weight version that sampled these tokens
    step: int  # training step during which they were sampled
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]  # one per token

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.behaviour_logprobs), "a segment needs one behaviour log-prob per token"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A response, finished or partial: a prompt and the segments sampled so far.

    Example: a response begun at version 4 and resumed at version 6 has two segments, and num_resumed_tokens > 0.
    """

    sample_id: str  # "<prompt_id>.<index in the group>", unique within a run
    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    finish_reason: FinishReason | None = None  # None while it is partial
    reward: float | None = None

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def behaviour_logprobs(self) -> tuple[float, ...]:
        return tuple(x for s in self.segments for x in s.behaviour_logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(s.version for s in self.segments for _ in s.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_resumed_tokens(self) -> int:
        """Number of tokens sampled in a later training step than the response's first one."""
        first = self.segments[0].step if self.segments else 0
        return sum(len(s.token_ids) for s in self.segments if s.step > first)

    @property
    def oldest_version(self) -> int | None:
        return min((s.version for s in self.segments), default=None)

    def extended(self, segments: Sequence[Segment], finish_reason: FinishReason | None) -> Trajectory:
        """Return the response with more tokens, merging segments of one version and step."""
        assert self.finish_reason is None, f"{self.sample_id} is finished and cannot grow"
        merged = list(self.segments)
        for new in segments:
            if not new.token_ids:
                continue
            last = merged[-1] if merged else None
            if last is not None and (last.version, last.step) == (new.version, new.step):
                merged[-1] = replace(
                    last,
                    token_ids=last.token_ids + new.token_ids,
                    behaviour_logprobs=last.behaviour_logprobs + new.behaviour_logprobs,
                )
            else:
                merged.append(new)
        return replace(self, segments=tuple(merged), finish_reason=finish_reason)


def _in_vocabulary(token_ids: list[int], info: ValidationInfo) -> list[int]:
    vocab_size = (info.context or {}).get("vocab_size")
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        raise ValueError(f"token {max(token_ids)} is not in the model's vocabulary of {vocab_size}")
    return token_ids


TokenIds = Annotated[list[Count], AfterValidator(_in_vocabulary)]
"""Tokens in JSON. With "vocab_size" in the context, it has a row for each."""


def _not_newer(version: int, info: ValidationInfo) -> int:
    newest = (info.context or {}).get("version")
    if newest is not None and version > newest:
        raise ValueError(f"weight version {version} is newer than the weights, which have version {newest}")
    return version


class SegmentJson(TypedDict):
    """A `Segment` in a file."""

    version: Annotated[Count, AfterValidator(_not_newer)]
    step: Count
    token_ids: TokenIds
    behaviour_logprobs: NotRequired[list[LogProb]]
    logprobs: NotRequired[list[LogProb]]  # the name in older files


def _logprobs(segment: SegmentJson) -> list[float]:
    return segment["behaviour_logprobs"] if "behaviour_logprobs" in segment else segment.get("logprobs", [])


def _has_logprobs(segment: SegmentJson) -> SegmentJson:
    if len(_logprobs(segment)) != (num_tokens := len(segment["token_ids"])):
        raise ValueError(f"{num_tokens} tokens with {len(_logprobs(segment))} behaviour_logprobs")
    return segment


class TrajectoryJson(TypedDict):
    """A `Trajectory` in a file, without its prompt."""

    sample_id: str
    segments: list[Annotated[SegmentJson, AfterValidator(_has_logprobs)]]
    finish_reason: FinishReason | None
    reward: Number | None


class PromptJson(TypedDict):
    """A `Prompt` in a file."""

    prompt_id: Count
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
    trajectories: list[TrajectoryJson]


_GROUP = TypeAdapter(GroupJson)


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to one prompt: the unit in which advantages are computed."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        rewards = tuple(t.reward for t in self.trajectories)
        assert all(r is not None for r in rewards), f"group {self.prompt.prompt_id} has unscored responses"
        return rewards  # type: ignore[return-value]

    @property
    def is_complete(self) -> bool:
        """Whether all responses have ended."""
        return all(t.finish_reason for t in self.trajectories)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that keeps every bit of every float; the prompt is in it once."""
        trajectories = [
            {
                "sample_id": t.sample_id,
                "segments": [asdict(s) for s in t.segments],
                "finish_reason": t.finish_reason,
                "reward": t.reward,
            }
            for t in self.trajectories
        ]
        return {"prompt": asdict(self.prompt), "trajectories": trajectories}

    @classmethod
    def from_json(cls, value: Any) -> Group:
        """Return the group behind `to_json`, also of older files, whose segments say "logprobs".

        Raises:
            ValidationError: a field is missing or wrong.
        """
        group = _GROUP.validate_python(value)
        p = group["prompt"]
        prompt = Prompt(p["prompt_id"], tuple(p["token_ids"]), p["text"], p["answer"], p["source"])

        def segment(s: SegmentJson) -> Segment:
            return Segment(s["version"], s["step"], tuple(s["token_ids"]), tuple(_logprobs(s)))

        return cls(
            prompt,
            tuple(
                Trajectory(t["sample_id"], prompt, tuple(map(segment, t["segments"])), t["finish_reason"], t["reward"])
                for t in group["trajectories"]
            ),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of one step, padding-free, prompts first in each sequence.

    Example with two sequences "ab|c" and "d|ef" (prompt|response):
        token_ids_T = [a b c d e f]; seq_lens_S = [3, 3]; prompt_lens_S = [2, 1]
        behaviour_logprobs_T = [0 0 lp(c) 0 lp(e) lp(f)]; versions_T = [-1 -1 v(c) -1 v(e) v(f)]
    """

    token_ids_T: Tensor  # int64
    seq_lens_S: Tensor  # int64
    prompt_lens_S: Tensor  # int64
    advantages_T: Tensor  # float32, 0 on prompts
    behaviour_logprobs_T: Tensor  # float32, 0 on prompts
    versions_T: Tensor  # int64, -1 on prompts
    mask_T: Tensor  # bool: the response tokens that are trained
    rewards_S: Tensor | None = None  # float32, shaped: the source of advantages; a critic needs them
    proximal_logprobs_T: Tensor | None = None  # float32, 0 on prompts; the learner's at the start of the step, if used
    proximal_version: int | None = None  # weight version that computed them
    reference_logprobs_T: Tensor | None = None  # float32, 0 on prompts; the KL term's policy, if used
    metrics: dict[str, float] = field(default_factory=dict)  # of the rollout behind it

    @property
    def num_sequences(self) -> int:
        return self.seq_lens_S.numel()

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass on one rank: packed sequences, and the hidden rows that predict response tokens.

    rows_R[i] is the place, among this rank's tokens, of the hidden state that predicts response token targets_R[i].
    Padding for the layout ends a sequence or is an extra sequence at the end; it has no response rows. With context
    parallelism the T tokens are this rank's part of the pack (`buffer.packing.context_tokens`), the R rows are of its
    hidden states, and cu_seqlens_S1 describes the whole pack.
    """

    token_ids_T: Tensor  # int64
    position_ids_T: Tensor  # int64, restarts at 0 in each sequence
    cu_seqlens_S1: Tensor  # int32, [S + 1], starts with 0, ends with T x context ranks; always on the CPU
    rows_R: Tensor  # int64, ascending
    sequence_R: Tensor  # int64, ascending: the pack's sequence that each response token belongs to
    batch_rows_R: Tensor  # int64: place of each response token in the Batch
    targets_R: Tensor  # int64
    advantages_R: Tensor  # float32
    behaviour_logprobs_R: Tensor  # float32
    versions_R: Tensor  # int64
    mask_R: Tensor  # bool
    proximal_logprobs_R: Tensor | None = None  # float32; None unless the Batch has them
    reference_logprobs_R: Tensor | None = None  # float32; None unless the Batch has them

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with all tensors but the description of the pack on `device`."""
        tensors = {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}
        del tensors["cu_seqlens_S1"]  # to read a length from a GPU would wait for all work before
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Sums over sequences that decide the FLOPs of a pass.

    Example: sequences of 3 and 4 tokens, with prompts of 2 and 1: TokenCounts(tokens=7, squares=25, responses=4).
    """

    tokens: int = 0
    squares: int = 0  # squared lengths: a token attends to those before it
    responses: int = 0  # tokens whose logits are computed


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The input of one optimizer step: this rank's micro-batches, and the token count of all ranks together.

    Every data-parallel rank holds the same number of micro-batches. With pipeline stages, all micro-batches of a
    data-parallel rank have the same number of tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained_tokens: int  # over all data and context ranks: the divisor of loss and gradient
    proximal_version: int | None = None  # weight version that computed the proximal log-probs; None without them
    counts: TokenCounts = TokenCounts()  # over all data ranks, without padding


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Ratio bounds for one optimizer step, found by BAPO's search.

    Example: ClipBounds(low=0.6, high=1.45, positive_share=0.41, saturated=False, num_moves=5)
    """

    low: float
    high: float
    positive_share: float  # rho at these bounds; nan if no token contributes
    saturated: bool  # the search ran out of room before it reached its target
    num_moves: int  # grid steps taken, of both bounds together
