"""The scheduler's decisions by loops over all samples, written to be read: what ours are compared with."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.base import Engine
from bapo_megatron.rollout import continuous
from bapo_megatron.rollout.book import Keep, Prompts, RolloutBook, groups_of
from bapo_megatron.rollout.continuous import ContinuousSampling
from bapo_megatron.rollout.group_files import group_to_json, with_values
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.tokens import JoinedRows
from bapo_megatron.types import Group, NeedsEnvironment, NeedsTokens, Sample


class PlainBook:
    """A `RolloutBook` without anything that it knows from earlier changes."""

    def __init__(
        self,
        config: RolloutConfig,
        prompts: Prompts,
        bound: StalenessBound,
        keep: Keep = lambda judged: True,
        *,
        by_group: bool = True,
    ) -> None:
        self.ledger = Ledger()
        self.bound = bound
        self.by_group = by_group
        self.num_dropped: Counter[str] = Counter()
        self._prompts = prompts
        self._keep = keep
        self._samples_per_prompt = config.samples_per_prompt
        self._samples_in_flight = (config.groups_in_flight or config.prompts_per_step) * config.samples_per_prompt
        self._active: dict[int, Group] = {}
        self.finished: list[Group] = []
        self._num_growing = 0
        self._begun: dict[str, int] = {}

    @classmethod
    def like(cls, book: RolloutBook, config: RolloutConfig) -> "PlainBook":
        """Return a plain book to replace an empty book."""
        return cls(config, book.prompts, book.bound, book.keep, by_group=book.by_group)

    def admit(self, version: int, next_version: int) -> list[Sample]:
        admitted: list[Sample] = []
        capacity = self.bound.capacity(version, next_version)
        while self._num_growing < self._samples_in_flight and len(self._active) + len(self.finished) < capacity:
            prompt = self._prompts.next()
            group = Group.begun(prompt, self._samples_per_prompt)
            for sample in group.samples:
                self.ledger.admit(sample.sample_id)
            self._active[prompt.prompt_id] = group
            self._num_growing += len(group.samples)
            admitted += group.samples
        return admitted

    def growing(self) -> list[Sample]:
        return [s for group in self._active.values() for s in group.samples if isinstance(s.need, NeedsTokens)]

    def urgent(self, version: int) -> list[Sample]:
        return [s for s in self.growing() if self.is_urgent(s, version)]

    def waiting(self) -> list[list[Sample]]:
        return [samples for group in self._active.values() for samples in self.waiting_in(group)]

    def waiting_in(self, group: Group) -> list[list[Sample]]:
        waiting = [s for s in group.samples if isinstance(s.need, NeedsEnvironment)]
        if not self.by_group:
            return [[sample] for sample in waiting]
        is_due = waiting and not any(isinstance(s.need, NeedsTokens) for s in group.samples)
        return [waiting] if is_due else []

    def start(self, sample: Sample, version: int) -> None:
        self.ledger.start(sample.sample_id)
        self._begun[sample.sample_id] = version

    def grow(self, sample: Sample) -> None:
        self._num_growing -= not isinstance(sample.need, NeedsTokens)
        self._put(sample)
        self._stop(sample)

    def answer(self, sample: Sample) -> None:
        self.ledger.answer(sample)
        self._num_growing += isinstance(sample.need, NeedsTokens)
        self._put(sample)

    def release(self, sample_id: str) -> None:
        if self.ledger.is_running(sample_id):
            self._stop(self.get(sample_id))

    def get(self, sample_id: str) -> Sample:
        group = self.group(int(sample_id.split(".")[0]))
        return next(s for s in group.samples if s.sample_id == sample_id)

    def group(self, prompt_id: int) -> Group:
        return self._active[prompt_id]

    def settle(self, group: Group, version: int) -> bool:
        del self._active[group.prompt.prompt_id]
        is_kept = group.has_baseline and self._keep(group)
        if self._is_stale(group, version):
            self._drop(group, "stale")
        elif not is_kept:
            self._drop(group, "keep_group" if group.has_baseline else "failed")
        else:
            self.finished.append(group)
        return is_kept

    def choose(self, version: int) -> list[Group] | None:
        active = [self._slack(group, version) for group in self._active.values()]
        chosen = self._stalest(active, version)
        if chosen is None:
            return None
        taken = {group.prompt.prompt_id for group in chosen}
        self.finished = [group for group in self.finished if group.prompt.prompt_id not in taken]
        for sample in (s for group in chosen for s in group.samples):
            if sample.reward is None:
                self.ledger.drop(sample.sample_id, "failed")
            else:
                self.ledger.train(sample.sample_id)
        self.ledger.check(self.buffered())
        return chosen

    def drop_stale(self, version: int) -> None:
        for group in [g for g in self.finished if self._is_stale(g, version)]:
            self.finished.remove(group)
            self._drop(group, "stale")
        for group in [g for g in self._active.values() if self._is_stale(g, version)]:
            is_running = any(self.ledger.is_running(s.sample_id) for s in group.samples)
            if not (is_running or self.waiting_in(group)):
                del self._active[group.prompt.prompt_id]
                self._num_growing -= sum(isinstance(s.need, NeedsTokens) for s in group.samples)
                self._drop(group, "stale")

    def is_urgent(self, sample: Sample, version: int) -> bool:
        return self._slack(self._active[sample.prompt.prompt_id], version) == 0

    def buffered(self) -> Iterator[Sample]:
        for group in (*self._active.values(), *self.finished):
            yield from group.samples

    def state_dict(self) -> dict[str, Any]:
        rows = JoinedRows()
        groups = {"active": self._active.values(), "finished": self.finished}
        samples = {name: [with_values(group_to_json(g), rows.put) for g in some] for name, some in groups.items()}
        state = {"prompts": self._prompts.state_dict(), "ledger": self.ledger.state_dict(), **samples}
        return {**state, "rows": rows.arrays()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self.ledger.load_state_dict(state["ledger"])
        active, self.finished = groups_of(state, ())
        self._active = {group.prompt.prompt_id: group for group in active}
        self._num_growing = len(self.growing())

    def _stalest(self, active: Sequence[float], version: int) -> list[Group] | None:
        size = self.bound.groups_per_step
        if len(self.finished) < size:
            return None
        by_slack = sorted(self.finished, key=lambda group: self._slack_of_tokens(group, version))
        chosen, others = by_slack[:size], by_slack[size:]
        slacks = sorted(s for s in (*(self._slack_of_tokens(g, version) for g in others), *active) if s >= 0)
        # At best, the i-th most urgent of the rest is trained i // size steps after the next one.
        in_time = all(slack >= 1 + i // size for i, slack in enumerate(slacks))
        least_urgent = self._slack_of_tokens(chosen[-1], version)
        waiting_helps = any(0 <= slack < least_urgent for slack in active)
        return chosen if in_time or not waiting_helps else None

    def _is_stale(self, group: Group, version: int) -> bool:
        return self._slack_of_tokens(group, version) < 0

    def _slack_of_tokens(self, group: Group, version: int) -> float:
        versions = [v for s in group.samples if (v := s.oldest_version) is not None]
        return self.bound.slack(min(versions, default=version), version)

    def _slack(self, group: Group, version: int) -> float:
        begun = [self._begun[s.sample_id] for s in group.samples if s.sample_id in self._begun]
        return min([self._slack_of_tokens(group, version), *(self.bound.slack(v, version) for v in begun)])

    def _put(self, sample: Sample) -> None:
        prompt_id = sample.prompt.prompt_id
        self._active[prompt_id] = self._active[prompt_id].grown(sample)

    def _stop(self, sample: Sample) -> None:
        self.ledger.stop(sample)
        del self._begun[sample.sample_id]

    def _drop(self, group: Group, reason: str) -> None:
        self.num_dropped[reason] += 1
        for sample in group.samples:
            self.ledger.drop(sample.sample_id, reason)


class PlainQueue(continuous.ReadyQueue):
    """A heap that each step refills."""

    def __init__(self, ranks: Iterable[continuous.Rank]) -> None:
        super().__init__()
        self._heap = list(ranks)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, rank: continuous.Rank) -> None:
        heapq.heappush(self._heap, rank)


class PlainStream(ContinuousSampling):
    """A `ContinuousSampling` with a new queue in each step; it counts each engine's requests before each use."""

    def start(self, step: int, version: int) -> None:
        self._is_behind = True
        super().start(step, version)

    def _catch_up(self) -> None:
        growing = [s for s in self._book.growing() if s.sample_id not in self._requests]
        self._ready = PlainQueue(self._rank(sample) for sample in growing)
        for samples in self._book.waiting():
            self._start_answer(samples)

    def _enqueue(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._ready.put(self._rank(sample))

    def _rank(self, sample: Sample) -> continuous.Rank:
        is_urgent = self._book.is_urgent(sample, self.next_version)
        return continuous.Rank(not is_urgent, self._pieces[sample.sample_id], sample.prompt.prompt_id, sample.sample_id)

    def _pump(self) -> None:
        if not self._is_open or self.failure is not None:
            return
        self._enqueue(self._book.admit(self.version, self.next_version))
        engines: dict[str, Engine] = {engine.url: engine for engine in self._dispatcher.pool.live()}
        load = Counter(dict.fromkeys(engines, 0))
        for request in self._requests.values():
            if request.engine.url in load:
                load[request.engine.url] += 1
        limit = self._config.max_concurrent_requests
        while self._ready and any(n < limit for n in load.values()):
            *_, prompt_id, sample_id = heapq.heappop(self._ready._heap)
            home = self._dispatcher.pool.home(prompt_id)
            url = home.url if home is not None else ""
            if load.get(url, limit) >= limit:
                url = min(load, key=lambda u: load[u])
            load[url] += 1
            self._start_request(self._book.get(sample_id), engines[url])

    async def _tick(self) -> None:
        while True:
            for sample_id, request in list(self._requests.items()):
                if not self._dispatcher.pool.is_live(request.engine):
                    self._withdrawn.add(sample_id)
                    request.task.cancel()
            if not self._dispatcher.pool.live():
                self._changed.set()
            self._pump()
            await asyncio.sleep(continuous.TICK_S)


def make_plain(scheduler: Scheduler) -> Scheduler:
    """Return a scheduler that has not begun, with a plain book and a plain stream."""
    book = scheduler.book = PlainBook.like(scheduler.book, scheduler.config)  # type: ignore[assignment]
    parts = scheduler.dispatcher, scheduler.ask, scheduler.book_answers
    scheduler.sampling = PlainStream(scheduler.config, book, *parts)  # type: ignore[arg-type]
    return scheduler
