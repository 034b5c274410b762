"""Sampling without rounds: one request per sample, replaced one by one, while the trainer waits or trains.

    ready --free slot of a live engine--> running --returned--> ready again, or waiting for its environment or judge
                                                                waiting --answered--> ready again, or ended

Each request grows its sample by one piece, of at most `tokens_per_round` tokens. The sample then queues behind samples
with fewer pieces in this step, so that long ones do not starve the others. Samples whose group must be trained in the
very next batch come first. A sample that waits for an environment holds no slot.
"""

import asyncio
import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import NamedTuple

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import Engine
from bapo_megatron.errors import EngineError
from bapo_megatron.rollout.book import RolloutBook
from bapo_megatron.rollout.dispatch import Dispatcher
from bapo_megatron.types import NeedsTokens, Sample

TICK_S = 0.5  # how often changes of the pool are noticed
_ABORT_AGAIN_S = (0.02, 0.5)  # first and longest wait: a request may reach its engine just after the abort
_MAX_EMPTY_PIECES = 3  # replies without a token, per sample that needs one, before the engines are declared broken

Ask = Callable[[Sequence[Sample]], Coroutine[None, None, list[Sample]]]
"""Returns a driver's answers to samples of one group."""
Take = Callable[[Sequence[Sample]], None]
"""Books a driver's answers."""


class Rank(NamedTuple):
    """A sample's place in the queue."""

    is_later: bool  # its group may be trained in a later step, too
    num_pieces: int  # in this step
    prompt_id: int
    sample_id: str

    @property
    def is_plain(self) -> bool:
        """Whether the rank would be the same in a step that has just begun, unless the group is urgent then."""
        return self.is_later and not self.num_pieces


class ReadyQueue:
    """Samples that wait for a slot. Putting a sample again changes its rank."""

    def __init__(self) -> None:
        self.not_plain: set[str] = set()  # ids of samples whose rank the next step changes
        self._ranks: dict[str, Rank] = {}  # by sample id
        self._heap: list[Rank] = []  # also outdated ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._ranks

    def put(self, rank: Rank) -> None:
        if self._ranks.get(rank.sample_id) == rank:
            return
        self._ranks[rank.sample_id] = rank
        (self.not_plain.discard if rank.is_plain else self.not_plain.add)(rank.sample_id)
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._ranks):  # as many pushes came before, so the cost per push does not grow
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)

    def first(self) -> Rank | None:
        """Return the rank of the first sample."""
        while self._heap and self._ranks.get(self._heap[0].sample_id) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def remove_first(self) -> None:
        """Remove the sample whose rank `first` has just returned."""
        sample_id = heapq.heappop(self._heap).sample_id
        del self._ranks[sample_id]
        self.not_plain.discard(sample_id)


class _Request(NamedTuple):
    """A request in progress."""

    number: int  # in order of their starts
    task: asyncio.Task[None]
    engine: Engine


class ContinuousSampling:
    """Requests that keep every slot of every live engine busy. Belongs to one event loop."""

    def __init__(self, config: RolloutConfig, book: RolloutBook, dispatcher: Dispatcher, ask: Ask, take: Take) -> None:
        self.step = 0
        self.version = 0  # version of the sampling weights
        self.next_version = 0  # version of the learner at the next batch
        self._config = config
        self._book = book
        self._dispatcher = dispatcher
        self._ask = ask
        self._take = take
        self._is_open = False
        self._requests: dict[str, _Request] = {}  # by sample id
        self._requested: dict[str, set[str]] = {e.url: set() for e in dispatcher.pool.engines}  # sample ids, by engine
        self._num_started = 0  # requests in total
        self._withdrawn: set[str] = set()  # sample ids whose request was cancelled, to be sent elsewhere
        self._answers: dict[str, asyncio.Task[None]] = {}  # by the id of the first sample asked about
        self._ready = ReadyQueue()
        self._is_behind = True  # a sample may be neither queued, requested, nor asked about
        self._pieces: Counter[str] = Counter()  # requests per sample in this step
        self._num_empty = 0  # replies in a row without a token
        self.failure: BaseException | None = None  # raised by the next `wait` or `halt`
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def start(self, step: int, version: int) -> None:
        """Sample for the batch of `step` with weights of `version`; open requests continue."""
        self.step, self.version, self.next_version = step, version, version
        self._raise_failure()  # a request or an answer may have failed since the last batch
        self._pieces.clear()
        self._num_empty, self._is_open = 0, True
        if self._is_behind or len(self._ready) + len(self._requests) != self._book.num_growing:
            self._catch_up()
        else:
            self._enqueue([self._book.get(sample_id) for sample_id in self._ready.not_plain])
            self._enqueue(s for s in self._book.urgent(version) if s.sample_id in self._ready)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self._pump()

    async def wait(self, timeout_s: float) -> None:
        """Wait for a change that may complete the next batch, or for `timeout_s`.

        Raises:
            EngineError: a request failed for good, or the engines return no tokens at all.
        """
        if self.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()
        self._raise_failure()

    async def pause(self) -> None:
        """Stop sampling until the next `start`: abort open requests, which keep their tokens."""
        self._is_open = False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.request_timeout_s
        again_s, longest_s = _ABORT_AGAIN_S
        while self._requests and loop.time() < deadline:
            await self._dispatcher.abort_open()
            if tasks := [request.task for request in self._requests.values()]:
                await asyncio.wait(tasks, timeout=again_s)
            again_s = min(2 * again_s, longest_s)
        for _, task, engine in list(self._requests.values()):
            reason = f"{engine.url}: requests did not end within {self._config.request_timeout_s:g} s of their abort"
            self._dispatcher.fence(engine, reason)
            task.cancel()
        if leftover := [request.task for request in self._requests.values()]:
            await asyncio.wait(leftover)

    async def halt(self) -> None:
        """Stop sampling as `pause` does, and await verdicts.

        Environments that were asked about single samples continue meanwhile.
        """
        await self.pause()
        if self._book.by_group and self._answers:
            await asyncio.wait(list(self._answers.values()))
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self._raise_failure()

    async def close(self) -> None:
        """Stop sampling for good: like `halt`, but without waiting for environments, which will be asked again."""
        try:
            await self.halt()
        finally:
            for task in self._answers.values():  # also those that the last replies led to
                task.cancel()

    def _pump(self) -> None:
        """Admit new groups within the bound, and give every free slot to the first sample in the queue."""
        if not self._is_open or self.failure is not None:
            return
        for sample in self._book.admit(self.version, self.next_version):
            if isinstance(sample.need, NeedsTokens):
                self._enqueue([sample])
            else:
                self._start_answer([sample])
        while (first := self._ready.first()) and (engine := self._free_engine(first.prompt_id)):
            self._ready.remove_first()
            self._start_request(self._book.get(first.sample_id), engine)

    def _free_engine(self, prompt_id: int) -> Engine | None:
        """Return a live engine with a free slot, preferably the prompt's home, or None if there is none."""

        def load(engine: Engine) -> int:
            return len(self._requested[engine.url])

        home, limit = self._dispatcher.pool.home(prompt_id), self._config.max_concurrent_requests
        if home is None or load(home) < limit:
            return home
        idlest = min(self._dispatcher.pool.live(), key=load, default=home)
        return idlest if load(idlest) < limit else None

    def _start_request(self, sample: Sample, engine: Engine) -> None:
        sample_id, num_before = sample.sample_id, sample.num_sampled_tokens
        self._book.start(sample, self.version)
        self._pieces[sample_id] += 1
        task = asyncio.get_running_loop().create_task(
            self._dispatcher.grow([sample], engine, self.step, self._book.grow)
        )
        self._requests[sample_id] = _Request(self._num_started, task, engine)
        self._requested[engine.url].add(sample_id)
        self._num_started += 1
        task.add_done_callback(lambda done: self._end_request(done, sample_id, num_before))

    def _end_request(self, task: asyncio.Task[None], sample_id: str, num_before: int) -> None:
        engine = self._requests.pop(sample_id).engine
        self._requested[engine.url].remove(sample_id)
        self._book.release(sample_id)
        sample = self._book.get(sample_id)
        if task.cancelled() and sample_id not in self._withdrawn:
            self._is_open = False  # the event loop is ending: a new request would outlive it
        self._withdrawn.discard(sample_id)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())
        elif isinstance(sample.need, NeedsTokens):
            self._enqueue([sample])
            if self._dispatcher.pool.is_live(engine):
                self._count_empty(sample.num_sampled_tokens - num_before)
        else:
            self._num_empty = 0
            for samples in self._book.waiting_in(self._book.group(sample.prompt.prompt_id)):
                self._start_answer(samples)
        self._pump()

    def _count_empty(self, num_new: int) -> None:
        self._num_empty = 0 if num_new or not self._is_open else self._num_empty + 1
        if self._num_empty > _MAX_EMPTY_PIECES * max(1, len(self._ready) + len(self._requests)):
            urls = ", ".join(engine.url for engine in self._dispatcher.pool.engines)
            self._fail(
                EngineError(
                    f"{self._num_empty} replies in a row from {urls} held no token; something may be aborting requests"
                )
            )

    def _start_answer(self, samples: Sequence[Sample]) -> None:
        name = samples[0].sample_id
        if name in self._answers:
            return
        self._answers[name] = asyncio.get_running_loop().create_task(self._answer(samples))
        self._answers[name].add_done_callback(lambda done: self._end_answer(done, name))

    async def _answer(self, samples: Sequence[Sample]) -> None:
        answers = await self._ask(samples)
        self._take(answers)  # booked and queued in one go: a `start` in between would queue them twice
        self._enqueue(sample for sample in answers if isinstance(sample.need, NeedsTokens))

    def _end_answer(self, task: asyncio.Task[None], name: str) -> None:
        del self._answers[name]
        self._is_behind |= task.cancelled()
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())
        self._changed.set()
        self._pump()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _fail(self, problem: BaseException | None) -> None:
        self.failure, self._is_behind = self.failure or problem, True
        self._changed.set()

    async def _tick(self) -> None:
        """Take requests back from engines that are no longer live, and use new engines."""
        while True:
            pool = self._dispatcher.pool
            lost = {i for engine in pool.engines if not pool.is_live(engine) for i in self._requested[engine.url]}
            self._withdrawn |= lost
            for request in sorted(self._requests[sample_id] for sample_id in lost):
                request.task.cancel()
            if not pool.live():
                self._changed.set()
            self._pump()
            await asyncio.sleep(TICK_S)

    def _catch_up(self) -> None:
        """Queue all samples that need tokens and have no request, and ask about waiting samples."""
        self._ready, self._is_behind = ReadyQueue(), False
        self._enqueue(s for s in self._book.growing() if s.sample_id not in self._requests)
        for samples in self._book.waiting():
            self._start_answer(samples)

    def _enqueue(self, samples: Iterable[Sample]) -> None:
        """Queue samples; give those already queued their current ranks."""
        for s in samples:
            is_urgent = self._book.is_urgent(s, self.next_version)
            self._ready.put(Rank(not is_urgent, self._pieces[s.sample_id], s.prompt.prompt_id, s.sample_id))
