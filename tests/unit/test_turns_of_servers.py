"""Turns on a card against strict servers: nobody takes a GPU that another still holds, and no call ends a server.

`Turns`, `ServerTurns`, `EnginePool`, `Session`, `HttpEngine`, `ReleasedMemory` and the lock are real. A server notes
each call that would end SGLang. At each call and between calls, a seeded world lets servers die, hang, lose calls, and
restart when the lock allows it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import types
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import ALL_MEMORY, Engine, Memory
from bapo_megatron.engines.http import RELEASED_ROUTE, HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.sglang_memory import ReleasedMemory
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import EngineError, UnreachableEngineError
from bapo_megatron.runtime import turn as turn_module
from bapo_megatron.runtime.turn import Turn
from bapo_megatron.sync.base import RankZeroChannel
from bapo_megatron.sync.disk import DiskChannel
from bapo_megatron.sync.turns import Part, Phase, ServerTurns, Turns

NAME = "model.norm.weight"
NUM_WORLDS = 500
PATIENCE = 1000  # steps of the world that something may take

OF_SERVERS: dict[Phase, frozenset[Memory]] = {
    "training": frozenset(),
    "pushing": frozenset({"weights"}),
    "sampling": ALL_MEMORY,
}

# At a call, the process ends before, within or after it, or hangs; or the call fails; or it or its answer is lost.
Fault = Literal["die before", "die within", "die after", "lose call", "lose answer", "fail", "hang"]
FAULTS: tuple[Fault, ...] = ("die before", "die within", "die after", "lose call", "lose answer", "fail", "hang")
PASSING = ("lose call", "lose answer", "fail")  # the same server has one of them per change of phase at most


class Process:
    """One process of an SGLang server, in one word each: what it holds, samples and obeys."""

    def __init__(self, world: World, server: Server) -> None:
        self.world, self.server = world, server
        self.is_alive, self.is_ready = True, False
        self.released: set[str] = set()
        self.weights: str | None = "default"  # the version in place; None once it is lost, or only partly there
        self.version = "default"
        self.is_paused = False
        self.running: dict[str, str] = {}  # requests being decoded -> version at their start
        self.waiting: list[str] = []
        self.app = ReleasedMemory(self.serve)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.pending: dict[asyncio.Task[Any], str] = {}  # calls that a client may have given up

    @property
    def held(self) -> frozenset[str]:
        return ALL_MEMORY - self.released if self.is_alive else frozenset()

    @property
    def is_hung(self) -> bool:
        return self.is_alive and not self.may_answer.is_set()

    def end(self) -> None:
        self.is_alive = False
        for task in self.pending:
            task.cancel()

    def killed_by(self, what: str) -> None:
        self.world.killings.append(f"{self.server.engine.url}: {what}")
        self.end()

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"] or b"{}")
        await self.may_answer.wait()
        reply = self.obey(scope["path"], body)
        self.world.check()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    def obey(self, path: str, body: dict[str, Any]) -> Any:
        tags = body.get("tags") or [*ALL_MEMORY]
        match path:
            case "/server_info":
                return {"enable_memory_saver": True, "model_path": "/nowhere"}
            case "/model_info":
                return {"weight_version": self.version}
            case "/pause_generation":
                self.is_paused = True
                if body["mode"] == "retract":
                    self.world.seen["retracted"] += len(self.running)
                    self.waiting += self.running
                    self.running.clear()
            case "/continue_generation":
                self.is_paused = False
            case "/release_memory_occupation":
                if self.running or not self.is_paused:
                    self.killed_by("released while busy")
                if not ALL_MEMORY.issuperset(tags) or self.released.intersection(tags):
                    self.killed_by(f"released {tags}, of which {self.released} is")
                self.released.update(tags)
                if "weights" in tags:
                    self.weights = None
            case "/resume_memory_occupation":
                if len({*tags} & self.released) < len(tags):
                    self.killed_by(f"restored {tags}, of which {self.released} is released")
                self.released.difference_update(tags)
            case "/update_weights_from_disk":
                self.touch_weights("written")
                self.weights = self.version = body["weight_version"]
                assert body["model_path"].endswith(f"/v-{self.version}")
                return {"success": True}
            case "/weights_checker":
                self.touch_weights("read")
                return {"ranks": [{"checksums": {NAME: str(self.weights)}}], "per_engine_checksum": str(self.weights)}
            case _:
                raise AssertionError(path)
        return None

    def touch_weights(self, how: str) -> None:
        if "weights" in self.released:
            self.killed_by(f"weights {how} while released")

    def decode(self, finished: bool) -> list[str]:
        """Sample a token for each request; return the versions of those that end."""
        if self.is_paused or self.is_hung or not (self.running or self.waiting):
            return []
        if self.released:
            self.killed_by(f"sampled while {self.released} is released")
        assert self.weights is not None, "sampled from lost weights"
        assert self.weights == self.version, "sampled from other weights than it says"
        self.running |= dict.fromkeys(self.waiting, self.version)
        self.waiting.clear()
        if not finished:
            return []
        ended = [self.version for _ in self.running]
        self.running.clear()
        return ended


class Server:
    """A server's processes, one after another, their supervisor, and their client."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.engine = Client(self, f"http://server-{number}")
        self.turn = Turn(world.turn_file)
        self.process = Process(world, self)
        self.process.is_ready = True
        self.lost_requests = 0
        self.has_lost_call = False  # since the last change of phase
        self.num_troubles = 0  # faults and deaths

    @property
    def is_well(self) -> bool:
        return self.process.is_alive and self.process.is_ready and not self.process.is_hung

    def supervise(self) -> None:
        """Do one step of `engines/supervisor.py`."""
        world, process = self.world, self.process
        if not process.is_alive:
            self.lost_requests += len(process.running) + len(process.waiting)
            self.turn.give()
            if self.turn.take(shared=True, is_over=lambda: True):
                self.process = Process(world, self)
                world.seen["restarted"] += 1
            else:
                world.seen["waited for its turn to restart"] += 1
        elif not process.is_ready:
            if world.random.random() < world.rate:
                self.die("ended while starting")
            elif world.random.random() < 0.5:
                process.is_ready = True
                self.turn.give()
        elif process.is_hung and world.random.random() < 0.3:
            self.recover_or_die()
        world.check()

    def recover_or_die(self) -> None:
        """Let a server that hangs answer, or kill it if it would keep memory that it was not told to release."""
        process = self.process
        late = {path for path in process.pending.values() if "memory" in path}
        if process.held <= self.world.allowed or "/release_memory_occupation" in late:
            self.world.seen["answered after a hang"] += 1
            process.may_answer.set()
        else:
            self.die("killed while it hung")

    def die(self, how: str) -> None:
        self.num_troubles += 1
        self.world.seen[how] += 1
        if self.process.released:
            self.world.seen["died while released"] += 1
        self.process.end()


class Client(HttpEngine):
    """A client whose requests reach the server's process directly."""

    def __init__(self, server: Server, url: str) -> None:
        super().__init__(url, request_timeout_s=1.0)
        self.server = server

    async def send_request(self, method: str, path: str, body: Any = None, **_: Any) -> bytes:
        server, world = self.server, self.server.world
        await world.step()
        where, process, fault = f"{self.url}{path}", server.process, world.draw(server)
        if fault == "die before":
            server.die("die before")
        if not process.is_alive or not process.is_ready or fault == "lose call":
            raise UnreachableEngineError(f"{where}: nothing there")
        if fault in ("fail", "die within") and path == "/update_weights_from_disk" and not process.is_hung:
            process.weights = None
            world.seen["torn"] += 1
        if fault == "fail":
            raise EngineError(f"{where}: HTTP 500")
        if fault in ("hang", "die within"):
            process.may_answer.clear()
        task = asyncio.ensure_future(self._ask(process, method, path, body))
        process.pending[task] = path
        task.add_done_callback(process.pending.pop)
        while not task.done() and not process.is_hung:
            await asyncio.sleep(0)
        if process.is_hung:
            for _ in range(3):  # it arrives, though nobody will hear the answer
                await asyncio.sleep(0)
        if fault in ("die within", "die after"):
            server.die(fault)
        if fault == "lose answer" or not process.is_alive or not task.done():
            raise UnreachableEngineError(f"{where}: no answer")
        await world.step()
        status, raw = task.result()
        assert status != 409 or server.num_troubles, f"{where}: a call that must be refused, without a fault before it"
        if status != 200:
            raise self._failure(where, status, raw)
        return raw

    async def _ask(self, process: Process, method: str, path: str, body: Any) -> tuple[int, bytes]:
        answers: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

        async def send(message: Any) -> None:
            answers.append(message)

        if path == RELEASED_ROUTE:
            await process.may_answer.wait()
        await process.app({"type": "http", "method": method, "path": path}, receive, send)
        return answers[0]["status"], answers[1]["body"]


class Trainer:
    """Implements `TrainerMemory` and `WeightSource`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parts: frozenset[Part] = frozenset()
        self.version = 0

    def keep(self, parts: Set[Part]) -> None:
        self.parts &= parts

    def take(self, parts: Set[Part]) -> None:
        self.parts |= parts
        self.world.check()

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec(NAME, "float32", (1,))]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        assert "weights" in self.parts, "a push reads weights on the device"
        yield NAME, torch.zeros(1)


class FolderOfOneWeight(DiskChannel):
    def _write(self, weights: Iterator[tuple[str, Tensor]], folder: Path) -> dict[str, str]:
        folder.mkdir(exist_ok=True)
        return {name: "" for name, _ in weights}


class Pool(EnginePool):
    """It remembers which engines were fenced."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.fenced: set[Engine] = set()

    def fence(self, engine: Engine, reason: str) -> None:
        self.fenced.add(engine)
        super().fence(engine, reason)


class World:
    """One run with some servers, each on a GPU that it shares with the trainer."""

    def __init__(self, seed: int, folder: Path, seen: Counter[str]) -> None:
        self.random = random.Random(seed)
        self.seen = seen
        self.rate = self.random.choice([0.0, 0.01, 0.03, 0.1])  # of faults, per call
        self.killings: list[str] = []
        self.phase: Phase = "sampling"
        self.turn_file = folder / ".turn"
        self.loop = asyncio.new_event_loop()
        self.trainer = Trainer(self)
        self.servers = [Server(self, number) for number in range(self.random.choice([1, 2, 3]))]
        self.pool = Pool([server.engine for server in self.servers])
        self.is_connected = False
        self._in_step = False
        config = SyncConfig(timeout_s=30.0)
        mode = self.random.choice(["retract", "in_place"])
        sender = FolderOfOneWeight(
            self.pool, config, self.submit, folder=folder / "weights", hf_path=folder, pause_mode=mode
        )
        self.channel = RankZeroChannel(sender)
        servers = ServerTurns(self.pool, self.submit, Turn(self.turn_file), timeout_s=30.0, startup_limit_s=1e9)
        self.turns = Turns(servers, until_saved=lambda: None, until_free=self.until_free, sign_of_life_s=30.0)
        enter = self.turns._enter

        def change(phase: Phase) -> None:
            if phase != self.phase:
                self.begin_change(phase)
            enter(phase)

        self.turns._enter = change  # type: ignore[method-assign]

    @property
    def allowed(self) -> frozenset[Memory]:
        """What a server may hold in this phase, or in the one that comes."""
        return OF_SERVERS[self.phase]

    def begin_change(self, phase: Phase) -> None:
        for server in self.servers:
            server.has_lost_call = False
            if server.process.is_hung:  # since the last phase: longer than rollout.hang_timeout_s
                server.die("killed while it hung")
        self.phase = phase

    def submit(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a call to its end, so that each seed has one order."""
        future: Future[Any] = Future()
        try:
            future.set_result(self.loop.run_until_complete(call))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def draw(self, server: Server) -> Fault | None:
        if self.random.random() >= self.rate:
            return None
        fault = self.random.choice(FAULTS)
        if fault in PASSING:
            if server.has_lost_call:
                return None
            server.has_lost_call = True
        server.num_troubles += 1
        self.seen[fault] += 1
        return fault

    def check(self) -> None:
        """Nobody has taken memory of a GPU before the other has given it."""
        assert self.killings == []
        for server in self.servers:
            held = server.process.held
            if "rest" in self.trainer.parts:
                assert not held, f"{server.engine.url} holds {held} while the trainer trains"
            elif self.trainer.parts:
                assert held <= {"weights"}, f"{server.engine.url} holds {held} while the trainer pushes"

    async def step(self) -> None:
        """Let something happen that no call of the trainer causes."""
        if self._in_step or self.random.random() < 0.5:
            return
        self._in_step = True
        server = self.random.choice(self.servers)
        match self.random.choice(["supervise", "decode", "probe", "kill"]):
            case "supervise":
                server.supervise()
            case "decode" if server.is_well:
                for version in server.process.decode(finished=self.random.random() < 0.5):
                    if version != "default":
                        self.pool.replied(server.engine)
                        self.seen["sampled"] += 1
                    else:  # as rollout/dispatch.py does
                        self.pool.fence(server.engine, "was it restarted?")
                        self.seen["found restarted"] += 1
            case "probe":
                await self.pool.probe()
            case "kill" if self.random.random() < self.rate and server.process.is_alive:
                server.die("killed")
        if server.lost_requests:
            server.lost_requests = 0
            self.pool.fence(server.engine, "requests lost")
        self._in_step = False

    def let_pass(self, *_: float) -> None:
        """Stand in for `time.sleep`."""
        self.submit(self.step()).result()

    def until(self, condition: Any, what: str) -> None:
        for _ in range(PATIENCE):
            if condition():
                return
            self.let_pass()
        raise AssertionError(f"waited in vain until {what}")

    def until_free(self, phase: Phase) -> None:
        """Stand in for machine/room.py."""

        def is_free() -> bool:
            return all(server.process.held <= OF_SERVERS[phase] for server in self.servers)

        if not is_free():
            self.seen["waited for room"] += 1
        self.until(is_free, f"the GPUs are free for {phase}")

    def push(self) -> None:
        """Push as train.py does; servers without trouble take part afterwards."""
        before = {s: (s.process, s.num_troubles, self.pool._status[s.engine.url]) for s in self.servers if s.is_well}
        with self.turns.pushing():
            sent = self.channel.send(self.trainer)  # type: ignore[arg-type]
            self.pool.fenced.clear()
        for _ in range(self.random.choice([0, 0, 100])):
            self.let_pass()
        self.channel.resume(sent)
        assert self.pool.fenced.isdisjoint(self.pool.live()), "a process that failed may have lost the weights"
        self.seen["pushed" if sent.seconds else "abandoned"] += 1
        for server, (process, num_troubles, status) in before.items():
            if status in ("live", "back") and (server.process, server.num_troubles) == (process, num_troubles):
                assert self.pool.is_live(server.engine), self.pool.describe()  # type: ignore[arg-type]
                assert (process.weights, process.is_paused) == (str(self.trainer.version), False)
                self.seen["taken back"] += status == "back"

    def ask(self, request: str) -> None:
        """Ask a live server for a sample, if there is one."""
        server = self.random.choice(self.servers)
        if self.pool.is_live(server.engine):  # type: ignore[arg-type]
            if server.is_well:
                server.process.waiting.append(request)
            else:
                self.pool.fence(server.engine, "no answer")

    def sample(self, step: int) -> bool:
        """Ask live servers for samples; False once no server is left."""
        with self.turns.sampling():
            for number in range(self.random.randrange(40)):
                if self.random.random() < 0.2:
                    self.ask(f"{step}.{number}")
                self.let_pass()
            while not self.pool.live():
                if self.pool.is_hopeless():
                    return False
                self.until(lambda: self.pool.back() or self.pool.is_hopeless(), "a server is back")
                self.seen["pushed while sampling"] += 1
                self.push()
        return True

    def run(self) -> None:
        """Take a few steps of training."""
        with self.turns.training():
            self.trainer.take({"weights", "rest"})
        self.turns.trainer = self.trainer
        with self.turns.pushing():
            rate, self.rate = self.rate, 0.0
            self.until(lambda: not any(s.process.is_hung for s in self.servers), "no server hangs")
            self.channel.connect(self.trainer)  # type: ignore[arg-type]
            self.rate, self.is_connected = rate, True
            self.push()
        for step in range(1, self.random.randrange(2, 6)):
            if not self.sample(step):
                return
            with self.turns.training():
                assert self.trainer.parts == {"weights", "rest"}
                self.trainer.version = step
            self.push()
        self.rate = 0.0  # all that are not lost take part again
        with self.turns.sampling():
            self.until(lambda: all(server.is_well for server in self.servers), "all servers run")
            self.until(lambda: "fenced" not in self.pool.describe().split(), "all are found healthy")
        with self.turns.training():
            self.trainer.version += 1
        self.push()
        left = [server for server in self.servers if server.engine not in self.pool._with_status("lost")]
        assert [server.engine for server in left] == self.pool.live()
        assert {server.process.weights for server in left} <= {str(self.trainer.version)}
        self.seen["finished"] += 1

    def close(self) -> None:
        for server in self.servers:
            server.process.end()
            server.turn.give()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


def run_worlds(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(count):
        here = folder / str(seed)
        here.mkdir()
        world = World(seed, here, seen)
        clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=world.let_pass)
        monkeypatch.setattr(turn_module, "time", clock)
        try:
            world.run()
        except EngineError as error:
            if not any(server.num_troubles for server in world.servers):
                raise AssertionError(f"seed {seed}: no server has failed") from error
            if world.is_connected and not world.pool.is_hopeless():
                raise AssertionError(f"seed {seed}: a server is left") from error
            seen["ended without a server"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            world.close()
        assert world.killings == []
    return seen


def test_no_call_ends_a_server_and_nobody_takes_what_another_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run_worlds(NUM_WORLDS, tmp_path, monkeypatch)
    rare = (
        *FAULTS,
        *("killed", "killed while it hung", "ended while starting", "died while released", "answered after a hang"),
        *("torn", "restarted", "waited for its turn to restart", "waited for room", "retracted", "sampled"),
        *("pushed", "pushed while sampling", "abandoned", "taken back", "finished", "ended without a server"),
    )
    assert not [what for what in rare if seen[what] < 5], seen
