"""Weights over one torch.distributed group in which every engine is a rank, verified before a token is sampled.

    pause -> begin -> group -> per bucket: gather | announce by HTTP + broadcast -> end -> verify -> continue

While one bucket travels, its digests are computed and the next bucket is gathered. The next one is announced only after
every engine has confirmed the last: broadcasts have no names, and two announcements may arrive in either order. Every
wait watches the engines' replies and the broadcast together, has a deadline, and names the late engine. An engine that
fails is fenced off (`Members.fence`); if that tears a broadcast, the others stay paused until the push is repeated
(`RankZeroChannel.push`). An engine that recovers takes part in a later push (engines/pool.py). Nothing is sampled from
unverified weights.
"""

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import Capabilities, Engine, GroupSeat, PauseMode
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.update_group import GroupBackend, UpdateGroup, connect_store, host_store, in_thread
from bapo_megatron.engines.wire import Bucket, TensorSpec, digest, in_order, pack_bucket, plan_buckets
from bapo_megatron.errors import BroadcastLostError, EngineError, NoEngineLeftError, UserError
from bapo_megatron.runtime.nccl import refuses_sharing, sharing_problem, sharing_remedy
from bapo_megatron.sync.base import Sender, Submit, SyncStats
from bapo_megatron.sync.session import Infos, Members, Replies, Session

Weights = Iterator[tuple[str, Tensor]]

_POLL_S = 0.0005  # a broadcast has no event to wait for
RELEASE_S = 5.0  # time for engines to report that a rendezvous was cancelled


class BroadcastChannel(Sender):
    """Implements `Sender`."""

    def __init__(
        self,
        pool: EnginePool,
        config: SyncConfig,
        submit: Submit,
        *,
        host: str = "127.0.0.1",
        pause_mode: PauseMode = "retract",
    ) -> None:
        """`host` is this process's address for the engines. An engine is one rank, or `tp_size` if it reports that."""
        self._config = config
        self.session = Session(pool, submit, config.timeout_s, pause_mode, {"gloo", "nccl"})
        self._host = host
        self.group: UpdateGroup | None = None  # group of the last push, while it can be used again
        self._urls: set[str] = set()  # URLs of the engines in the group
        self.plan: list[Bucket] = []

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        """See `Sender.connect`."""
        self.session.connect(manifest)
        self.plan = plan_buckets(manifest, int(self._config.bucket_mib * 2**20))

    def send(self, weights: Weights, version: int) -> SyncStats:
        """See `Sender.send`."""
        assert self.plan, "connect() comes before send()"
        try:
            return self._send(in_order(weights, self.session.manifest), version)
        except NoEngineLeftError:
            self._abandon_group()
            return self.session.abandon()

    def resume(self, stats: SyncStats) -> None:
        """See `Sender.resume`."""
        self.session.resume(stats)

    def close(self) -> None:
        """Dissolve the group."""
        if live := self.session.pool.live():
            self._leave_group(Members(live, self.session))
        self.group = None

    def _send(self, weights: Weights, version: int) -> SyncStats:
        stats = SyncStats()
        members, infos, new = self.session.pause(version)
        members.all("begin the weight update", lambda engine: engine.transport.begin())
        group = self._join(members, infos, new)
        stats.lap("pause")
        proving = {url for url, info in infos.items() if "weight_digests" in Capabilities.of(info).extras}
        sender = BucketSender(members, group, version, stats, proving)
        try:
            sender.send(self.plan, weights)
        except _TornError as torn:
            self._abandon_group()
            self.session.is_torn = True
            members.fence(torn.failures)
            stats.is_whole = False
            return stats
        except UserError:
            self._abandon_group()
            raise
        finally:
            stats.lap(None)
        members.all("end the weight update", lambda engine: engine.transport.end())
        self.session.verify(members, sender.digests, version, stats)
        return stats

    def _join(self, members: Members, infos: Infos, new: set[str]) -> UpdateGroup:
        """Return the group of these members; form a new one if they differ from the last push's members."""
        urls = {engine.url for engine in members.engines}
        if self.group is None or new or urls != self._urls:
            self._leave_group(members)
            num_ranks = {url: int(info.get("tp_size") or 1) for url, info in infos.items()}
            self.group = form_group(members, num_ranks, host=self._host, backend=self._backend(infos))
            self._urls = {engine.url for engine in members.engines}
        return self.group

    def _leave_group(self, members: Members) -> None:
        """Leave the group and tell the members in it; their answers do not matter."""
        if self.group is not None:
            self._abandon_group()
            leaving = members.start("leave the weight group", lambda engine: engine.transport.leave(), only=self._urls)
            _, _ = leaving.collect()

    def _abandon_group(self) -> None:
        if self.group is not None:
            self.group.abandon()
            self.group = None

    def _backend(self, infos: Infos) -> GroupBackend:
        have_nccl = all("nccl" in Capabilities.of(info).transports for info in infos.values())
        return "nccl" if torch.cuda.is_available() and have_nccl else "gloo"


class _TornError(Exception):
    """A broadcast failed, and its engines may hold a mixture of old and new weights."""

    def __init__(self, failures: dict[str, EngineError]) -> None:
        super().__init__(failures)
        self.failures = failures  # by URL of the engines at fault


@dataclass(slots=True)
class Flight:
    """One bucket on its way."""

    replies: Replies[None]
    works: list[dist.Work]

    def has_arrived(self) -> bool:
        """Return whether all bytes are sent and all engines have replied. Raises RuntimeError if a broadcast failed."""
        while self.works and self.works[0].is_completed():
            self.works.pop(0).wait()
        return not self.works and self.replies.is_done


@dataclass(slots=True)
class BucketSender:
    """Sends the buckets of one push. Holds two at a time: one travels while the next is gathered.

    Over gloo each tensor is its own broadcast, straight from place to place: on a CPU a copy costs half as much as
    sending. Over NCCL, where a launch costs more than a copy, a bucket is packed into one buffer.
    """

    members: Members
    group: UpdateGroup
    version: int
    stats: SyncStats
    proving: Set[str]  # URLs of engines that return the digests of what they received
    digests: dict[str, str] = field(default_factory=dict)
    flight: Flight | None = None

    def send(self, plan: Sequence[Bucket], weights: Weights) -> None:
        """Send all buckets. Raises _TornError naming the engines at fault, or EngineError if none is."""
        began_at = time.monotonic()
        self.stats.seconds["gather"] = 0.0
        try:
            for bucket in plan:
                tensors = self._gather(bucket, weights)
                self._wait()
                self.flight = self._start(bucket, tensors, is_last=bucket is plan[-1])
                for spec, tensor in zip(bucket.specs, tensors, strict=True):
                    self.digests[spec.name] = digest(tensor) if self.proving else ""
            self._wait()
        finally:
            self.stats.num_tensors = len(self.digests)
            self.stats.seconds["broadcast"] = time.monotonic() - began_at - self.stats.seconds["gather"]

    def _gather(self, bucket: Bucket, weights: Weights) -> list[Tensor]:
        """Return the bucket's tensors, the next of `weights`; count the time during which the engines are idle."""
        began_at = time.monotonic()
        held = dict(itertools.islice(weights, len(bucket.specs)))
        tensors = [held[spec.name].detach().to(self.device).contiguous() for spec in bucket.specs]
        idle_since = self.flight.replies.done_at if self.flight else began_at
        if idle_since is not None:
            self.stats.seconds["gather"] += time.monotonic() - max(began_at, idle_since)
        return tensors

    def _start(self, bucket: Bucket, tensors: list[Tensor], *, is_last: bool) -> Flight:
        """Announce a bucket and start its broadcast. The last one carries the version."""
        version = self.version if is_last else None
        if self.group.backend == "nccl":
            data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            pack_bucket(bucket, tensors, data)
            tensors = [data]
        names = {spec.name for spec in bucket.specs}

        async def take(engine: Engine) -> None:
            keeps_cache = self.members.session.keeps_cache
            received = await engine.transport.take(bucket, version=version, keeps_cache=keeps_cache)
            if engine.url in self.proving and received.keys() != names:
                raise EngineError(
                    f"{engine.url} confirms the bucket with {bucket.specs[0].name}, but not that it received it: is "
                    "the engine itself answering?"
                )

        replies = self.members.start(f"take the bucket with {bucket.specs[0].name}", take)
        # Over gloo, earlier than the replies' deadline: a hung engine ends the broadcast, so the others can report it.
        timeout_s = self.members.session.timeout_s / 2
        self.stats.num_bytes += bucket.num_bytes
        self.stats.num_buckets += 1
        return Flight(replies, [self.group.broadcast(tensor, timeout_s) for tensor in tensors])

    @property
    def device(self) -> str:
        """The device that buckets are sent from."""
        return "cuda" if self.group.backend == "nccl" else "cpu"

    def _wait(self) -> None:
        """Wait until the bucket on its way has arrived; the first failure or the deadline ends the push."""
        if (flight := self.flight) is None:
            return
        problem: Exception | None = None
        try:
            while not flight.replies.failed():
                if flight.has_arrived():
                    return
                if time.monotonic() > flight.replies.deadline:
                    break
                time.sleep(_POLL_S)
        except RuntimeError as error:
            problem = error
        raise _TornError(self._break_off(flight, problem))

    def _break_off(self, flight: Flight, problem: Exception | None) -> dict[str, EngineError]:
        """Leave the group, wait for the engines' replies, and return the failures of the engines at fault.

        An engine that does not answer is at fault, even if it waits for another; one that only lost the broadcast is
        not. Failing these, engines that confirmed a bucket without proof of receiving it are at fault: the broadcast
        did not end. If all have proofs, engines that lost what others received are at fault.
        """
        self.group.abandon()
        flight.works.clear()  # over gloo each work holds the connections, and the other engines wait for these to close
        _, failures = flight.replies.collect()
        if any(refuses_sharing(str(error)) for error in (problem, *failures.values())):
            raise EngineError(
                f"the weights cannot be sent over NCCL, because the trainer and an engine, or two engines, use one GPU "
                f'({sharing_problem() or "but not for all of them"}): set sync.channel="disk", or {sharing_remedy()}'
            ) from problem
        if to_blame := {url: error for url, error in failures.items() if not isinstance(error, BroadcastLostError)}:
            return to_blame
        confirmed = {engine.url for engine in self.members.engines} - failures.keys()
        if unproven := confirmed - self.proving:
            why = "confirmed weights whose broadcast did not end: did it receive them?"
            return {url: EngineError(f"{url} {why}") for url in unproven}
        if confirmed and failures:
            return {url: EngineError(f"{error}; others received it") for url, error in failures.items()}
        lost = next(iter(failures.values()), problem or "it did not end in time, though all engines answered")
        raise EngineError(f"broadcasting the weights failed: {lost}")


def form_group(members: Members, num_ranks: Mapping[str, int], *, host: str, backend: GroupBackend) -> UpdateGroup:
    """Form a group of this process and all members that can join, under a new name.

    Engines that refuse or are late are fenced, and the others try again. A group left by a dead trainer stays unused.

    Args:
        num_ranks: number of ranks of each engine, by URL.
        host: this process's address as the engines see it.

    Raises:
        EngineError: see `Members.fence`; or the trainer itself could not join.
    """
    while True:
        formed = _try_to_form(members, {e.url: num_ranks[e.url] for e in members.engines}, host, backend)
        if isinstance(formed, UpdateGroup):
            return formed
        members.fence(formed)


def _try_to_form(
    members: Members, num_ranks: dict[str, int], host: str, backend: GroupBackend
) -> UpdateGroup | dict[str, EngineError]:
    """Hold one rendezvous. Return the group, or the failures of the engines at fault if none forms."""
    name, timeout_s = f"weights-{secrets.token_hex(8)}", members.session.timeout_s
    first_ranks = dict(zip(num_ranks, itertools.accumulate(num_ranks.values(), initial=1), strict=False))
    world_size = 1 + sum(num_ranks.values())
    server: dist.TCPStore | None = host_store(host, world_size, timeout_s)
    assert server is not None
    port = server.port
    replies = members.start(
        "join the weight group",
        lambda e: e.transport.join(GroupSeat(name, host, port, first_ranks[e.url], world_size, backend)),
    )

    def join() -> UpdateGroup:
        # With its own connection: the server's handle must be free to be dropped.
        store = connect_store(host, port, world_size, timeout_s)
        return UpdateGroup(name, store=store, rank=0, world_size=world_size, backend=backend, timeout_s=timeout_s)

    joined = in_thread("join-weight-group", join)  # joining blocks until everybody has joined
    replies.wait_until(replies.deadline, first_failure=True)
    if replies.is_done and not replies.failed():
        try:
            group = joined.result(timeout_s)
        except Exception as problem:
            raise EngineError(f"the weight group did not form: {problem}") from problem
        group.server = server
        return group
    refused = replies.failed()
    server = None  # closes the rendezvous: engines waiting in it are released, and are not at fault
    joined.add_done_callback(lambda late: None if late.exception() else late.result().close())
    replies.wait_until(time.monotonic() + RELEASE_S)
    late = replies.unanswered()
    replies.deadline = time.monotonic()
    _, failures = replies.collect()
    return {url: error for url, error in failures.items() if url in refused | late}
