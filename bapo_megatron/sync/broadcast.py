"""Weights over one torch.distributed group in which every engine is a rank, verified before a token is sampled.

    pause(retract) -> group -> begin -> per bucket: gather | announce by HTTP + broadcast -> end -> verify -> continue

While a bucket is on its way, its digests are computed and the next one is gathered. Every wait watches the engines'
replies and the broadcast together, has a deadline and names who is late. An engine that fails is fenced off; where that
tears a broadcast, the others stay paused until the push is repeated. Nothing is sampled from weights not verified.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import Capability, Engine, can
from bapo_megatron.engines.group import GroupBackend
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import Bucket, TensorSpec, WeightStream, digest, pack, plan_buckets
from bapo_megatron.errors import BroadcastLostError, EngineError, NoEngineLeftError, UnreachableEngineError
from bapo_megatron.sync.base import Clock, Submit, SyncStats
from bapo_megatron.sync.engine_group import EngineGroup
from bapo_megatron.sync.members import Members, Replies
from bapo_megatron.sync.session import Infos, Session

_POLL_S = 0.0005  # of the broadcast, which has no event to wait for


class BroadcastChannel:
    """Implements `Channel`, for the trainer's first process and its main thread."""

    def __init__(self, pool: EnginePool, config: SyncConfig, submit: Submit, *, host: str = "127.0.0.1") -> None:
        """`host` is where the engines reach this process. One rank per engine, more where it reports `tp_size`."""
        self._config = config
        self._session = Session(pool, submit, config.timeout_s)
        self._host = host
        self._group: EngineGroup | None = None
        self._plan: list[Bucket] = []

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        """See `Channel.connect`."""
        self._session.connect(manifest)
        self._plan = plan_buckets(manifest, int(self._config.bucket_mib * 2**20))

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """See `Channel.push`."""
        assert self._plan, "connect() comes before push()"
        stream = WeightStream(named_weights, self._session.manifest)
        try:
            return self._push(stream, version)
        except NoEngineLeftError:
            if self._group is not None:
                self._group.abandon()
                self._group = None
            return self._session.abandon()
        finally:
            stream.drain()

    def close(self) -> None:
        """Dissolve the group."""
        if self._group is not None and self._session.pool.live():
            self._group.leave(self._session.members(self._session.pool.live()))
        self._group = None

    def _push(self, stream: WeightStream, version: int) -> SyncStats:
        stats = SyncStats()
        clock = Clock(stats.seconds)
        members, infos, new = self._session.pause()
        members.all("begin the weight update", _begin)
        self._join(members, infos, new)
        clock.lap("pause")
        sender = _Sender(members, self._require_group(), version)
        try:
            sender.send_all(self._plan, stream, with_digests=_any(infos, "weight_digests"))
        except _TornError as torn:
            self._group = None
            self._session.is_torn = True
            members.drop(torn.failures)
            stats.is_whole = False
            return stats
        except EngineError:
            self._group = None
            raise
        finally:
            sender.account(stats)
            clock.skip()
        members.all("end the weight update", lambda engine: engine.end_weight_update())
        self._session.finish(members, sender.digests, version, stats, clock)
        return stats

    def _join(self, members: Members, infos: Infos, new: set[str]) -> None:
        """Form the group anew where others belong to it than are in it."""
        if self._group is not None and not new and self._group.urls == {engine.url for engine in members.engines}:
            return
        if self._group is not None:
            self._group.leave(members)
            self._group = None
        num_ranks = {url: int(info.get("tp_size") or 1) for url, info in infos.items()}
        self._group = EngineGroup.form(members, num_ranks, host=self._host, backend=self._backend(infos))

    def _require_group(self) -> EngineGroup:
        assert self._group is not None
        return self._group

    def _backend(self, infos: Infos) -> GroupBackend:
        if self._config.backend != "auto":
            return self._config.backend
        return "nccl" if torch.cuda.is_available() and not _any(infos, "gloo_only") else "gloo"


class _TornError(Exception):
    """A broadcast failed, and the engines in it may hold a mixture of old and new weights."""

    def __init__(self, failures: dict[str, EngineError]) -> None:
        super().__init__(failures)
        self.failures = failures  # of those that are to blame, by url


@dataclass(slots=True)
class _Flight:
    """One bucket on its way."""

    replies: Replies[None]
    works: list[dist.Work]

    def is_sent(self) -> bool:
        """Raises RuntimeError where a broadcast failed."""
        while self.works and self.works[0].is_completed():
            self.works.pop(0).wait()
        return not self.works

    def has_arrived(self) -> bool:
        return self.replies.is_done and self.is_sent()


@dataclass(slots=True)
class _Sender:
    """Sends all buckets of one push, two of which are held at a time: one on its way, one being gathered.

    Over gloo each tensor is a broadcast of its own, from where it is to where it belongs: on a CPU a copy costs half as
    much as sending. Over NCCL, where a launch costs more than a copy, a bucket is packed into one buffer.
    """

    members: Members
    group: EngineGroup
    version: int
    digests: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    num_buckets: int = 0
    began_at: float = field(default_factory=time.monotonic)
    gather_s: float = 0.0  # in which the engines had nothing to do
    flights: list[_Flight] = field(default_factory=list)  # at most two: the engines take one while another arrives

    def send_all(self, plan: Sequence[Bucket], stream: WeightStream, *, with_digests: bool) -> None:
        """Raises _TornError, naming those at fault, or EngineError where that is nobody."""
        for index, bucket in enumerate(plan):
            tensors = self._gather(bucket, stream)
            if self.flights:
                last, earlier = self.flights[-1], self.flights[:-1]
                self._wait(lambda: last.is_sent() and all(f.has_arrived() for f in earlier))  # noqa: B023
                self.flights = [last]
            self._send(bucket, tensors, is_last=index + 1 == len(plan))
            for spec, tensor in zip(bucket.specs, tensors, strict=True):
                self.digests[spec.name] = digest(tensor) if with_digests else ""
        self._wait(lambda: all(flight.has_arrived() for flight in self.flights))

    def account(self, stats: SyncStats) -> None:
        """Write down what was sent, and how long it took."""
        stats.num_bytes, stats.num_tensors, stats.num_buckets = self.num_bytes, len(self.digests), self.num_buckets
        stats.seconds["gather"] = self.gather_s
        stats.seconds["broadcast"] = time.monotonic() - self.began_at - self.gather_s

    def _gather(self, bucket: Bucket, stream: WeightStream) -> list[Tensor]:
        began_at = time.monotonic()
        try:
            tensors = [tensor.to(self._device).contiguous() for tensor in stream.take(bucket)]
        except EngineError:
            self.group.abandon()
            raise
        idle_since = self.flights[-1].replies.done_at if self.flights else began_at
        if idle_since is not None:
            self.gather_s += time.monotonic() - max(began_at, idle_since)
        return tensors

    def _send(self, bucket: Bucket, tensors: list[Tensor], *, is_last: bool) -> None:
        """Announce one bucket and start its broadcast. The last one carries the version."""
        names, dtypes, shapes = zip(*((spec.name, spec.dtype, spec.shape) for spec in bucket.specs), strict=True)
        version = self.version if is_last else None
        flat = self.group.backend == "nccl"
        if flat:
            data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            pack(bucket, tensors, data)
            tensors = [data]
        replies = self.members.start(
            f"take the bucket with {names[0]}",
            lambda e: e.update_weights(names, dtypes, shapes, self.group.name, flat=flat, version=version),
        )
        # Over gloo sooner than the replies' deadline: a hung engine ends the broadcast, the others are free to say so.
        timeout_s = self.members.timeout_s / 2
        self.flights.append(_Flight(replies, [self.group.broadcast(tensor, timeout_s) for tensor in tensors]))
        self.num_bytes += bucket.num_bytes
        self.num_buckets += 1

    @property
    def _device(self) -> str:
        return "cuda" if self.group.backend == "nccl" else "cpu"

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; the first failure or the deadline ends it."""
        problem: Exception | None = None
        try:
            while not any(flight.replies.has_failed for flight in self.flights):
                if condition():
                    return
                if time.monotonic() > self.flights[0].replies.deadline:
                    break
                time.sleep(_POLL_S)
        except RuntimeError as error:
            problem = error
        raise _TornError(self._break_off(problem))

    def _break_off(self, problem: Exception | None) -> dict[str, EngineError]:
        """Leave the group, and wait for what the engines say. Returns those that are to blame.

        An engine that only did not receive is not; one that does not answer is, even where it waits for another one.
        """
        self.group.abandon()
        failures: dict[str, EngineError] = {}
        for flight in self.flights:
            failures = flight.replies.collect()[1] | failures
        to_blame = {url: error for url, error in failures.items() if not isinstance(error, BroadcastLostError)}
        if not to_blame:
            lost = next(iter(failures.values()), problem or "it did not end in time, though all engines answered")
            raise EngineError(f"broadcasting the weights failed: {lost}")
        return to_blame


async def _begin(engine: Engine) -> None:
    """Open an update session; one that was left open is closed first, its weights are all replaced."""
    try:
        await engine.begin_weight_update()
    except UnreachableEngineError:
        raise
    except EngineError:
        with contextlib.suppress(EngineError):  # it may say that what it holds is torn
            await engine.end_weight_update()
        await engine.begin_weight_update()


def _any(infos: Infos, capability: Capability) -> bool:
    return any(can(info, capability) for info in infos.values())
