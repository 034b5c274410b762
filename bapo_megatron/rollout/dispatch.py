"""Requests to engines: their content, their retries, and the checks of each reply.

An engine that keeps failing is fenced off (engines/pool.py); its responses stay as they were, and another engine
continues them. A reply is accepted only if its weight versions are possible: not older than the engine's weights when
it was asked (otherwise it was restarted), and not newer than any that the trainer has pushed.
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import Engine, GenerateRequest, GenerateResult
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import EngineError, RequestRefusedError, plural
from bapo_megatron.runtime.heartbeat import HEARTBEAT
from bapo_megatron.tokens import Rows, TokenStream
from bapo_megatron.types import NeedsTokens, Sample, Segment, TurnEnd

log = logging.getLogger(__name__)

Accept = Callable[[Sample], None]
"""Takes a sample that has grown. Called immediately for each, so that a cancelled wait loses no reply."""


@dataclass(slots=True)
class RolloutStats:
    """Costs of one step's groups: all work since `Scheduler.take` returned the previous step's groups."""

    num_rounds: int = 0
    num_tokens: int = 0  # sampled and accepted
    num_retries: int = 0  # requests sent again
    num_stale_groups: int = 0
    num_dropped_groups: int = 0  # judged, not worth training
    num_failed_groups: int = 0  # too few rewards left, because environments failed
    rewards: list[float] = field(default_factory=list)  # rewards of all judged responses, dropped ones included
    num_fenced: int = 0  # engines fenced off since this attempt began
    errors: list[str] = field(default_factory=list)  # why requests were sent again
    told: set[tuple[str, str]] = field(default_factory=set)  # URL and complaint of retries already logged


class Dispatcher:
    """Continues samples. Runs on the engines' event loop."""

    def __init__(
        self,
        config: RolloutConfig,
        pool: EnginePool,
        *,
        stop_token_ids: tuple[int, ...],
        run_seed: int,
        streams: Sequence[TokenStream] = (),
        max_turn_tokens: int | None = None,
    ) -> None:
        """`streams`: streams of models and plugins to ask the engines for."""
        self.pool = pool
        self.version = 0  # every live engine has weights of at least this version
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._run_seed = run_seed
        self._streams = tuple(streams)
        self._max_turn_tokens = max_turn_tokens
        self._call_numbers = itertools.count()
        self.open_requests: dict[str, Engine] = {}  # by rid: unanswered requests
        self.stats = RolloutStats()

    def fence(self, engine: Engine, reason: str) -> None:
        """Fence a failing engine. A late failure of one that is already fenced, or back, changes nothing."""
        if self.pool.is_live(engine):
            self.pool.fence(engine, reason)

    async def abort_open(self) -> None:
        """Abort all open requests; each returns its tokens so far. One still on its way to the engine may be missed."""

        async def abort(rid: str, engine: Engine) -> None:
            try:
                await engine.abort(rid)
            except EngineError as failure:
                self.fence(engine, str(failure))

        requests = self.open_requests.items()
        await asyncio.gather(*(abort(rid, engine) for rid, engine in requests if self.pool.is_live(engine)))

    async def grow_together(self, samples: Sequence[Sample], step: int, accept: Accept) -> None:
        """Grow each sample by one piece, in one call to each live engine; return when all calls have ended.

        Raises:
            RequestRefusedError, EngineError: as `grow`.
        """
        calls: dict[str, tuple[Engine, list[Sample]]] = {}
        for sample in samples:
            if (home := self.pool.home(sample.prompt.prompt_id)) is not None:
                calls.setdefault(home.url, (home, []))[1].append(sample)
        outcomes = await asyncio.gather(
            *(self.grow(mine, engine, step, accept) for engine, mine in calls.values()), return_exceptions=True
        )
        for failure in outcomes:
            if failure is not None:
                raise failure

    async def grow(self, samples: Sequence[Sample], engine: Engine, step: int, accept: Accept) -> None:
        """Grow each sample by one piece, in one call, which the engine batches.

        `accept` gets every sample, unless the engine failed and is now fenced.

        Raises:
            RequestRefusedError: the engine is healthy, but refuses the request.
            EngineError: another trainer is updating this engine.
        """
        remaining, problem = list(samples), None
        for attempt in range(self._config.max_retries + 1):
            if problem is not None:
                self._count_retries(len(remaining), engine, problem)
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
            remaining, problem = await self._attempt(remaining, engine, step, accept)
            if problem is None:
                self.pool.replied(engine)
            if problem is None or not self.pool.is_live(engine):
                return
        self.fence(engine, f"{problem} (gave up after {plural(self._config.max_retries + 1, 'attempt')})")

    async def _attempt(
        self, samples: list[Sample], engine: Engine, step: int, accept: Accept
    ) -> tuple[list[Sample], str | None]:
        """Send one call. Return the samples that have not grown and the last reason, or None if all have grown."""
        call, oldest_version = next(self._call_numbers), self.version
        requests = [self._request(s, f"{s.sample_id}-s{step}c{call}") for s in samples]
        opened = {request.rid: engine for request in requests}
        self.open_requests |= opened
        role = f"engine {engine.url}"
        HEARTBEAT.beat(role, f"asked for {plural(len(requests), 'response')}, call {call}")
        try:
            results = await engine.generate_many(requests)
            HEARTBEAT.beat(role, f"answered call {call}")
        except RequestRefusedError:
            raise
        except EngineError as failure:
            return samples, str(failure)
        finally:
            for rid in opened:
                del self.open_requests[rid]
        failed: list[Sample] = []
        problem: str | None = None
        for sample, result in zip(samples, results, strict=True):
            if isinstance(result, EngineError):
                failed.append(sample)
                problem = str(result)
                continue
            versions = [span.version for span in result.spans]
            found = f"{engine.url}, request {result.rid}: tokens of weight version"
            if min(versions, default=oldest_version) < oldest_version:
                failed.append(sample)
                problem = f"{found} {min(versions)}, but version {oldest_version} was sent there; was it restarted?"
                self.fence(engine, problem)
            elif max(versions, default=0) > (newest := self.pool.newest_version):
                another = "another trainer is updating this server"
                raise EngineError(f"{found} {max(versions)}, but the trainer is at {newest}; {another}")
            else:
                self.stats.num_tokens += len(result.token_ids)
                accept(self._grown(sample, result, step))
        return failed, problem

    def _count_retries(self, num: int, engine: Engine, problem: str) -> None:
        """Count retried requests; log each reason once until the stats are taken."""
        self.stats.num_retries += num
        self.stats.errors.append(problem)
        complaint = (engine.url, problem.partition(": ")[2] or problem)  # without the request's name
        if complaint not in self.stats.told:
            self.stats.told.add(complaint)
            log.warning("a request is repeated: %s", problem)

    def _request(self, sample: Sample, rid: str) -> GenerateRequest:
        assert isinstance(sample.need, NeedsTokens), f"{sample.sample_id} needs no tokens"
        trajectory, room = sample.turn, self._room(sample)
        return GenerateRequest(
            rid=rid,
            token_ids=tuple(trajectory.token_ids.tolist()),
            max_new_tokens=min(room, self._config.tokens_per_round or room),
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            top_k=self._config.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=sample_seed(self._run_seed, sample.sample_id, sample.need.trajectory),
            streams=self._streams,
            num_fed=trajectory.num_fed(self._streams),
        )

    def _room(self, sample: Sample) -> int:
        """Return how many tokens the turn may still have; at least 1, also if a resumed run has lower limits."""
        room, num_so_far = self._config.max_response_tokens - sample.num_sampled_tokens, sample.turn.num_turn_tokens
        own_limit = sample.need.max_turn_tokens if isinstance(sample.need, NeedsTokens) else None
        for limit in (self._max_turn_tokens, own_limit):
            room = room if limit is None else min(room, limit - num_so_far)
        return max(room, 1)

    def _grown(self, sample: Sample, result: GenerateResult, step: int) -> Sample:
        """Return the sample with the reply's tokens, cut into segments at the server's version spans."""
        num_new = len(result.token_ids)

        def rows(start: int, end: int) -> Rows:
            return {stream: values[len(values) - num_new :][start:end] for stream, values in result.rows.items()}

        segments = [
            Segment.sampled(
                s.version,
                step,
                result.token_ids[s.start : s.end],
                result.behaviour_logprobs[s.start : s.end],
                rows(s.start, s.end),
            )
            for s in result.spans
        ]
        late = {s: values[: len(values) - num_new] for s, values in result.rows.items() if s.on == "fed"}
        is_full = num_new >= self._room(sample)
        # A server may see first that the budget is used up, so an end token counts, whatever it says. It may also stop
        # at a token of rollout.ignore_stop_tokens; such a sample continues like one that was set aside.
        says_so = result.finish_reason == "stop" and not self._config.ignore_stop_tokens
        has_stopped = says_so or (num_new > 0 and int(result.token_ids[-1]) in self._stop_token_ids)
        turn_end: TurnEnd | None = "stop" if has_stopped else "length" if is_full else None
        return sample.extended(segments, turn_end, late)


def sample_seed(run_seed: int, sample_id: str, trajectory: int = 0) -> int:
    """Return a 31-bit sampling seed that depends only on the run's seed, the sample and the trajectory."""
    name = f"{run_seed}/{sample_id}" + (f"/{trajectory}" if trajectory else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1
