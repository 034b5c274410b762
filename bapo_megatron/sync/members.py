"""The engines that take part in one push: one call to all of them at once, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from bapo_megatron.engines.base import Engine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.errors import (
    BroadcastLostError,
    EngineError,
    NoEngineLeftError,
    RequestRefusedError,
    UnreachableEngineError,
)
from bapo_megatron.sync.base import Submit

T = TypeVar("T")
Call = Callable[[Engine], Coroutine[Any, Any, T]]

_OF_THE_TRAINER = (RequestRefusedError, BroadcastLostError)  # what all engines say of a push that is at fault itself


class Replies(Generic[T]):
    """Calls under way, one to each of some engines, with one deadline."""

    def __init__(self, what: str, futures: dict[str, Future[T]], timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.done_at: float | None = None  # when the last reply came
        self.has_failed = False  # a reply is an error
        self._what = what  # completes "waited for <url> to ..."
        self._timeout_s = timeout_s
        self._futures = futures
        self._num_open = len(futures)
        for future in futures.values():
            future.add_done_callback(self._count)

    @property
    def is_done(self) -> bool:
        return self._num_open == 0

    def failed(self) -> set[str]:
        """Urls whose reply is an error so far."""
        return {u for u, f in self._futures.items() if f.done() and (f.cancelled() or f.exception() is not None)}

    def unanswered(self) -> set[str]:
        """Urls that have not replied so far."""
        return {url for url, future in self._futures.items() if not future.done()}

    def collect(self) -> tuple[dict[str, T], dict[str, EngineError]]:
        """Results and failures by url, once all have answered or the deadline is over; who is late has failed."""
        wait(self._futures.values(), timeout=max(0.0, self.deadline - time.monotonic()))
        results: dict[str, T] = {}
        failures: dict[str, EngineError] = {}
        for url, future in self._futures.items():
            if not future.done():
                future.cancel()
                failures[url] = UnreachableEngineError(f"waited {self._timeout_s:g} s for {url} to {self._what}")
            elif (problem := future.exception()) is None:
                results[url] = future.result()
            elif isinstance(problem, EngineError):
                failures[url] = problem
            else:
                raise problem
        return results, failures

    def _count(self, future: Future[T]) -> None:
        """Called on the engines' event loop, or under `collect` where the future is cancelled."""
        if future.cancelled() or future.exception() is not None:
            self.has_failed = True
        self._num_open -= 1
        if self._num_open == 0:
            self.done_at = time.monotonic()


class Members:
    """Calls engines together, and fences those that fail; `engines` are the others."""

    def __init__(self, engines: Sequence[Engine], pool: EnginePool, submit: Submit, timeout_s: float) -> None:
        self.engines = list(engines)
        self.timeout_s = timeout_s
        self._pool = pool
        self._submit = submit
        if not self.engines:
            raise NoEngineLeftError(f"no rollout engine is left: {pool.describe()}")

    def start(self, what: str, call: Call[T], only: Collection[str] | None = None) -> Replies[T]:
        """The same call to every engine at once, or to those at the urls `only`."""
        asked = [engine for engine in self.engines if only is None or engine.url in only]
        return Replies(what, {engine.url: self._submit(call(engine)) for engine in asked}, self.timeout_s)

    def all(self, what: str, call: Call[T], only: Collection[str] | None = None) -> dict[str, T]:
        """Results by url of those that did it; the others are fenced. Raises as `drop` does."""
        results, failures = self.start(what, call, only).collect()
        self.drop(failures)
        return results

    def drop(self, failures: Mapping[str, EngineError]) -> None:
        """Fence the engines at these urls.

        Raises:
            RequestRefusedError, BroadcastLostError: all engines are well and say so; the fault is the trainer's.
            NoEngineLeftError: none is left.
        """
        complaints = [error for error in failures.values() if isinstance(error, _OF_THE_TRAINER)]
        if failures and len(complaints) == len(self.engines):
            raise complaints[0]
        for engine in self.engines:
            if engine.url in failures:
                self._pool.fence(engine, str(failures[engine.url]))
        self.engines = [engine for engine in self.engines if engine.url not in failures]
        if not self.engines:
            raise NoEngineLeftError(f"no rollout engine is left: {self._pool.describe()}")
