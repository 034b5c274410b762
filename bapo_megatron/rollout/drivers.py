"""Drivers provide what a sample needs besides tokens, from the end of a turn until the sample has ended.

    NeedsTokens --engine--> NeedsEnvironment --driver--> NeedsTokens again, or Ended

Training in rounds or as a stream, the evaluation in a run, and `bapo eval` use the same drivers.
"""

import asyncio
import logging
import math
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from bapo_megatron.errors import UserError, plural
from bapo_megatron.rewards.environments import Continue, End, Environment, Failed, ForJudge, TurnJson
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.stated import OPEN_THOUGHT
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rewards.worker_pool import WorkersError
from bapo_megatron.types import (
    Ended,
    FinishReason,
    Given,
    Need,
    NeedsEnvironment,
    NeedsTokens,
    Reward,
    Sample,
    Trajectory,
    total,
)

log = logging.getLogger(__name__)

_MARK_TOKENS = 16  # that may hold the mark of a thought and the blanks after it
_NUM_FIRST = 32  # answers that show whether the environment works at all
_MAX_IN_A_ROW = 1000  # failures of an environment that has worked
_MAX_REASON = 500  # characters of an error


class Driver(Protocol):
    """What a sample waits for once its turn has ended."""

    @property
    def by_group(self) -> bool:
        """Whether it is asked about all samples of a group together, once none needs a token, as a judge is; otherwise
        about each one as soon as its turn has ended."""
        ...

    @property
    def deadline_s(self) -> float:
        """The longest time that a call may take."""
        ...

    @property
    def first_need(self) -> Need:
        """How a sample begins: it needs tokens after its prompt; or, before its first turn, an agent program, which
        does not outlive this process."""
        ...

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return each sample with more tokens or its end. All of them wait for their environment.

        May be called again with the same samples: after a crash, or when the call was cancelled.
        """
        ...


async def advanced(driver: Driver, samples: Sequence[Sample], max_response_tokens: int) -> list[Sample]:
    """Return the samples as their driver advances them.

    Raises:
        UserError: it returned neither tokens nor an end for a sample.
    """
    found = await driver.advance(samples)
    if len(found) != len(samples):
        raise UserError(f"{_named(driver)} returned {plural(len(found), 'sample')} for {len(samples)}")
    for before, after in zip(samples, found, strict=True):
        if problem := _problem(before, after, max_response_tokens):
            where = f"sample {before.sample_id} of prompt {before.prompt.prompt_id}"
            raise UserError(f"{_named(driver)}, {where}: neither tokens nor an end: {problem}")
    return found


def _problem(before: Sample, after: Any, max_response_tokens: int) -> str | None:
    """Return why a sample cannot follow another, or None if it can."""
    if not isinstance(after, Sample) or after.sample_id != before.sample_id:
        return f"it returned {after!r:.200}"
    if after.num_sampled_tokens != before.num_sampled_tokens:
        return f"it changed {plural(before.num_sampled_tokens, 'sampled token')} to {after.num_sampled_tokens}"
    match after.need:
        case Ended(reason=reason, reward=reward):
            if reason is None:
                return "it ended without a reason"
            if (reward is None) != (reason == "failed"):
                return f"it ended by {reason!r} {'without' if reward is None else 'with'} a reward"
        case NeedsEnvironment():
            return f"the sample still waits for its environment, with {plural(after.num_given_tokens, 'given token')}"
        case NeedsTokens(trajectory=place):
            known = before.trajectories[place : place + 1]
            if place >= len(after.trajectories):
                return f"it asks for tokens of trajectory {place} of {len(after.trajectories)}"
            if known and after.trajectories[place].num_tokens <= known[0].num_tokens:
                return f"it asks for tokens after the {known[0].num_tokens} that trajectory {place} had before"
            if after.num_sampled_tokens >= max_response_tokens:
                return f"it asks for tokens, but the sample has all {max_response_tokens} that it may have"
    return None


def _named(driver: Driver) -> str:
    return f"driver {type(driver).__name__}"


@dataclass(slots=True)
class TextJudge:
    """A scorer of response texts, with the tokenizer that turns tokens into text."""

    scorer: RewardScorer
    tokenizer: Any

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return one verdict per sample. This blocks; see `RewardScorer.verdicts`."""
        words = texts(self.tokenizer, samples)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        inside = [begins_in_thought(s.trajectories[-1], decode) for s in samples]
        return self.scorer.verdicts([(s.prompt, text) for s, text in zip(samples, words, strict=True)], inside)


def texts(tokenizer: Any, samples: Sequence[Sample]) -> list[str]:
    """Return the policy's own words in each sample, without special tokens."""
    return tokenizer.batch_decode([s.sampled_ids.tolist() for s in samples], skip_special_tokens=True)


def begins_in_thought(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> bool:
    """Return whether the last turn begins in a thought: what was given before it ends with <think>.

    Args:
        decode: the decoder of responses. If it leaves out the mark of a thought as special, no thought can be told.
    """
    given = (s for s in reversed(trajectory.segments) if isinstance(s.origin, Given))
    before = next(given, None)
    if before is None:
        return False
    return decode(before.token_ids[-_MARK_TOKENS:].tolist()).rstrip().endswith(OPEN_THOUGHT)


@dataclass(frozen=True, slots=True)
class JudgeOnce:
    """The driver of single turns: once all samples of a group have their tokens, a judge gives each a reward."""

    judge: Callable[[Sequence[Sample]], Sequence[Verdict]]  # may block
    deadline_s: float = 0.0
    by_group: bool = field(default=True, init=False)
    first_need: Need = field(default=NeedsTokens(), init=False)

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return each sample with its end. Raises what the judge does."""
        verdicts = await asyncio.to_thread(self.judge, samples)
        return [self._ended(*found) for found in zip(samples, verdicts, strict=True)]

    def _ended(self, sample: Sample, verdict: Verdict) -> Sample:
        assert isinstance(sample.need, NeedsEnvironment), f"{sample.sample_id} has no turn to judge"
        assert sample.need.turn_end is not None
        return replace(sample, need=replace(verdict.end, reason=sample.need.turn_end))


@dataclass(slots=True)
class Answers:
    """The answers that samples got while they waited, with the judge, if any, of last turns: how many answers and how
    late, and the failures among them."""

    scorer: RewardScorer | None = None
    recent_failure: Verdict | None = None
    """The first failure among the answers that the latest `metrics` are about."""
    counts: Counter[str] = field(default_factory=Counter)  # since the attempt began
    _has_worked: bool = False  # whether any answer was not a failure, or was judged
    _num_in_a_row: int = 0  # failures since then
    _failures: list[Verdict] = field(default_factory=list)  # since the last `metrics`
    _waits_s: list[float] = field(default_factory=list)  # of answers since the last `metrics`
    _logged: set[tuple[str, int]] = field(default_factory=set)  # files and lines whose tracebacks the log has

    @property
    def deadline_s(self) -> float:
        """The longest time that the judge may take."""
        return self.scorer.deadline_s if self.scorer is not None else 0.0

    def wait(self, wait_s: float) -> None:
        """Record how long a sample waited for an answer."""
        self._waits_s.append(wait_s)

    def log_once(self, error: Exception) -> None:
        """Log the traceback of an error, unless the log has one from the same place."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = (frame.f_code.co_filename, line)
        if place not in self._logged:
            self._logged.add(place)
            log.error("environment: an error of one sample, whose traceback is logged once", exc_info=error)

    def worked(self) -> None:
        """Note that the environment works: it has answered, or the judge scores in its place."""
        self._has_worked, self._num_in_a_row = True, 0

    def end(self) -> None:
        """Count a sample that ended with a reward."""
        self.worked()
        self.counts["ended"] += 1

    async def judged(self, sample: Sample, decode: Callable[[list[int]], str], reason: FinishReason) -> Ended:
        """Return the end of a sample: the judge's reward for words of the last turn. Raises what the judge does."""
        assert self.scorer is not None
        turns = sample.turn.turns
        words = decode(turns[-1].tolist() if turns else [])
        (verdict,) = await self.scorer.ask([(sample.prompt, words)], [begins_in_thought(sample.turn, decode)])
        self.end()
        return replace(verdict.end, reason=reason)

    async def failed(self, sample: Sample, failure: Failed, decode: Callable[[list[int]], str]) -> Sample:
        """Return the end of a sample on which its environment has failed; count and log the failure.

        The sample is dropped if it had no turn yet, or if the environment itself says that it failed. Otherwise the
        policy may have caused that, and must not drop its bad samples so: the judge scores its last turn, or the sample
        keeps the rewards of its turns. It keeps them, too, if asking the judge is what raises.

        Raises:
            UserError: without a judge's rewards, all of the first answers were failures, or very many in a row; or like
                `RewardScorer.verdicts`.
            WorkersError: like `RewardScorer.verdicts`.
        """
        where = f"turn {_turn_number(sample)} of sample {sample.sample_id}, prompt {sample.prompt.prompt_id}"
        log.warning("environment: %s on %s: %s", failure.problem, where, failure.reason)
        self.counts[failure.problem] += 1
        dropped = Ended("failed", problem=failure.problem, message=failure.reason)
        self._failures.append(Verdict(dropped))
        is_dropped = failure.is_said or not sample.num_sampled_tokens
        if is_dropped or self.scorer is None:
            self._refuse_an_environment_that_only_fails(where, failure)
        if is_dropped:
            return replace(sample, need=dropped)
        assert isinstance(sample.need, NeedsEnvironment)
        reason, end = sample.need.turn_end or "stop", None
        if self.scorer is not None:
            try:
                end = await self.judged(sample, decode, reason)
            except (UserError, WorkersError, AssertionError):
                raise
            except Exception as error:
                self.log_once(error)
                failure = replace(failure, reason=f"{failure.reason}; asking the judge: {error!r:.{_MAX_REASON}}")
                self._refuse_an_environment_that_only_fails(where, failure)
        if end is None:
            self.counts["ended"] += 1
            end = ended(reason, sample.turn_rewards)
        if end.problem is None:  # otherwise the judge's
            end = replace(end, problem=failure.problem, message=failure.reason)
        return replace(sample, need=end)

    def _refuse_an_environment_that_only_fails(self, where: str, failure: Failed) -> None:
        self._num_in_a_row += 1
        if self._num_in_a_row >= (_MAX_IN_A_ROW if self._has_worked else _NUM_FIRST):
            num = plural(self._num_in_a_row, "turn", ",")
            raise UserError(
                f"the environment failed on {f'{num} in a row' if self._has_worked else f'all of the first {num}'}, so "
                f"nothing can be learned; the last one, {where}: {failure.reason}"
            )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the answers (`bapo help metrics`), some of them since the last call."""
        waits_s, failures = self._waits_s, self._failures
        self._waits_s, self._failures = [], []
        failed_share = len(failures) / len(waits_s) if waits_s else 0.0
        judged: dict[str, float] = {}
        self.recent_failure = failures[0] if failures else None
        if self.scorer is not None:
            judged = self.scorer.metrics()
            if judged["reward/failed_share"] > failed_share:
                self.recent_failure = self.scorer.recent_failure
        return {
            **judged,
            "reward/judged": float(self.counts["ended"]),
            "environment/timeouts": float(self.counts["timeout"]),
            "environment/errors": float(self.counts["error"]),
            "environment/cut_answers": float(self.counts["cut"]),
            "environment/failed_share": failed_share,
            "environment/wait_s": statistics.fmean(waits_s) if waits_s else 0.0,
        }

    def close(self) -> None:
        """End the judge's processes. Safe to call twice."""
        if self.scorer is not None:
            self.scorer.close()


def _turn_number(sample: Sample) -> int:
    """Return the number of the turn that waits for an answer, from 1; 1 before the first turn."""
    return max(sum(len(trajectory.turns) for trajectory in sample.trajectories), 1)


class SampleDriver:
    """Base of drivers that ask for each sample alone, with `Answers`.

    One sample's trouble is that sample's: whatever is raised while it advances, by its program, a tool, the chat
    template, the tokenizer or our own code, is a failure of its environment (`Answers.failed`). The log has the
    traceback, once per place in the code. A run ends only for what is wrong with the run:

    - UserError: the data, the settings, or an environment or a judge that only fails;
    - WorkersError: no process of the judge or the environment stays alive;
    - AssertionError: an invariant of ours does not hold, and the tokens of any sample may be wrong. So the checks of
      what a sample became, `advanced` and the ledger's balance, end the run as well.
    """

    __slots__ = ()
    answers: Answers
    decode: Callable[[Sequence[int]], str]

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return each sample with an answer to its turn, or its end; see the class for what ends the run.

        Raises:
            UserError: like `Answers.failed`, or an answer that is none.
            WorkersError: no process of the judge or the environment stays alive.
        """
        return list(await asyncio.gather(*map(self._netted, samples)))

    async def _netted(self, sample: Sample) -> Sample:
        try:
            return await self._advance(sample)
        except (UserError, WorkersError, AssertionError):
            raise
        except Exception as error:
            self.answers.log_once(error)
            self._forget(sample)
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.{_MAX_REASON}}"
            return await self.answers.failed(sample, Failed(reason), self.decode)

    async def _advance(self, sample: Sample) -> Sample:
        raise NotImplementedError

    def _forget(self, sample: Sample) -> None:
        """Drop what is kept of a sample that ends."""

    @property
    def recent_failure(self) -> Verdict | None:
        return self.answers.recent_failure

    def metrics(self) -> dict[str, float]:
        """Return `Answers.metrics`."""
        return self.answers.metrics()


@dataclass(slots=True)
class StepDriver(SampleDriver):
    """The driver of turns: an environment answers each turn, until it ends the sample or the sample reaches a limit.

    What the policy sampled stays as it is.
    """

    environment: Environment
    encode: Callable[[Continue, TurnJson, int], tuple[Sequence[int], bool]]
    """The tokens of an answer to a turn, cut to a number of them, and whether it was cut. Raises ValueError if it has
    none."""
    decode: Callable[[Sequence[int]], str]  # the text of a turn, without special tokens
    max_response_tokens: int  # sampled tokens over all turns
    max_answer_tokens: int  # the environment's, in one turn; the rest is cut
    max_turns: int
    answers: Answers = field(default_factory=Answers)
    by_group: bool = field(default=False, init=False)
    first_need: Need = field(default=NeedsTokens(), init=False)

    @property
    def deadline_s(self) -> float:
        return self.environment.deadline_s + self.answers.deadline_s

    def close(self) -> None:
        """End the processes of environment and judge. Safe to call twice."""
        self.environment.close()
        self.answers.close()

    async def _advance(self, sample: Sample) -> Sample:
        assert isinstance(sample.need, NeedsEnvironment), f"{sample.sample_id} does not wait for an environment"
        assert sample.need.turn_end is not None
        end, turn = sample.need.turn_end, sample.turn.turns[-1].tolist() if sample.turn.turns else []
        of = sample.prompt
        asked = TurnJson(
            prompt=of.text,
            answer=of.answer,
            source=of.source,
            number=len(sample.turn_rewards) + 1,
            text=self.decode(turn),
            token_ids=turn,
            end=end,
        )
        began_s = time.monotonic()
        answer = await self.environment.step(asked, sample.state)
        self.answers.wait(time.monotonic() - began_s)
        if isinstance(answer, ForJudge):
            if self.answers.scorer is not None:
                return replace(sample, need=await self.answers.judged(sample, self.decode, end))
            answer = Failed("a step ends a sample with a reward; only the judge of tools gives one instead")
        if isinstance(answer, Continue):
            try:
                return self._continued(sample, answer, *self.encode(answer, asked, self.max_answer_tokens))
            except ValueError as problem:
                answer = Failed(str(problem))
        if isinstance(answer, Failed):
            return await self.answers.failed(sample, answer, self.decode)
        if not isinstance(answer, End):
            where = f"sample {sample.sample_id} of prompt {of.prompt_id}"
            raise UserError(f"environment, {where}: neither words nor an end: {answer!r:.200}")
        self.answers.end()
        return replace(sample, need=ended(end, [*sample.turn_rewards, answer.reward]))

    def _continued(self, sample: Sample, answer: Continue, token_ids: Sequence[int], is_cut: bool) -> Sample:
        if not token_ids:
            raise ValueError(f"an answer without a token: {answer!r:.200}")
        self.answers.worked()
        self.answers.counts["cut"] += is_cut
        longer = sample.answered(token_ids, answer.state, answer.reward)
        reason: Literal["turns", "length"] | None = None
        if len(longer.turn_rewards) >= self.max_turns:
            reason = "turns"
        elif longer.num_sampled_tokens >= self.max_response_tokens:
            reason = "length"
        if reason is None:
            return longer
        self.answers.end()
        end = ended(reason, longer.turn_rewards)
        return replace(sample, need=end, state=answer.state, turn_rewards=longer.turn_rewards)


def ended(reason: FinishReason, rewards: Sequence[Reward | None]) -> Ended:
    """Return the end of a sample with the sum of its turns' rewards and its end's, whoever ended it."""
    given = [reward for reward in rewards if reward is not None]
    parts: dict[str, float] = {}
    for name, part in (found for reward in given if isinstance(reward, Mapping) for found in reward.items()):
        parts[name] = parts.get(name, 0.0) + part
    return Ended(reason, math.fsum(map(total, given)), parts=parts)
