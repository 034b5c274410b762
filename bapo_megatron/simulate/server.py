"""A server in simulated time: continuous batching as processor sharing.

All running responses grow together. A decode step takes `World.step_s` seconds, whatever asks for it; prefills come
first and hold decoding up, as in SGLang. One simulated token stands for `World.unit` tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bapo_megatron.engines.base import GenerateRequest, GenerateResult, VersionSpan
from bapo_megatron.errors import EngineError, UnreachableEngineError
from bapo_megatron.simulate.world import RankZero, World
from bapo_megatron.tokens import read_only

_LONGEST = 1 << 16
_IDS = read_only(np.zeros(_LONGEST, np.int64))
_LOGPROBS = read_only(np.zeros(_LONGEST, np.float32))
_GROWTH = 0.125  # by which contexts grow until the speed is computed again
_ADMITTED = 0.9  # share of the cache to which new responses may fill it; SGLang keeps some room to grow, too
_CLOSE = 1e-6  # rounding, in tokens
_TICK_S = 1e-6  # asyncio does not wait for less than 1e-9 s: the clock would stand still


@dataclass(slots=True, eq=False)
class _Request:
    rid: str
    sample_id: str
    prompt_id: str
    context: int  # tokens, including finished spans
    left: int  # tokens until it ends
    stops: bool  # at its own end, not at the request's limit
    done: asyncio.Future[GenerateResult]
    began: float = 0.0  # the server's clock when it last began to run
    num_done: int = 0  # before that
    spans: list[VersionSpan] = field(default_factory=list)


class SimulatedServer:
    """An `Engine` as far as the scheduler uses one."""

    def __init__(self, url: str, world: World, rank_zero: RankZero) -> None:
        self.url = url
        self.busy_s = 0.0
        self.prefilled_s = 0.0  # part of busy_s
        self._world = world
        self._rank_zero = rank_zero
        self._version = 0
        self._is_up, self._is_paused = True, False
        self._running: dict[str, _Request] = {}
        self._waiting: list[_Request] = []
        self._ends: list[tuple[float, int, _Request]] = []  # a heap: clock at the end, number of the start, request
        self._numbers = itertools.count()
        self._clock = 0.0  # tokens that a response would have that ran from the beginning
        self._at_s = 0.0  # when the clock was right
        self._prefill_s = 0.0  # left to do before decoding continues
        self._num_cached = 0.0  # tokens of running responses
        self._prefixes: dict[str, int] = {}  # cached tokens by sample or prompt; a push empties the cache
        self._read_at_s = 0.0  # when all calls so far are read
        self._timer: asyncio.TimerHandle | None = None

    # what the scheduler calls

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult | EngineError]:
        await self._receive(self._world.call_s + self._world.request_s * len(requests))
        new = [self._new(request) for request in requests]
        self._waiting += new
        self._continue()
        try:
            results = await asyncio.gather(*(one.done for one in new))
        finally:
            self._drop([one for one in new if one.left])
        await self._rank_zero.read([sum(s.end - s.start for s in result.spans) for result in results])
        return list(results)

    async def abort(self, rid: str | None = None) -> None:
        await self._receive(self._world.abort_s)
        for request in [*self._running.values(), *self._waiting]:
            if rid in (None, request.rid):
                self._stop(request)
                self._answer(request, "abort")
        self._continue()

    async def health(self) -> bool:
        return self._is_up

    # what the simulated trainer and its faults do

    def pause(self) -> None:
        """Stop decoding; running requests wait."""
        self._advance()
        self._is_paused = True
        self._continue()

    def resume(self, version: int) -> None:
        """Decode with new weights. The cache is empty, so what was running is prefilled again."""
        self._advance()
        self._is_paused = False
        self._retract(list(self._running.values()))
        self._version = version
        self._prefixes.clear()
        self._prefill_s = 0.0
        self._continue()

    def die(self) -> None:
        """Lose all requests, and the weights."""
        self._advance()
        self._is_up, self._is_paused, self._version, self._prefill_s = False, False, -1, 0.0
        lost = [*self._running.values(), *self._waiting]
        self._running, self._waiting, self._ends, self._num_cached = {}, [], [], 0.0
        self._prefixes.clear()
        for request in lost:
            if not request.done.done():
                request.done.set_exception(UnreachableEngineError(f"{self.url} has ended"))
        self._continue()

    def restart(self) -> None:
        """Be healthy, without weights."""
        self._advance()
        self._is_up = True

    @property
    def is_up(self) -> bool:
        return self._is_up

    def count(self) -> None:
        """Count the seconds until now."""
        self._advance()
        self._continue()

    # continuous batching

    async def _receive(self, cost_s: float) -> None:
        """Wait until a call is read, after all earlier ones; reading holds up decoding."""
        self._check()
        now_s = asyncio.get_running_loop().time()
        if cost_s:
            self._read_at_s = max(now_s, self._read_at_s) + cost_s
            self._advance()
            self._prefill_s += cost_s if self._running else 0.0
            self._continue()
            await asyncio.sleep(self._read_at_s - now_s)
        self._check()
        self._advance()

    def _check(self) -> None:
        if not self._is_up:
            raise UnreachableEngineError(f"{self.url} does not answer")

    def _new(self, request: GenerateRequest) -> _Request:
        sample_id = request.rid.split("-", 1)[0]
        left = self._world.tokens_left(sample_id, len(request.token_ids))
        return _Request(
            request.rid,
            sample_id,
            sample_id.split(".", 1)[0],
            len(request.token_ids),
            min(left, request.max_new_tokens),
            left <= request.max_new_tokens,
            asyncio.get_running_loop().create_future(),
        )

    def _drop(self, requests: Sequence[_Request]) -> None:
        """Forget requests whose client has gone, as a server does once the connection ends."""
        here = [one for one in requests if self._running.get(one.rid) is one or one in self._waiting]
        if here:
            self._advance()
            for one in here:
                self._stop(one)
            self._continue()

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        gone_s, self._at_s = now_s - self._at_s, now_s
        if self._is_paused or not self._running:
            return
        self.busy_s += gone_s
        prefilled_s = min(gone_s, self._prefill_s)
        self._prefill_s -= prefilled_s
        self.prefilled_s += prefilled_s
        grown = (gone_s - prefilled_s) / self._token_s()
        self._clock += grown
        self._num_cached += grown * len(self._running)

    def _token_s(self) -> float:
        """Return the seconds in which every running response grows by one simulated token."""
        num, unit = len(self._running), self._world.unit
        context = self._num_cached / num
        if self._world.pads:
            context = max(one.context + self._clock - one.began for one in self._running.values())
        return self._world.step_s(num, context * unit) * unit

    def _continue(self) -> None:
        """End, retract and admit what is due, and look again when the next of these is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_paused:
            return
        while self._ends and (self._ends[0][0] <= self._clock + _CLOSE or self._is_gone(self._ends[0])):
            entry = heapq.heappop(self._ends)
            if not self._is_gone(entry):
                request = entry[2]
                self._stop(request)
                self._answer(request, "stop" if request.stops else "length")
        room = self._world.cache_tokens / self._world.unit
        while len(self._running) > 1 and self._num_cached > room:
            self._retract([next(reversed(self._running.values()))])
        num_running = len(self._running)
        while self._waiting and len(self._running) < self._world.max_running:
            if self._running and self._num_cached + self._waiting[0].context > _ADMITTED * room:
                break
            self._start(self._waiting.pop(0))
        if 0 < num_running < len(self._running):
            self._prefill_s += self._world.pass_s
        if not self._running:
            return
        num = len(self._running)
        until = min(
            self._ends[0][0] - self._clock,
            max(1.0, _GROWTH * self._num_cached / num),
            (room - self._num_cached) / num if num > 1 else float("inf"),
        )
        loop, due_s = asyncio.get_running_loop(), self._prefill_s + until * self._token_s()
        self._timer = loop.call_later(max(due_s, _TICK_S, math.ulp(loop.time())), self._look)

    def _look(self) -> None:
        self._timer = None
        self._advance()
        self._continue()

    def _is_gone(self, entry: tuple[float, int, _Request]) -> bool:
        """Whether a request has ended or been retracted since it was put on the heap."""
        end, _, request = entry
        return self._running.get(request.rid) is not request or end != request.began + request.left

    def _start(self, request: _Request) -> None:
        request.began = self._clock
        self._running[request.rid] = request
        self._num_cached += request.context
        known = max(self._prefixes.get(request.sample_id, 0), self._prefixes.get(request.prompt_id, 0))
        self._prefill_s += self._world.prefill_s * self._world.unit * max(0, request.context - known)
        self._prefixes.setdefault(request.prompt_id, min(request.context, self._world.prompt_tokens))
        heapq.heappush(self._ends, (request.began + request.left, next(self._numbers), request))

    def _stop(self, request: _Request) -> None:
        """Take a request out of the batch, with the tokens that it has."""
        if self._running.pop(request.rid, None) is None:
            if request in self._waiting:
                self._waiting.remove(request)
            return
        grown = self._clock - request.began
        self._num_cached -= request.context + grown
        num_new = min(request.left, int(grown + _CLOSE))
        if num_new:
            request.spans.append(VersionSpan(self._version, request.num_done, request.num_done + num_new))
        request.num_done += num_new
        request.context += num_new
        request.left -= num_new
        self._prefixes[request.sample_id] = request.context
        if not self._running:
            self._num_cached = 0.0  # rounding

    def _retract(self, requests: Sequence[_Request]) -> None:
        """Let running requests wait, before all others; they are prefilled again."""
        for request in requests:
            self._stop(request)
            if request.left:
                self._prefixes.pop(request.sample_id, None)
            else:
                self._answer(request, "stop" if request.stops else "length")
        self._waiting[:0] = [request for request in requests if request.left]

    def _answer(self, request: _Request, reason: Literal["stop", "length", "abort"]) -> None:
        num = request.num_done
        if not request.left:
            reason = "stop" if request.stops else "length"
        if not request.done.done():
            request.done.set_result(
                GenerateResult(
                    request.rid,
                    _IDS[:num],
                    _LOGPROBS[:num],
                    tuple(request.spans),
                    reason,
                    request.context - num,
                    0,
                )
            )
