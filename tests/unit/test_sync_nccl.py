"""Pushes over a group that forms without its ranks, as in NCCL, and meets them in the first broadcast, which blocks.

The process group is a stand-in inside this process; everything above it is the code that runs over NCCL.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines import update_group
from bapo_megatron.engines.base import GroupSeat
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.update_group import Launch, UpdateGroup, host_store
from bapo_megatron.engines.wire import Bucket, digest, unpack_bucket
from bapo_megatron.errors import EngineError
from bapo_megatron.sync import broadcast
from bapo_megatron.sync.broadcast import BroadcastChannel
from tests.distributed import HANG_S
from tests.unit.test_sync_channel import TIMEOUT_S, FakeLearner, ScriptedEngine, World, clock, use_clock

CPU = torch.device("cpu")


class FinishedWork(dist.Work):
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class LazyGroup:
    """Rank 0 of a group whose first broadcast returns once all ranks have entered it."""

    def __init__(self, name: str, num_ranks: int, timeout: timedelta) -> None:
        self.name, self.num_ranks, self.timeout = name, num_ranks, timeout
        self.sent: list[Tensor] = []
        self.entered: set[str] = set()
        self.is_met = threading.Event()
        self.events: list[str] = []

    def enter(self, url: str) -> None:
        self.entered.add(url)
        if len(self.entered) == self.num_ranks - 1:
            self.is_met.set()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        if not self.is_met.wait(HANG_S):
            raise RuntimeError("the broadcast blocked its caller")
        self.events.append("started")
        self.sent.append(tensors[0].clone())
        return FinishedWork()

    def abort(self) -> None:
        self.events.append("aborted")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LazyGroup]]:
    """Return the groups that were formed; all of them end with the test."""
    formed: list[LazyGroup] = []

    def new_group(world_size: int, *_: Any, group_name: str, timeout: timedelta) -> tuple[LazyGroup, None]:
        formed.append(LazyGroup(group_name, world_size, timeout))
        return formed[-1], None

    def destroy(lazy: LazyGroup) -> None:
        del distributed_c10d._world.pg_group_ranks[lazy]  # type: ignore[arg-type]
        lazy.events.append("closed")

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", new_group)
    monkeypatch.setattr(update_group.dist, "destroy_process_group", destroy)
    use_clock(monkeypatch)
    monkeypatch.setattr(broadcast.BucketSender, "device", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # otherwise the group would be gloo's
    yield formed
    for lazy in formed:
        lazy.is_met.set()
    wait_until(lambda: all("closed" in lazy.events for lazy in formed))


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


class NcclEngine(ScriptedEngine):
    """An engine that takes flat buckets, and is stuck in the first broadcast until all ranks have come."""

    groups: list[LazyGroup]

    async def server_info(self) -> dict[str, Any]:
        return await super().server_info() | {"transports": ["nccl"]}

    async def join(self, seat: GroupSeat) -> None:
        assert seat.is_flat
        self.group_name, self._num_buckets = seat.group, 0

    async def leave(self) -> None:
        pass

    async def take(self, bucket: Bucket, *, version: int | None, keeps_cache: bool) -> dict[str, str]:
        specs = bucket.specs
        index, self._num_buckets = self._num_buckets, self._num_buckets + 1
        await self.stage("first bucket" if index == 0 else "last bucket" if version is not None else "middle bucket")
        lazy = next(lazy for lazy in self.groups if lazy.name == self.group_name)
        lazy.enter(self.url)
        while len(lazy.sent) <= index:
            await (asyncio.sleep(0.001) if lazy.is_met.is_set() else clock.wait_in_vain())
        self.weights |= dict(unpack_bucket(lazy.sent[index], specs))
        if version is not None:
            self.version = str(version)
        return {spec.name: digest(self.weights[spec.name]) for spec in specs}


class NcclWorld(World):
    def __init__(self, loop: LoopThread, groups: list[LazyGroup], num_engines: int) -> None:
        self.loop = loop
        self.engines = [NcclEngine(name) for name in "abc"[:num_engines]]
        for engine in self.engines:
            engine.groups = groups
        self.pool = EnginePool(self.engines)  # type: ignore[arg-type]
        self.learner = FakeLearner()
        config = SyncConfig(bucket_mib=64 / 2**20, timeout_s=TIMEOUT_S)  # type: ignore[call-arg]
        self.channel = BroadcastChannel(self.pool, config, loop.submit)
        self.channel.connect(self.learner.manifest())

    def bring_back(self) -> None:
        for engine in self.engines:
            if not self.pool.is_live(engine):  # type: ignore[arg-type]
                engine.is_dead = False
                self.find_back(engine)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_engine_gets_every_version(loop: LoopThread, groups: list[LazyGroup], num_engines: int) -> None:
    world = NcclWorld(loop, groups, num_engines)
    for version in (1, 2, 3):
        world.learner.version = version
        world.push()
        world.assert_goes_on(*"abc"[:num_engines])
    (lazy,) = groups
    assert "aborted" not in lazy.events
    assert lazy.timeout.total_seconds() > 5 * TIMEOUT_S, "torch's watchdog ends the process, so it must not be first"
    world.channel.close()


@pytest.mark.parametrize("fault", ["refuse", "break", "die", "hang"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_engine_that_never_enters_the_first_broadcast_ends_the_push_in_time(
    loop: LoopThread, groups: list[LazyGroup], num_engines: int, fault: str
) -> None:
    """The other engine is stuck in the broadcast, and fenced with it: a blocked engine cannot be released."""
    world = NcclWorld(loop, groups, num_engines)
    world.engines[-1].faults = {"first bucket": fault}
    began_s = clock.monotonic()
    is_nobodys_fault = (num_engines, fault) == (1, "refuse")
    with pytest.raises(EngineError, match="not today") if is_nobodys_fault else contextlib.nullcontext():
        world.push()
    assert clock.monotonic() - began_s < 30 * TIMEOUT_S
    torn = groups[0]
    assert torn.events == [], "its communicator is still being made, and must be left alone"
    torn.is_met.set()  # the missing rank comes after all
    wait_until(lambda: torn.events == ["started", "aborted", "closed"])

    world.bring_back()
    world.push()
    world.assert_goes_on(*"ab"[:num_engines])
    assert len(groups) == 2
    world.channel.close()


REFUSALS = (
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize("who", ["trainer", "engines", "all"])
def test_ranks_on_one_gpu_end_the_push_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
    loop: LoopThread,
    groups: list[LazyGroup],
    num_engines: int,
    who: str,
    refusal: str,
) -> None:
    """NCCL refuses the group as its ranks meet; no engine is at fault, so none is fenced and nothing is repeated."""
    world = NcclWorld(loop, groups, num_engines)

    def broadcast_refused(lazy: LazyGroup, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work:
        raise RuntimeError(f"NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\n{refusal}")

    async def take_refused(self: NcclEngine, *_: Any, **__: Any) -> dict[str, str]:
        while who == "trainer":  # the others have the variable, and wait for it
            await clock.wait_in_vain()
        raise EngineError(f"{self.url}: HTTP 400: Failed to receive weights: ncclInvalidUsage {refusal}")

    if who != "engines":
        monkeypatch.setattr(LazyGroup, "broadcast", broadcast_refused)
    monkeypatch.setattr(NcclEngine, "take", take_refused)
    with pytest.raises(
        EngineError, match=r'use one GPU .*: set sync.channel="disk", or set NCCL_MULTI_RANK_'
    ) as caught:
        world.push()
    assert "\n" not in str(caught.value)
    assert world.pool.num_fenced == 0
    assert len(groups) == 1


def test_a_broadcast_that_fails_to_start_says_why_to_who_waits() -> None:
    def fail() -> dist.Work:
        raise RuntimeError("ncclInvalidUsage")

    launch = Launch(fail, CPU)
    launch.join()
    assert launch.is_completed()
    with pytest.raises(RuntimeError, match="ncclInvalidUsage"):
        launch.wait()


def test_a_broadcast_is_ordered_after_what_the_caller_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launching thread has its own current device and stream."""
    calls: list[tuple[str, ...]] = []
    caller = threading.current_thread().name

    def called(*what: str) -> None:
        calls.append((threading.current_thread().name, *what))

    class Event:
        def record(self, stream: str) -> None:
            called("record", stream)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            called("new stream", str(device))

        def wait_event(self, event: Event) -> None:
            called("wait for event")

    @contextlib.contextmanager
    def inside(what: str) -> Iterator[None]:
        called("enter", what)
        yield
        called("leave", what)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: inside(str(device)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: inside("stream"))

    def start() -> dist.Work:
        called("start")
        return FinishedWork()

    launch = Launch(start, torch.device("cuda", 1))
    launch.join()
    assert launch.is_completed()
    assert launch.wait()
    thread = "launch-broadcast"
    assert calls == [
        (caller, "record", "current of cuda:1"),
        (thread, "enter", "cuda:1"),
        (thread, "new stream", "cuda:1"),
        (thread, "wait for event"),
        (thread, "enter", "stream"),
        (thread, "start"),
        (thread, "leave", "stream"),
        (thread, "leave", "cuda:1"),
    ]


def test_over_gloo_a_broadcast_is_started_by_its_caller() -> None:
    name = "alone"
    alone = UpdateGroup(
        name, store=host_store("127.0.0.1", 1, HANG_S), rank=0, world_size=1, backend="gloo", timeout_s=HANG_S
    )
    work = alone.broadcast(torch.ones(3), HANG_S)
    assert not isinstance(work, Launch)
    assert work.wait()
    alone.close()
