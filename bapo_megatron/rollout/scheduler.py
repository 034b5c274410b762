"""Partial rollout: sample groups in budgeted rounds, set unfinished responses aside, resume them with later weights.

    prompts --admit--> active groups --round of <= tokens_per_round tokens each--> active (partial) or finished
                                                                    finished --score--> FIFO --take--> one step's groups

A step runs as many rounds as it takes to have enough finished groups; `groups_in_flight` above `prompts_per_step` lets
slow responses wait for a later step instead of holding this one up. What is not taken now is kept for the next step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.errors import EngineError
from bapo_megatron.rollout.base import Engine, GenerateRequest, GenerateResult
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.rollout.state import group_from_json, group_to_json
from bapo_megatron.types import Group, Prompt, Segment, Trajectory

_MAX_IDLE_ROUNDS = 3  # rounds in a row without a single token before the engines are declared broken


class Prompts(Protocol):
    """Where prompts come from: an endless stream with a cursor."""

    def next(self) -> Prompt: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class RolloutStats:
    """What one call of `take` did."""

    num_rounds: int = 0
    num_tokens: int = 0  # sampled during this call
    num_retries: int = 0
    num_stale_groups: int = 0
    errors: list[str] = field(default_factory=list)  # of requests that were repeated


class Scheduler:
    """Owns every sample between its prompt and its batch. Runs on one event loop; not thread-safe."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        engines: Sequence[Engine],
        prompts: Prompts,
        score: Callable[[Sequence[Trajectory]], Sequence[float]],
        stop_token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        """`score` may block (it is called in a thread) and returns one reward per finished trajectory."""
        self.config = config
        self.ledger = Ledger()
        self._engines = list(engines)
        self._prompts = prompts
        self._score = score
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._active: list[Group] = []  # oldest first: partial responses are resumed before new prompts are drawn
        self._finished: deque[Group] = deque()
        self._slots = [asyncio.Semaphore(config.max_concurrent_requests) for _ in engines]

    async def take(self, step: int, version: int) -> tuple[list[Group], RolloutStats]:
        """The next `prompts_per_step` finished, scored groups, oldest first.

        Raises:
            EngineError: a request kept failing, or the engines return no tokens at all.
        """
        stats = RolloutStats()
        num_idle = 0
        while True:
            self._drop_stale(version, stats)
            if len(self._finished) >= self.config.prompts_per_step:
                break
            self._admit()
            before = stats.num_tokens
            await self._run_round(step, version, stats)
            num_idle = num_idle + 1 if stats.num_tokens == before else 0
            if num_idle >= _MAX_IDLE_ROUNDS:
                raise EngineError(
                    f"{num_idle} rounds in a row returned no token from {', '.join(e.url for e in self._engines)}; "
                    "is somebody aborting requests there, or is the context too short?"
                )
        groups = [self._finished.popleft() for _ in range(self.config.prompts_per_step)]
        for trajectory in (t for g in groups for t in g.trajectories):
            self.ledger.train(trajectory.sample_id)
        self.ledger.check(self.buffered())
        return groups, stats

    def buffered(self) -> Iterator[Trajectory]:
        """Every trajectory that is here: partial, waiting, or finished and not yet taken."""
        for group in (*self._active, *self._finished):
            yield from group.trajectories

    def state_dict(self) -> dict[str, Any]:
        """JSON value: everything that a resumed run needs to lose nothing."""
        return {
            "prompts": self._prompts.state_dict(),
            "ledger": self.ledger.state_dict(),
            "active": [group_to_json(g) for g in self._active],
            "finished": [group_to_json(g) for g in self._finished],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self.ledger.load_state_dict(state["ledger"])
        self._active = [group_from_json(g) for g in state["active"]]
        self._finished = deque(group_from_json(g) for g in state["finished"])
        self.ledger.check(self.buffered())

    def _admit(self) -> None:
        """Draw prompts until as many groups are in flight as the configuration asks for."""
        wanted = self.config.groups_in_flight or self.config.prompts_per_step
        while len(self._active) < wanted:
            prompt = self._prompts.next()
            ids = [f"{prompt.prompt_id}.{i}" for i in range(self.config.samples_per_prompt)]
            for sample_id in ids:
                self.ledger.admit(sample_id)
            self._active.append(Group(prompt, tuple(Trajectory(sample_id, prompt) for sample_id in ids)))

    async def _run_round(self, step: int, version: int, stats: RolloutStats) -> None:
        """One budgeted request for every unfinished response; then score the groups that are complete."""
        unfinished = [t for g in self._active for t in g.trajectories if t.finish_reason is None]
        grown: dict[str, Trajectory] = {}
        try:
            outcomes = await asyncio.gather(
                *(self._extend(t, step, version, stats, grown) for t in unfinished), return_exceptions=True
            )
        finally:  # also where this is cancelled: what did return is kept, nothing that was sampled is lost
            self._active = [_with(g, grown) for g in self._active]
        for failure in outcomes:
            if failure is not None:
                raise failure
        stats.num_rounds += 1
        scored = await self._scored([g for g in self._active if _is_complete(g)])
        self._active = [g for g in self._active if not _is_complete(g)]
        self._finished.extend(scored)

    async def _extend(
        self, trajectory: Trajectory, step: int, version: int, stats: RolloutStats, done: dict[str, Trajectory]
    ) -> None:
        """Grow one response by one round's budget, into `done`, on the server that already has its prefix."""
        server = trajectory.prompt.prompt_id % len(self._engines)
        room = self.config.max_response_tokens - trajectory.num_response_tokens
        request = GenerateRequest(
            rid=f"{trajectory.sample_id}-s{step}r{stats.num_rounds}",
            token_ids=trajectory.prompt.token_ids + trajectory.response_ids,
            max_new_tokens=min(room, self.config.tokens_per_round or room),
            temperature=self.config.temperature,
            stop_token_ids=self._stop_token_ids,
            seed=sample_seed(self._seed, trajectory.sample_id),
        )
        grown = trajectory
        self.ledger.start(trajectory.sample_id)
        try:
            async with self._slots[server]:
                result = await self._generate(self._engines[server], request, stats)
            self._check_versions(self._engines[server], result, version)
            grown = _grow(trajectory, result, step, self.config.max_response_tokens)
            stats.num_tokens += grown.num_response_tokens - trajectory.num_response_tokens
        finally:
            self.ledger.stop(grown)
            done[grown.sample_id] = grown

    @staticmethod
    def _check_versions(engine: Engine, result: GenerateResult, version: int) -> None:
        for span in result.spans:
            if not 0 <= span.version <= version:
                raise EngineError(
                    f"{engine.url}, request {result.rid}: tokens of weight version {span.version}, but the trainer is "
                    f"at {version}; another trainer is updating this server, or it was restarted with other weights"
                )

    async def _generate(self, engine: Engine, request: GenerateRequest, stats: RolloutStats) -> GenerateResult:
        """Ask, and ask again after a failed or malformed reply; the last failure is loud."""
        for attempt in range(self.config.max_retries + 1):
            try:
                return await engine.generate(replace(request, rid=f"{request.rid}a{attempt}"))
            except EngineError as failure:
                if attempt == self.config.max_retries:
                    raise EngineError(f"{failure} (gave up after {attempt + 1} attempts)") from failure
                stats.num_retries += 1
                stats.errors.append(str(failure))
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
        raise AssertionError("unreachable")

    async def _scored(self, groups: list[Group]) -> list[Group]:
        trajectories = [t for g in groups for t in g.trajectories]
        if not trajectories:
            return []
        rewards = await asyncio.to_thread(self._score, trajectories)
        assert len(rewards) == len(trajectories), "one reward per trajectory"
        scored = {t.sample_id: replace(t, reward=float(r)) for t, r in zip(trajectories, rewards, strict=True)}
        return [_with(g, scored) for g in groups]

    def _drop_stale(self, version: int, stats: RolloutStats) -> None:
        """A finished group with a token older than the bound is dropped, and counted."""
        if self.config.max_staleness is None:
            return
        fresh: deque[Group] = deque()
        for group in self._finished:
            oldest = min(v for t in group.trajectories if (v := t.oldest_version) is not None)
            if version - oldest <= self.config.max_staleness:
                fresh.append(group)
                continue
            stats.num_stale_groups += 1
            for t in group.trajectories:
                self.ledger.drop(t.sample_id, "stale")
        self._finished = fresh


def sample_seed(run_seed: int, sample_id: str) -> int:
    """A 31-bit sampling seed that depends on nothing but the run's seed and the sample."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{sample_id}".encode(), digest_size=4).digest(), "big") >> 1


def _with(group: Group, changed: dict[str, Trajectory]) -> Group:
    return replace(group, trajectories=tuple(changed.get(t.sample_id, t) for t in group.trajectories))


def _is_complete(group: Group) -> bool:
    return all(t.finish_reason for t in group.trajectories)


def _grow(trajectory: Trajectory, result: GenerateResult, step: int, max_tokens: int) -> Trajectory:
    """The trajectory with the result's tokens, cut into segments at the server's own version spans."""
    segments = [
        Segment(span.version, step, result.token_ids[span.start : span.end], result.logprobs[span.start : span.end])
        for span in result.spans
    ]
    num_tokens = trajectory.num_response_tokens + len(result.token_ids)
    if result.finish_reason == "stop":
        return trajectory.extended(segments, "stop")
    return trajectory.extended(segments, "length" if num_tokens >= max_tokens else None)
