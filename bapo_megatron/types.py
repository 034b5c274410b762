"""The nouns: every hand-over between two rooms of the house is one of these types.

    Prompt -> Trajectory (of Segments) -> Group -> Batch -> MiniBatch (of MicroBatches) -> ClipBounds

Shape legend (suffix of a tensor's name):
    S  sequences (prompt + response) packed one after the other
    T  tokens of all sequences, prompts included
    R  response tokens, that is rows of the hidden states that predict one

A *weight version* is the number of optimizer updates that the weights have seen; version 0 is the checkpoint the run
started from. The *age* of a token when it is trained is the learner's version minus the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised, with what its verifier needs to judge an answer.

    Example: Prompt(prompt_id=12, token_ids=(5, 9, 4), text="3+5=", answer="1", source="chains")
    """

    prompt_id: int  # position in the prompt stream, unique within a run
    token_ids: tuple[int, ...]
    text: str  # what the user wrote, before the chat template
    answer: Any  # JSON value for the verifier: the reference answer, or the entry of a procedural data set
    source: str  # name of the prompt source


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of response tokens sampled by one weight version in one training step.

    Example: Segment(version=4, step=2, token_ids=(7, 7, 1), logprobs=(-0.1, -2.3, -0.7))
    """

    version: int  # weight version that sampled these tokens
    step: int  # training step during which they were sampled
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # behaviour log-prob of each token, of the tempered distribution that sampled it

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "a segment needs one behaviour log-prob per token"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response, finished or not: a prompt and the segments sampled so far.

    Example: a response begun at version 4 and resumed at version 6 has two segments, and 0 < num_resumed_tokens.
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
        return tuple(x for s in self.segments for x in s.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(s.version for s in self.segments for _ in s.token_ids)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens sampled in a later training step than the response's first token."""
        first = self.segments[0].step if self.segments else 0
        return sum(len(s.token_ids) for s in self.segments if s.step > first)

    @property
    def oldest_version(self) -> int | None:
        return min((s.version for s in self.segments), default=None)

    def extended(self, segments: Sequence[Segment], finish_reason: FinishReason | None) -> Trajectory:
        """The same response with more tokens; segments of the same version and step are merged."""
        assert self.finish_reason is None, f"{self.sample_id} is finished and cannot grow"
        merged = list(self.segments)
        for new in segments:
            if not new.token_ids:
                continue
            last = merged[-1] if merged else None
            if last is not None and (last.version, last.step) == (new.version, new.step):
                merged[-1] = replace(
                    last, token_ids=last.token_ids + new.token_ids, logprobs=last.logprobs + new.logprobs
                )
            else:
                merged.append(new)
        return replace(self, segments=tuple(merged), finish_reason=finish_reason)


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


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step learns from, padding-free, prompts first in each sequence.

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
    rewards_S: Tensor | None = None  # float32, shaped: what advantages are made of; a critic needs them
    proximal_logprobs_T: Tensor | None = None  # float32, 0 on prompts; of the learner at the start of the step, if used
    proximal_version: int | None = None  # weight version that computed them
    reference_logprobs_T: Tensor | None = None  # float32, 0 on prompts; of the reference policy, if used
    metrics: dict[str, float] = field(default_factory=dict)  # about the rollout behind it

    @property
    def num_sequences(self) -> int:
        return self.seq_lens_S.numel()

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass on one rank: packed sequences, and which hidden rows predict a response token.

    Padding, where the layout asks for it, ends a sequence or is one extra sequence at the end; it has no response rows.
    rows_R[i] is where the hidden state that predicts the response token targets_R[i] is among this rank's tokens.
    With context parallelism the T tokens are this rank's part of the pack (`buffer.packing.context_tokens`), the R rows
    those of its hidden states, and cu_seqlens_S1 describes the whole pack.
    """

    token_ids_T: Tensor  # int64
    position_ids_T: Tensor  # int64, restarts at 0 in each sequence
    cu_seqlens_S1: Tensor  # int32, [S + 1], starts with 0, ends with T x context ranks
    rows_R: Tensor  # int64, ascending
    batch_rows_R: Tensor  # int64: where in the Batch each response token is
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


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step: this rank's micro-batches, and the token count of all ranks together.

    Every data-parallel rank holds the same number of micro-batches. Where the layout has pipeline stages, those of a
    data-parallel rank have the same number of tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained_tokens: int  # over all data and context ranks: the divisor of loss and gradient
    proximal_version: int | None = None  # weight version that computed the proximal log-probs; None without them


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Ratio bounds for one optimizer step, as BAPO's search leaves them.

    Example: ClipBounds(low=0.6, high=1.45, positive_share=0.41, saturated=False, num_moves=5)
    """

    low: float
    high: float
    positive_share: float  # rho at these bounds; nan where nothing contributes
    saturated: bool  # the search ran out of room before it reached its target
    num_moves: int  # grid steps taken, of both bounds together
