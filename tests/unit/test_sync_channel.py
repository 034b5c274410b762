"""Pushes to scripted engines that refuse, are late, die or hold other weights, at every stage.

A group inside this process replaces the process group. The tests ask who is fenced, who continues, and with what.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import Capabilities, PauseMode
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import DIGEST, Bucket, TensorSpec, digest
from bapo_megatron.errors import BroadcastLostError, EngineError, RequestRefusedError, UnreachableEngineError
from bapo_megatron.sync import broadcast, session
from bapo_megatron.sync.base import RankZeroChannel
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.session import Members
from tests.distributed import HANG_S

TIMEOUT_S = HANG_S
NAMES = [f"w{i}" for i in range(6)]
STAGES = ["pause", "begin", "first bucket", "middle bucket", "last bucket", "end", "checksum", "resume"]


class Clock:
    """The clock of pushes, which skips the time in which all engines wait in vain."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self._num_waiting = 0

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    sleep = staticmethod(time.sleep)

    def wait(self, futures: Collection[Future[Any]], timeout_s: float, return_when: str) -> None:
        """Stand in for `concurrent.futures.wait`."""
        deadline = self.monotonic() + timeout_s
        while self.monotonic() < deadline:
            _, missing = concurrent.futures.wait(futures, 0.001, return_when)
            if not missing or (return_when == concurrent.futures.FIRST_EXCEPTION and any(map(has_failed, futures))):
                return

    async def wait_in_vain(self) -> None:
        """Skip some time if no other call is on its way."""
        self._num_waiting += 1
        try:
            for _ in range(3):  # a call that has just been submitted becomes a task in between
                await asyncio.sleep(0.001)
                if len(asyncio.all_tasks()) > self._num_waiting:
                    return
            self._skipped_s += TIMEOUT_S / 20
        finally:
            self._num_waiting -= 1


def has_failed(future: Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


clock = Clock()


class FakeGroup:
    """A group that hands every broadcast to every engine in it."""

    backend = "gloo"
    name = "fake"
    num_formed = 0

    def __init__(self, members: Members) -> None:
        self.sent: list[Tensor] = []
        self.is_abandoned = False
        for engine in members.engines:
            engine.group = self  # type: ignore[attr-defined]

    @classmethod
    def form(cls, members: Members, num_ranks: dict[str, int], **_: Any) -> FakeGroup:
        cls.num_formed += 1
        assert set(num_ranks) >= {engine.url for engine in members.engines}
        return cls(members)

    def broadcast(self, data: Tensor, timeout_s: float) -> FakeGroup:
        self.sent.append(data.clone())
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True

    def abandon(self) -> None:
        self.is_abandoned = True


class ScriptedEngine:
    """An engine that holds weights like an embedded one. `faults`: stage -> what happens there, once."""

    def __init__(self, name: str) -> None:
        self.url = f"http://{name}"
        self.faults: dict[str, str] = {}
        self.is_dead = False
        self.paused = False
        self.is_torn = False
        self.version = "default"
        self.weights = {name: torch.zeros(8) for name in NAMES}
        self.group: FakeGroup | None = None
        self.calls: list[str] = []
        self._num_taken = 0
        self._num_received: list[int] = []
        self.extras = ["weight_manifest", "weight_digests"]
        self.transport = self
        self.keeps_cache = False
        self._one_at_a_time = asyncio.Lock()

    async def stage(self, name: str) -> None:
        self.calls.append(name)
        fault = self.faults.pop(name, None)
        if fault == "die":
            self.is_dead = True
        if self.is_dead:
            raise UnreachableEngineError(f"{self.url}: connection refused")
        if fault == "refuse":
            raise RequestRefusedError(f"{self.url}: HTTP 400: not today")
        if fault == "break":
            raise EngineError(f"{self.url}: HTTP 500: out of memory")
        if fault == "lose":
            raise BroadcastLostError(f"{self.url}: HTTP 400: Failed to receive weights")
        if fault == "hang":
            while True:
                await clock.wait_in_vain()

    async def pause(self, mode: str) -> None:
        await self.stage("pause")
        self.paused = True

    async def server_info(self) -> dict[str, Any]:
        if self.is_dead:
            raise UnreachableEngineError(f"{self.url}: connection refused")
        return {
            "capabilities": self.extras,
            "transports": ["gloo"],
            "weight_version": self.version,
            "tp_size": 1,
        }

    async def manifest(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.weights.items()]

    async def begin(self) -> None:
        await self.stage("begin")
        self._num_taken = 0
        self._num_received = []

    async def take(self, bucket: Bucket, *, version: int | None, keeps_cache: bool) -> dict[str, str]:
        specs = bucket.specs
        assert keeps_cache == self.keeps_cache
        index, self._num_taken = self._num_taken, self._num_taken + 1
        stage = "first bucket" if index == 0 else "last bucket" if version is not None else "middle bucket"
        if self.faults.get(stage) == "lie":
            del self.faults[stage]
            return {}
        await self.stage(stage)
        async with self._one_at_a_time:
            await self._take(specs, version)
        return {spec.name: digest(self.weights[spec.name]) for spec in specs}

    async def _take(self, specs: Sequence[TensorSpec], version: int | None) -> None:
        assert self.group is not None
        num_before = sum(self._num_received)
        while len(self.group.sent) < num_before + len(specs):
            if self.group.is_abandoned:
                raise BroadcastLostError(f"{self.url}: HTTP 400: Failed to receive weights")
            await asyncio.sleep(0.001)
        self.is_torn = True
        self._num_received.append(len(specs))
        received = self.group.sent[num_before : num_before + len(specs)]
        for spec, tensor in zip(specs, received, strict=True):
            assert tuple(tensor.shape) == spec.shape
            self.weights[spec.name] = tensor
        if version is not None:
            self.version, self.is_torn = str(version), False

    async def end(self) -> None:
        await self.stage("end")
        if self.group is not None:
            self.group.sent.clear()

    async def leave(self) -> None:
        pass

    async def digests(self) -> dict[str, Any]:
        await self.stage("checksum")
        if self.faults.pop("weights", None):
            self.weights["w3"] = self.weights["w3"] + 1
        return {"algorithm": DIGEST, "ranks": [{"checksums": {n: digest(t) for n, t in self.weights.items()}}]}

    async def resume(self) -> None:
        await self.stage("resume")
        assert not self.is_torn, "a torn engine must not continue"
        self.paused = False

    async def health(self) -> bool:
        return not self.is_dead


class FakeLearner:
    """Six weights that all equal the version; counts how many were read."""

    def __init__(self) -> None:
        self.version = 1
        self.num_read = 0

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec(name, "float32", (8,)) for name in NAMES]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name in NAMES:
            self.num_read += 1
            yield name, torch.full((8,), float(self.version))


class World:
    def __init__(self, loop: LoopThread, num_engines: int, timeout_s: float = TIMEOUT_S) -> None:
        self.loop = loop
        self.engines = [ScriptedEngine(name) for name in "abc"[:num_engines]]
        self.pool = EnginePool(self.engines)  # type: ignore[arg-type]
        self.learner = FakeLearner()
        config = SyncConfig(bucket_mib=64 / 2**20, timeout_s=timeout_s)  # type: ignore[call-arg] - 2 weights a bucket
        self.channel = BroadcastChannel(self.pool, config, loop.submit)
        self.channel.connect(self.learner.manifest())

    def push(self) -> None:
        RankZeroChannel(self.channel).push(self.learner)  # type: ignore[arg-type]

    def find_back(self, engine: ScriptedEngine) -> None:
        """Let the pool notice that a fenced engine is healthy again."""
        self.loop.run(self.pool.probe(), HANG_S)
        assert engine in self.pool.back()

    def assert_goes_on(self, *names: str) -> None:
        """Check that these engines, and no others, hold the learner's weights and generate."""
        assert [engine.url for engine in self.pool.live()] == [f"http://{name}" for name in names]
        for engine in self.engines:
            if self.pool.is_live(engine):  # type: ignore[arg-type]
                assert (engine.version, engine.paused) == (str(self.learner.version), False)
                assert all(
                    torch.equal(t, torch.full((8,), float(self.learner.version))) for t in engine.weights.values()
                )


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def use_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session, broadcast):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(session, "wait", clock.wait)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "form_group", FakeGroup.form)
    use_clock(monkeypatch)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_engine_gets_every_version(loop: LoopThread, num_engines: int) -> None:
    world = World(loop, num_engines)
    FakeGroup.num_formed = 0
    for version in (1, 2, 3):
        world.learner.version = version
        world.push()
        world.assert_goes_on(*"abc"[:num_engines])
    assert FakeGroup.num_formed == 1, "the group is kept while its members stay"


@pytest.mark.parametrize("fault", ["refuse", "die", "hang"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_engines", [2, 3])
def test_an_engine_that_fails_is_fenced_and_the_others_go_on(
    loop: LoopThread, num_engines: int, stage: str, fault: str
) -> None:
    world = World(loop, num_engines)
    world.push()
    world.learner.version = 2
    world.engines[1].faults = {stage: fault}
    began_s, world.learner.num_read = clock.monotonic(), 0
    world.push()
    assert clock.monotonic() - began_s < (30 * TIMEOUT_S if fault == "hang" else TIMEOUT_S)
    world.assert_goes_on(*"ac"[: num_engines - 1])
    assert world.learner.num_read % len(NAMES) == 0, "gathering is collective: every pass is read to its end"
    assert "http://b is fenced" in world.pool.describe()
    if fault == "hang":
        assert f"waited {TIMEOUT_S:g} s for http://b to" in world.pool.describe()


@pytest.mark.parametrize("what", ["weights", "version"])
def test_an_engine_that_holds_something_else_never_goes_on(loop: LoopThread, what: str) -> None:
    world = World(loop, 2)
    bad = world.engines[1]
    if what == "weights":
        bad.faults = {"weights": "differ"}
    else:
        bad.server_info = _stuck_at("default", bad.server_info)  # type: ignore[method-assign]
    world.push()
    world.assert_goes_on("a")
    assert bad.paused
    assert "resume" not in bad.calls
    assert ("w3" if what == "weights" else "weight version 'default'") in world.pool.describe()


def _stuck_at(version: str, server_info: Any) -> Any:
    async def stuck() -> dict[str, Any]:
        return await server_info() | {"weight_version": version}

    return stuck


def test_an_engine_that_only_lost_the_broadcast_is_not_to_blame(loop: LoopThread) -> None:
    world = World(loop, 3)
    world.engines[0].faults = {"middle bucket": "lose"}
    world.engines[2].faults = {"middle bucket": "die"}
    world.push()
    world.assert_goes_on("a", "b")


@pytest.mark.parametrize("stage", ["first bucket", "middle bucket", "last bucket"])
@pytest.mark.parametrize("proves", [True, False])
def test_an_engine_that_confirms_what_it_did_not_receive_is_fenced_and_not_who_lost_it(
    loop: LoopThread, proves: bool, stage: str
) -> None:
    """An SGLang server gives no proof: an engine that confirms is suspected if others lost the broadcast."""
    world = World(loop, 2)
    healthy, liar = world.engines
    if not proves:
        liar.extras = ["weight_manifest"]
    healthy.faults, liar.faults = {stage: "lose"}, {stage: "lie"}
    world.push()
    world.assert_goes_on("a")
    assert re.search(r"http://b is fenced \(http://b confirm", world.pool.describe())


def test_an_engine_that_lost_what_others_prove_to_have_received_is_fenced(loop: LoopThread) -> None:
    world = World(loop, 3)
    world.engines[1].faults = {"middle bucket": "lose"}
    world.push()
    world.assert_goes_on("a", "c")
    assert "others received it" in world.pool.describe()


def test_a_broadcast_that_does_not_end_though_all_confirm_it_fences_who_has_no_proof(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(loop, 2)
    world.engines[1].extras = ["weight_manifest"]
    num_formed, wait = FakeGroup.num_formed, FakeGroup.wait

    def late(group: FakeGroup) -> bool:
        if FakeGroup.num_formed == num_formed + 1:
            raise RuntimeError("timed out waiting for send")
        return wait(group)

    monkeypatch.setattr(FakeGroup, "wait", late)
    world.push()
    world.assert_goes_on("a")
    assert "whose broadcast did not end" in world.pool.describe()


@pytest.mark.parametrize("fault", ["refuse", "lose"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_what_all_refuse_is_nobodys_fault_and_an_error(loop: LoopThread, num_engines: int, fault: str) -> None:
    world = World(loop, num_engines)
    world.push()
    for engine in world.engines:
        engine.faults = {"middle bucket": fault}
    world.learner.num_read = 0
    with pytest.raises(EngineError, match=r"not today|Failed to receive"):
        world.push()
    assert world.learner.num_read == len(NAMES)
    assert all(engine.paused for engine in world.engines)
    assert world.pool.live() == world.engines
    world.push()
    world.assert_goes_on(*"ab"[:num_engines])


@pytest.mark.parametrize("num_engines", [1, 2])
def test_engines_that_all_break_are_fenced_each_for_itself(loop: LoopThread, num_engines: int) -> None:
    world = World(loop, num_engines)
    world.push()
    for engine in world.engines:
        engine.faults = {"middle bucket": "break"}
    world.push()
    assert world.pool.live() == []
    assert world.pool.describe().count("out of memory") == num_engines


def test_no_engine_left_says_why(loop: LoopThread) -> None:
    world = World(loop, 2)
    world.engines[0].faults = {"first bucket": "die"}
    world.engines[1].faults = {"pause": "die"}
    world.push()
    assert world.pool.live() == []
    assert re.fullmatch(r"http://b is fenced \(.*\); http://a is fenced \(.*\)", world.pool.describe())

    def push_to_the_dying() -> None:
        for engine in world.engines:
            engine.faults = {"pause": "die"}
            world.pool.admit(engine)  # type: ignore[arg-type]
        world.push()

    push_to_the_dying()
    with pytest.raises(EngineError, match=r"no rollout engine is left: http://a is lost \(.*; http://b is lost \("):
        push_to_the_dying()


@pytest.mark.parametrize("stage", ["pause", "middle bucket", "end"])
def test_the_last_engine_may_fail_in_a_push_and_come_back(loop: LoopThread, stage: str) -> None:
    """The push is over for now: the next step waits for an engine, and has the weights pushed again."""
    world = World(loop, 1)
    world.push()
    world.learner.version = 2
    world.engines[0].faults = {stage: "die"}
    world.push()
    assert world.pool.live() == []
    world.engines[0].__init__("a")  # type: ignore[misc] - started again
    world.find_back(world.engines[0])
    world.push()
    world.assert_goes_on("a")


def test_an_engine_that_is_back_is_admitted_with_the_next_version_only(loop: LoopThread) -> None:
    world = World(loop, 2)
    world.push()
    doomed = world.engines[1]
    doomed.faults = {"middle bucket": "die"}
    world.learner.version = 2
    world.push()
    world.assert_goes_on("a")
    doomed.__init__("b")  # type: ignore[misc] - started again, with the weights of the beginning
    world.find_back(doomed)
    assert world.pool.live() == world.engines[:1]
    world.learner.version = 3
    world.push()
    world.assert_goes_on("a", "b")


def test_an_engine_started_again_unnoticed_gets_a_new_group(loop: LoopThread) -> None:
    world = World(loop, 2)
    world.push()
    world.engines[1].__init__("b")  # type: ignore[misc]
    FakeGroup.num_formed = 0
    world.learner.version = 2
    world.push()
    world.assert_goes_on("a", "b")
    assert FakeGroup.num_formed == 1


def test_an_engine_back_with_another_model_is_fenced_before_anything_is_sent(loop: LoopThread) -> None:
    world = World(loop, 2)
    world.push()
    other = world.engines[1]
    other.weights["w2"] = torch.zeros(9)
    world.pool.fence(other, "test")  # type: ignore[arg-type]
    world.find_back(other)
    world.learner.version = 2
    world.push()
    world.assert_goes_on("a")
    assert "w2" in world.pool.describe()
    assert other.calls.count("begin") == 1


@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_engine_that_no_push_can_bring_in_is_given_up_and_said_so(
    loop: LoopThread, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was restarted with another model, and is healthy: a run of one engine must not push forever."""
    world = World(loop, num_engines)
    world.push()
    other = world.engines[-1]
    other.weights["w2"] = torch.zeros(9)
    world.pool.fence(other, "it was started again")  # type: ignore[arg-type]
    world.find_back(other)
    world.push()
    assert "w2" in caplog.messages[-1], "reported each time"
    assert caplog.messages[-1].startswith(f"{other.url} is fenced off")
    world.find_back(other)
    if num_engines == 1:
        with pytest.raises(EngineError, match=r"no rollout engine is left: http://a is lost \(.*w2"):
            world.push()
    else:
        world.push()
        world.assert_goes_on("a")
    assert f"{other.url} is lost" in world.pool.describe()
    assert world.pool.num_fenced == 3


def test_a_flapping_engine_does_not_keep_a_push_from_ending(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back immediately and fails in every broadcast: repeated pushes leave it out."""
    world = World(loop, 2)
    flapping = world.engines[1]
    fence = world.pool.fence

    def fence_and_come_back(engine: Any, reason: str) -> None:
        fence(engine, reason)
        world.pool.replied(engine)  # otherwise it would be given up
        world.find_back(engine)

    monkeypatch.setattr(world.pool, "fence", fence_and_come_back)
    flapping.faults = {"middle bucket": "refuse"}
    world.push()
    world.assert_goes_on("a")


def test_a_learner_that_breaks_its_word_is_an_error_and_nothing_goes_on(loop: LoopThread) -> None:
    world = World(loop, 2)
    world.learner.whole = lambda: iter([("w0", torch.zeros(8)), ("w2", torch.zeros(8))])  # type: ignore
    with pytest.raises(EngineError, match=r"to send w1 .* but got w2"):
        world.push()
    assert all(engine.paused for engine in world.engines)


def test_stats_say_where_the_time_went(loop: LoopThread) -> None:
    world = World(loop, 2)
    stats = RankZeroChannel(world.channel).push(world.learner)  # type: ignore[arg-type]
    assert (stats.num_bytes, stats.num_tensors, stats.num_buckets) == (6 * 32, 6, 3)
    metrics = stats.metrics()
    stages = ["pause", "gather", "broadcast", "verify", "resume"]
    assert sorted(metrics) == sorted(
        ["sync/bytes", "sync/seconds", "sync/generation_pause_s", *(f"sync/{s}_s" for s in stages)]
    )
    assert metrics["sync/seconds"] == pytest.approx(sum(metrics[f"sync/{s}_s"] for s in stages))
    assert 0 < metrics["sync/generation_pause_s"] <= metrics["sync/seconds"]


def test_an_engine_without_the_channels_transport_is_told_by_the_settings(loop: LoopThread) -> None:
    world = World(loop, 1)
    (engine,) = world.engines
    server_info = engine.server_info

    async def disk_alone() -> dict[str, Any]:
        return await server_info() | {"transports": ["disk"]}

    engine.server_info = disk_alone  # type: ignore[method-assign]
    config = SyncConfig(timeout_s=TIMEOUT_S)  # type: ignore[call-arg]
    channel = BroadcastChannel(world.pool, config, loop.submit)
    with pytest.raises(EngineError, match=r"over disk, not over gloo or nccl: set sync\.channel to fit"):
        channel.connect(world.learner.manifest())


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_engines_pause_in_the_mode_of_the_channel(loop: LoopThread, mode: PauseMode) -> None:
    world = World(loop, 1)
    modes: list[str] = []
    pause = world.engines[0].pause

    async def noted(mode: str) -> None:
        modes.append(mode)
        await pause(mode)

    world.engines[0].pause = noted  # type: ignore[method-assign]
    world.engines[0].keeps_cache = mode == "in_place"
    config = SyncConfig(bucket_mib=64 / 2**20, timeout_s=TIMEOUT_S)  # type: ignore[call-arg]
    sender = BroadcastChannel(world.pool, config, loop.submit, pause_mode=mode)
    channel = RankZeroChannel(sender, mode)
    assert channel.pause_mode == mode
    channel.connect(world.learner)
    channel.push(world.learner)
    world.assert_goes_on("a")
    assert modes == [mode]


def test_capabilities_of_a_server_that_names_none_are_those_of_sglang() -> None:
    streams = frozenset({"sampler_top_ids", "sampler_top_logprobs"})
    assert Capabilities.of({}) == Capabilities(streams, frozenset({"gloo", "nccl", "disk"}), frozenset({"score"}))
    assert Capabilities.of({"enable_return_routed_experts": True}).streams == {"routes", *streams}
    assert Capabilities.of({"enable_memory_saver": True}).extras == {"score", "release"}
    odd = {"capabilities": 3, "transports": [None, "gloo", []], "streams": {"routes": 1}}
    assert Capabilities.of(odd) == Capabilities(frozenset(), frozenset({"gloo"}), frozenset())
    named = {"capabilities": ["release"], "transports": ["disk"], "streams": ["routes"]}
    assert Capabilities.of(named) == Capabilities(frozenset({"routes"}), frozenset({"disk"}), frozenset({"release"}))
