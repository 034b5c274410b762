"""The nouns: whatever one part of the package hands to another is one of these types.

    Prompt -> Sample (of Trajectories, of Segments) -> Group -> Batch -> MiniBatch (of MicroBatches) -> ClipBounds

Shape legend (suffix of a tensor's name):
    S  sequences (prompt + response) packed one after the other
    T  tokens of all sequences, prompts included
    R  sampled tokens: the rows of hidden states that predict one

A *weight version* counts the optimizer updates that the weights have seen; version 0 is the checkpoint the run started
from. The *age* of a token in training is the learner's version minus the version that sampled it. A token is *sampled*
by the policy or *given* to it, as the prompt is; only sampled tokens have an age, a behaviour log-prob and an
advantage. A value declared in tokens.py keeps its name from the engine's reply to the loss: `behaviour_logprobs` are
log-probs under the tempered distribution that sampled the token, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bapo_megatron.tokens import (
    BEHAVIOUR_LOGPROBS,
    CORE_STREAMS,
    SAMPLER_TOP_IDS,
    TOKEN_IDS,
    VERSIONS,
    Array,
    Rows,
    TokenStream,
    read_only,
)

TurnEnd = Literal["stop", "length"]
"""How a turn of the policy ends: at a stop token, or at a length limit of the turn or the sample."""
FinishReason = Literal["stop", "length", "turns", "failed"]
"""How a sample ends: as its last turn ended, at its limit of turns, or dropped, because its environment failed."""
Giver = Literal["prompt", "template", "environment", "trajectory"]
"""Who gave a token to the policy; "trajectory" means another trajectory of the same sample, which trains it."""
Reward = float | Mapping[str, float]
"""A number, or named parts that are summed."""
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A count, version or id in JSON."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number in JSON."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The origin of tokens that one weight version sampled in one training step."""

    version: int  # weight version that sampled these tokens
    step: int  # training step during which they were sampled
    behaviour_logprobs: Array  # float32, one per token

    @property
    def facts(self) -> dict[str, Any]:
        """What all its tokens share, as JSON."""
        return {"version": self.version, "step": self.step}


@dataclass(frozen=True, slots=True)
class Given:
    """The origin of tokens that the policy read but did not sample."""

    by: Giver

    @property
    def facts(self) -> dict[str, Any]:
        """What all its tokens share, as JSON."""
        return {"by": self.by}


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens with one origin. Arrays are read-only.

    Example: Segment.sampled(version=4, step=2, token_ids=(7, 7, 1), behaviour_logprobs=(-0.1, -2.3, -0.7))
    """

    token_ids: Array  # int64
    origin: Sampled | Given
    rows: Rows = field(default_factory=dict)  # streams of models and plugins; each has all rows or none

    def __post_init__(self) -> None:
        for stream, rows in self.values.items():
            assert len(rows) == len(self.token_ids), f"a segment needs one row of {stream.name} per token"

    @classmethod
    def sampled(
        cls,
        version: int,
        step: int,
        token_ids: Sequence[int] | Array,
        behaviour_logprobs: Sequence[float] | Array,
        rows: Rows | None = None,
    ) -> Segment:
        """Return a segment of tokens that the policy sampled."""
        logprobs = _array(BEHAVIOUR_LOGPROBS, behaviour_logprobs)
        return cls(_array(TOKEN_IDS, token_ids), Sampled(version, step, logprobs), rows or {})

    @classmethod
    def given(cls, by: Giver, token_ids: Sequence[int] | Array, rows: Rows | None = None) -> Segment:
        """Return a segment of tokens that are context for the policy."""
        return cls(_array(TOKEN_IDS, token_ids), Given(by), rows or {})

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def values(self) -> Rows:
        """All rows of its tokens, by stream."""
        core = {TOKEN_IDS: self.token_ids}
        if isinstance(self.origin, Sampled):
            core[BEHAVIOUR_LOGPROBS] = self.origin.behaviour_logprobs
        return {**core, **self.rows}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        if self.origin.facts != other.origin.facts:
            return False
        mine, others = self.values, other.values
        return mine.keys() == others.keys() and all(np.array_equal(mine[s], others[s]) for s in mine)

    def followed_by(self, other: Segment) -> Segment | None:
        """Return one segment with the tokens of both, or None if their origins or streams differ."""
        mine, others = self.values, other.values
        if self.origin.facts != other.origin.facts or mine.keys() != others.keys():
            return None
        joined = {stream: stream.joined([mine[stream], others[stream]]) for stream in mine}
        return self.of_values(joined, self.origin)

    def as_context(self, num_tokens: int) -> Segment:
        """Return the first tokens as given ones, with the rows of input tokens ("fed" streams)."""
        by: Giver = "trajectory" if isinstance(self.origin, Sampled) else self.origin.by
        rows = {stream: values[:num_tokens] for stream, values in self.rows.items() if stream.on == "fed"}
        return Segment(self.token_ids[:num_tokens], Given(by), rows)

    @classmethod
    def of_values(cls, values: Rows, origin: Sampled | Given) -> Segment:
        """Return a segment with these `values` and the facts of `origin`."""
        rows = dict(values)
        token_ids = rows.pop(TOKEN_IDS)
        if isinstance(origin, Sampled):
            origin = replace(origin, behaviour_logprobs=rows.pop(BEHAVIOUR_LOGPROBS))
        return cls(token_ids, origin, rows)


def _array(stream: TokenStream, values: Sequence[float] | Array) -> Array:
    """Return the values, read-only: the same array if it is so already, otherwise a copy."""
    if isinstance(values, Array) and values.dtype == stream.dtype and not values.flags.writeable:
        return values
    return read_only(np.array(values, stream.dtype))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One linear sequence of tokens, which an engine continues, and which becomes one sequence of a batch.

    Tokens that another trajectory of the sample trains are given ones here, so each sampled token is trained once.

    Example: a response begun at version 4 and resumed at version 6 has a given segment and two sampled ones.
    """

    segments: tuple[Segment, ...]  # the first one is the prompt
    num_tokens: int = field(init=False, compare=False, repr=False)  # rank 0 reads these often
    num_sampled_tokens: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(len(s.token_ids) for s in self.segments))
        num_sampled = sum(len(s.token_ids) for s in self.segments if isinstance(s.origin, Sampled))
        object.__setattr__(self, "num_sampled_tokens", num_sampled)

    @property
    def token_ids(self) -> Array:
        """All tokens, int64."""
        return TOKEN_IDS.joined(s.token_ids for s in self.segments)

    @property
    def sampled_segments(self) -> list[tuple[Sampled, Segment]]:
        return [(s.origin, s) for s in self.segments if isinstance(s.origin, Sampled)]

    @property
    def num_shared_tokens(self) -> int:
        """Number of leading tokens shared with another trajectory; 0 if none are."""
        ends = [i + 1 for i, s in enumerate(self.segments) if s.origin == Given("trajectory")]
        return sum(s.num_tokens for s in self.segments[: max(ends, default=0)])

    @property
    def turns(self) -> list[Array]:
        """The tokens of each turn, int64: sampled tokens with no given token between them."""
        turns: list[list[Array]] = []
        before: Segment | None = None
        for segment in self.segments:
            if isinstance(segment.origin, Sampled):
                if before is None or not isinstance(before.origin, Sampled):
                    turns.append([])
                turns[-1].append(segment.token_ids)
            before = segment
        return [TOKEN_IDS.joined(parts) for parts in turns]

    @property
    def num_turn_tokens(self) -> int:
        """Number of tokens of the turn at the end; 0 after a given token."""
        num = 0
        for segment in reversed(self.segments):
            if not isinstance(segment.origin, Sampled):
                break
            num += segment.num_tokens
        return num

    def num_fed(self, streams: Iterable[TokenStream]) -> int:
        """Return how many leading tokens have rows of all fed `streams`; the first token needs none."""
        fed, num = [stream for stream in streams if stream.on == "fed"], 0
        for segment in self.segments:
            if not all(stream in segment.rows for stream in fed):
                break
            num += segment.num_tokens
        return max(num, 1)

    def check_complete(self, streams: Iterable[TokenStream]) -> None:
        """Raise ValueError if needed rows of engines' `streams` are missing up to the last sampled token."""
        needed = [stream for stream in streams if stream.is_needed]
        last = max((i for i, s in enumerate(self.segments) if isinstance(s.origin, Sampled)), default=-1)
        for segment in self.segments[: last + 1]:
            for stream in needed:
                has_rows = stream.on == "fed" or isinstance(segment.origin, Sampled)
                if has_rows and stream not in segment.rows:
                    raise ValueError(f"stream {stream.name}: is missing")

    def extended(self, segments: Iterable[Segment], late: Rows | None = None) -> Trajectory:
        """Return the sequence with more tokens, merging segments of the same origin.

        Args:
            late: rows of the last tokens already here, which an engine has read only now: see `num_fed`.
        """
        merged = [*self._completed(late or {})]
        for new in segments:
            if not new.num_tokens:
                continue
            joined = merged[-1].followed_by(new) if len(merged) > 1 else None  # a group shares the prompt's segment
            merged[-1:] = [joined] if joined is not None else [merged[-1], new]
        return Trajectory(tuple(merged))

    def branch(self, num_tokens: int) -> Trajectory:
        """Return a new sequence whose context is the first `num_tokens` of this one."""
        begun, num_left = Trajectory(self.segments[:1]), num_tokens - self.segments[0].num_tokens
        assert num_left >= 0, "a branch has the whole prompt"
        for segment in self.segments[1:]:
            begun = begun.extended([segment.as_context(max(num_left, 0))])
            num_left -= segment.num_tokens
        assert num_left <= 0, f"a branch at token {num_tokens} of {self.num_tokens}"
        return begun

    def _completed(self, late: Rows) -> Iterable[Segment]:
        """Yield the segments with the rows that they lacked.

        Example: a prompt of 3 tokens and 2 sampled ones, all without rows, and `late` with the rows a, b, c, d of a
        stream. They belong to the last 4 tokens, and the very first token has an empty row: the prompt gets (empty, a,
        b), and the sampled tokens get (c, d).
        """
        end = self.num_tokens
        starts = {stream: end - len(rows) for stream, rows in late.items()}
        start = 0
        for number, segment in enumerate(self.segments):
            rows = dict(segment.rows)
            for stream, values in late.items():
                first = start - starts[stream]
                if stream not in rows and (number == 0 or first + segment.num_tokens > 0):
                    part = values[max(first, 0) : first + segment.num_tokens]
                    rows[stream] = stream.joined([stream.filled(1), part] if number == 0 else [part])
            yield segment if len(rows) == len(segment.rows) else replace(segment, rows=rows)
            start += segment.num_tokens


@dataclass(frozen=True, slots=True)
class NeedsTokens:
    """The state of a sample whose next token is the policy's."""

    trajectory: int = 0  # index of the trajectory that grows
    max_turn_tokens: int | None = None  # a limit of this turn's own


@dataclass(frozen=True, slots=True)
class NeedsEnvironment:
    """The state of a sample whose turn has ended: its environment or its judge answers next."""

    turn_end: TurnEnd | None  # None before the first turn, where an agent program begins the sample
    trajectory: int = 0  # index of the trajectory with the turn


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a sample, as its judge or its environment states it.

    A failed sample has no reward: it leaves its group's baseline and is not trained.
    """

    reason: FinishReason | None = None  # None in a judge's verdict, until the driver says how the sample ended
    reward: float | None = None
    problem: Literal["timeout", "error"] | None = None  # what went wrong in its judge or environment
    message: str = ""  # describes the problem, if there is one; otherwise the judge's reason
    parts: Mapping[str, float] = field(default_factory=dict)  # parts of the reward by name, unweighted


Need = NeedsTokens | NeedsEnvironment | Ended


@dataclass(frozen=True, slots=True)
class Sample:
    """One slot of a group: one entry of the ledger, one reward, and the tokens that lead to it.

    Example: Sample.of("12.0", prompt) waits for its first token; a right answer has need=Ended("stop", 1.0).
    """

    sample_id: str  # "<prompt_id>.<index in the group>", unique within a run
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    need: Need = NeedsTokens()
    state: Any = None  # the environment's, a JSON value; None before the first answer
    turn_rewards: tuple[Reward | None, ...] = ()  # for the turns that its environment has answered

    @classmethod
    def of(cls, sample_id: str, prompt: Prompt, segments: Iterable[Segment] = (), need: Need = NeedsTokens()) -> Sample:
        """Return a sample with one trajectory: the prompt, and the segments that follow."""
        first = Segment.given("prompt", prompt.token_ids)
        return cls(sample_id, prompt, (Trajectory((first, *segments)),), need)

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the sample, or its last turn, ended; None while it needs tokens, and before its first turn."""
        match self.need:
            case Ended(reason=reason) | NeedsEnvironment(turn_end=reason):
                return reason
        return None

    @property
    def reward(self) -> float | None:
        """The reward; None before the end, and for an invalid sample."""
        return self.need.reward if isinstance(self.need, Ended) else None

    @property
    def sampled_segments(self) -> list[tuple[Sampled, Segment]]:
        return [found for trajectory in self.trajectories for found in trajectory.sampled_segments]

    @property
    def sampled_ids(self) -> Array:
        """The sampled tokens, int64: the policy's own words."""
        return TOKEN_IDS.joined(s.token_ids for _, s in self.sampled_segments)

    @property
    def behaviour_logprobs(self) -> Array:
        """One per sampled token, float32."""
        return BEHAVIOUR_LOGPROBS.joined(origin.behaviour_logprobs for origin, _ in self.sampled_segments)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(t.num_sampled_tokens for t in self.trajectories)

    @property
    def num_given_tokens(self) -> int:
        """Number of tokens given after the prompt."""
        return sum(t.num_tokens - t.segments[0].num_tokens for t in self.trajectories) - self.num_sampled_tokens

    @property
    def num_resumed_tokens(self) -> int:
        """Number of tokens sampled in a later training step than the first one."""
        sampled = self.sampled_segments
        return sum(s.num_tokens for origin, s in sampled if origin.step > sampled[0][0].step)

    @property
    def versions(self) -> Array:
        """One per sampled token, int64."""
        return VERSIONS.joined(np.full(s.num_tokens, origin.version) for origin, s in self.sampled_segments)

    @property
    def oldest_version(self) -> int | None:
        return min((origin.version for origin, _ in self.sampled_segments), default=None)

    @property
    def turn(self) -> Trajectory:
        """The trajectory that grows, or whose turn has ended."""
        assert not isinstance(self.need, Ended), f"{self.sample_id} has ended and cannot grow"
        return self.trajectories[self.need.trajectory]

    def extended(self, segments: Iterable[Segment], turn_end: TurnEnd | None, late: Rows | None = None) -> Sample:
        """Return the sample with more tokens of the policy: see `Trajectory.extended`."""
        assert isinstance(self.need, NeedsTokens), f"{self.sample_id} needs no tokens"
        grown, place = self.turn.extended(segments, late), self.need.trajectory
        need = self.need if turn_end is None else NeedsEnvironment(turn_end, place)
        return replace(self.with_trajectory(place, grown), need=need)

    def answered(self, token_ids: Sequence[int] | Array, state: Any = None, reward: Reward | None = None) -> Sample:
        """Return the sample with its environment's answer to a turn, and perhaps a reward for this turn."""
        assert isinstance(self.need, NeedsEnvironment), f"{self.sample_id} waits for no answer"
        place, given = self.need.trajectory, Segment.given("environment", token_ids)
        grown = self.with_trajectory(place, self.turn.extended([given]))
        rewards = (*self.turn_rewards, reward)
        return replace(grown, need=NeedsTokens(place), state=state, turn_rewards=rewards)

    def with_trajectory(self, place: int, trajectory: Trajectory) -> Sample:
        """Return the sample with `trajectory` at this index; the next free index appends it."""
        trajectories = (*self.trajectories[:place], trajectory, *self.trajectories[place + 1 :])
        return replace(self, trajectories=trajectories)


def total(reward: Reward) -> float:
    """Return the sum of a reward's parts, or the reward itself if it is a number."""
    return math.fsum(reward.values()) if isinstance(reward, Mapping) else reward


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt: the unit for which advantages are computed."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def valid(self) -> list[Sample]:
        """The samples with a reward. All samples must have ended."""
        assert self.is_complete, f"group {self.prompt.prompt_id} has unscored samples"
        return [s for s in self.samples if s.reward is not None]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of its valid samples."""
        return tuple(s.reward for s in self.valid if s.reward is not None)

    @property
    def has_baseline(self) -> bool:
        """Whether enough samples are valid to compare them: two, or the only one."""
        return len(self.valid) >= min(2, len(self.samples))

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended."""
        return all(isinstance(s.need, Ended) for s in self.samples)

    @classmethod
    def begun(cls, prompt: Prompt, num_samples: int, need: Need = NeedsTokens()) -> Group:
        """Return a group of empty samples, which share the prompt's segment."""
        first = Trajectory((Segment.given("prompt", prompt.token_ids),))
        names = (f"{prompt.prompt_id}.{i}" for i in range(num_samples))
        return cls(prompt, tuple(Sample(name, prompt, (first,), need) for name in names))

    def grown(self, sample: Sample) -> Group:
        """Return the group with a sample that has grown; all samples share the first prompt segment with rows.

        Example: two samples begin with one prompt, without rows. The first comes back with rows of the prompt. Now the
        prompt's segment of both is the new one, so that memory holds these rows once.
        """
        first = max(self.prompt_segment, sample.trajectories[0].segments[0], key=lambda segment: len(segment.rows))

        def sharing(trajectory: Trajectory) -> Trajectory:
            has_own = not self.is_prompt(trajectory.segments[0])
            return trajectory if has_own else Trajectory((first, *trajectory.segments[1:]))

        def grown(old: Sample) -> Sample:
            new = sample if old.sample_id == sample.sample_id else old
            if new is old and first is self.prompt_segment:
                return old
            return replace(new, trajectories=tuple(map(sharing, new.trajectories)))

        return replace(self, samples=tuple(map(grown, self.samples)))

    @property
    def prompt_segment(self) -> Segment:
        """The prompt's segment: every sample's first trajectory begins with it, and so do most other trajectories."""
        return self.samples[0].trajectories[0].segments[0]

    def is_prompt(self, segment: Segment) -> bool:
        """Whether this first segment of a trajectory is the group's prompt, not the trajectory's own."""
        token_ids = self.prompt_segment.token_ids
        return segment.token_ids is token_ids or np.array_equal(segment.token_ids, token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The training data of one step, padding-free, prompts first in each sequence.

    Example with two sequences "ab|c" and "d|ef" (prompt|response):
        token_ids_T = [a b c d e f]; seq_lens_S = [3, 3]; sampled_T = [0 0 1 0 1 1]
        behaviour_logprobs_T = [0 0 lp(c) 0 lp(e) lp(f)]; versions_T = [-1 -1 v(c) -1 v(e) v(f)]

    A rank that was dealt some of the sequences has only their rows, except in streams that every rank needs.
    """

    token_ids_T: Tensor  # int64
    seq_lens_S: Tensor  # int64
    sampled_T: Tensor  # bool: the policy's own tokens; the others were given to it
    advantages_T: Tensor  # float32; given tokens have 0 here and in all other values except versions
    behaviour_logprobs_T: Tensor  # float32
    versions_T: Tensor  # int64, -1 on given tokens
    mask_T: Tensor  # bool: the sampled tokens that are trained
    rewards_S: Tensor | None = None  # float32, after shaping: the source of advantages; a critic needs them
    proximal_logprobs_T: Tensor | None = None  # float32; the learner's at the start of the step, if used
    proximal_version: int | None = None  # weight version that computed them
    reference_logprobs_T: Tensor | None = None  # float32; the KL term's policy, if used
    extra: Mapping[TokenStream, Tensor] = field(default_factory=dict)  # streams of models and plugins: [T, *shape]
    prompt_S: Tensor | None = None  # int64: a number for each prompt; None means that no two sequences share one
    shared_lens_S: Tensor | None = None  # int64: leading tokens that all sequences of a prompt share, rows included
    teacher_S: Tensor | None = None  # int64: which of several teachers in the trainer scores each sequence
    here_S: Tensor | None = None  # bool: sequences whose rows this rank has, ascending; None means all
    metrics: dict[str, float] = field(default_factory=dict)  # from the rollout that made it

    @property
    def num_sequences(self) -> int:
        return self.seq_lens_S.numel()

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask_T.sum())

    @property
    def num_sampled_S(self) -> Tensor:
        """Sampled tokens of each sequence, int64."""
        return self.count_S(self.sampled_T)

    def holding(self, sequences: Tensor) -> Batch:
        """Return the batch marked as holding the rows of these sequences only; its values stay as they are."""
        here_S = torch.zeros(self.num_sequences, dtype=torch.bool)
        here_S[sequences] = True
        return replace(self, here_S=here_S)

    def here(self, values_T: Tensor) -> Tensor:
        """Select this rank's rows from values of all tokens."""
        return values_T if self.here_S is None else values_T[self.here_S.repeat_interleave(self.seq_lens_S)]

    @property
    def num_tokens_here(self) -> int:
        return int(self._lens_here_S.sum())

    @property
    def first_here_S(self) -> Tensor:
        """The index of each sequence's first row among this rank's rows, int64."""
        return self._lens_here_S.cumsum(0) - self._lens_here_S

    @property
    def _lens_here_S(self) -> Tensor:
        return self.seq_lens_S if self.here_S is None else self.seq_lens_S * self.here_S

    def count_S(self, is_counted_T: Tensor) -> Tensor:
        """Return how many tokens of each sequence are counted, int64."""
        ends_T1 = torch.cat([is_counted_T.new_zeros(1, dtype=torch.int64), is_counted_T.cumsum(0)])
        ends_S = self.seq_lens_S.cumsum(0)
        return ends_T1[ends_S] - ends_T1[ends_S - self.seq_lens_S]

    def having(self, stream: TokenStream, rows_T: Tensor) -> Batch:
        """Return the batch with this stream added, or replaced if it has one of that name."""
        if stream in CORE_STREAMS:
            return replace(self, **{f"{stream.name}_T": rows_T})  # type: ignore[arg-type]
        return replace(self, extra={**self.extra, stream: rows_T})

    @property
    def values(self) -> dict[TokenStream, Tensor]:
        """All values of its tokens, by stream."""
        core = ((stream, getattr(self, f"{stream.name}_T")) for stream in CORE_STREAMS)
        return {stream: values for stream, values in core if values is not None} | dict(self.extra)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass on one rank: packed sequences, and the hidden rows that predict sampled tokens.

    rows_R[i] is the index, among this rank's tokens, of the hidden state that predicts sampled token targets_R[i].
    Padding for the layout ends a sequence or is an extra sequence at the end; it has no sampled rows. With context
    parallelism the T tokens are this rank's part of the pack (`buffer.packing.context_tokens`), the R rows refer to its
    hidden states, and cu_seqlens_S1 describes the whole pack.

    If sequences share their prompt, the prompt is a sequence of its own, and each of them follows it. Example with
    "ab|c" and "ab|de", whose prompt is "ab": token_ids_T = [a b c d e]; cu_seqlens_S1 = [0 2 3 5]; position_ids_T =
    [0 1 2 2 3]; follows_S = [-1 0 0]; targets_R = [c d e]; rows_R = [1 1 3]; sequence_R = [1 2 2].
    """

    token_ids_T: Tensor  # int64
    position_ids_T: Tensor  # int64, restarts at 0 in each sequence
    cu_seqlens_S1: Tensor  # int32, [S + 1], starts with 0, ends with T x context ranks; always on the CPU
    rows_R: Tensor  # int64; ascending if no prompt is shared
    sequence_R: Tensor  # int64, ascending: the pack's sequence that each sampled token belongs to
    batch_rows_R: Tensor  # int64: index of each sampled token in the Batch
    targets_R: Tensor  # int64
    advantages_R: Tensor  # float32
    behaviour_logprobs_R: Tensor  # float32
    versions_R: Tensor  # int64
    mask_R: Tensor  # bool
    proximal_logprobs_R: Tensor | None = None  # float32; None unless the Batch has them
    reference_logprobs_R: Tensor | None = None  # float32; None unless the Batch has them
    is_token_T: Tensor | None = None  # bool: not padding; None means all
    follows_S: Tensor | None = None  # int64, on the CPU: the sequence before each, as a response's prompt is, or -1
    likely_ids_RK: Tensor | None = None  # int32: a teacher's K likeliest tokens; None off the last stage, or without
    likely_logprobs_RX: Tensor | None = None  # float32: its log-probs of these, and of all others together
    extra: Mapping[TokenStream, Tensor] = field(default_factory=dict)
    """Streams of models and plugins: [R, *shape] for sampled tokens, [T, *shape] for fed ones, one row per input token.
    In a staged stream, a row holds only the layers of this rank's stage."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.numel()

    def named(self, name: str) -> Tensor:
        """Return the rows of a stream in `extra`. Raises KeyError."""
        return {stream.name: rows for stream, rows in self.extra.items()}[name]

    @property
    def class_ids_RK(self) -> Tensor | None:
        """The tokens whose log-probs the loss reads in addition to the sampled one's, int32; None without them."""
        sampler = (rows for stream, rows in self.extra.items() if stream.name == SAMPLER_TOP_IDS)
        return next(sampler, None) if self.likely_ids_RK is None else self.likely_ids_RK

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with all tensors on `device`, except the description of the pack."""
        values = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        for name in ("cu_seqlens_S1", "follows_S"):  # reading a length from a GPU would wait for all earlier work
            values.pop(name, None)
        tensors = [*values.values(), *self.extra.values()]
        moved = [x.to(device) for x in tensors] if device.type == "cpu" else copied_together(tensors, device)
        fixed, extra = moved[: len(values)], moved[len(values) :]
        return replace(self, **dict(zip(values, fixed, strict=True)), extra=dict(zip(self.extra, extra, strict=True)))


def copied_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of any shapes and types from the CPU to a device in one piece.

    The CPU waits for none of the device's earlier work, as it would for each copy from memory that is not pinned.
    torch keeps the pinned memory until the copy is done.
    """
    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors]

    def views(buffer: Tensor) -> list[Tensor]:
        return [
            part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(buffer.split(sizes), tensors, strict=True)
        ]

    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for view, tensor in zip(views(buffer), tensors, strict=True):
        view.copy_(tensor)
    return views(buffer.to(device, non_blocking=True))


_ALIGNMENT = 256  # bytes: what CUDA gives every allocation


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Sums over sequences that decide the FLOPs of a pass.

    Example: sequences of 3 and 4 tokens, with prompts of 2 and 1: TokenCounts(tokens=7, squares=25, responses=4). If
    both have the same prompt of 1 token, which is computed once: TokenCounts(6, 24, 4, saved=1).
    """

    tokens: int = 0
    squares: int = 0  # sum of squared lengths: a token attends to all tokens before it
    responses: int = 0  # tokens whose logits are computed
    saved: int = 0  # tokens of prompts that other sequences have computed


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The input of one optimizer step: this rank's micro-batches, and what all ranks have together.

    Every data-parallel rank holds the same number of micro-batches. With pipeline stages, all micro-batches of a
    data-parallel rank have the same number of tokens.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_trained_tokens: int  # over all data and context ranks
    proximal_version: int | None = None  # weight version that computed the proximal log-probs; None without them
    counts: TokenCounts = TokenCounts()  # over all data ranks, without padding
    num_trained_responses: int = 0  # with a trained token, over all data ranks
    sequences: tuple[Tensor, ...] = ()  # int64: the batch's sequences in each micro-batch


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """Ratio bounds for one optimizer step, found by BAPO's search.

    Example: ClipBounds(low=0.6, high=1.45, positive_share=0.41, saturated=False, num_moves=5)
    """

    low: float
    high: float
    positive_share: float  # rho at these bounds; nan if no token contributes
    saturated: bool  # the search ran out of room before it reached its target
    num_moves: int  # grid steps taken by both bounds together
