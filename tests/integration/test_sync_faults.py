"""Weight pushes to real engine processes that are killed, stopped, restarted, or the wrong ones."""

import asyncio
import contextlib
import http.server
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.processes import reserved_ports
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import CheckpointError, EngineError
from bapo_megatron.hf.tokenizer import check_tokenizer
from bapo_megatron.sync import broadcast, open_channel
from bapo_megatron.sync.base import Channel, SyncStats
from tests.distributed import HANG_S
from tests.engine_processes import EngineProcess, start_engines, started_engines
from tests.integration.nursery import stop
from tests.integration.vain import NEVER_S, Vain

BUCKET_MIB = 0.25
GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))  # adjacent, and of the same size
REQUEST = GenerateRequest("ask", (3, 4, 5), 8, 1.0, (), 1)


class Learner:
    """The demo's weights, scaled as the test likes; a test may act while they are gathered."""

    def __init__(self) -> None:
        self.version = 0
        self.weights = load_file(next(demo_model_path().glob("*.safetensors")))
        self.while_gathering: Callable[[int], None] = lambda index: None
        self.num_read = 0

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec.of(name, tensor) for name, tensor in self.weights.items()]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for index, (name, tensor) in enumerate(self.weights.items()):
            self.while_gathering(index)
            self.num_read += 1
            yield name, tensor

    def step(self) -> None:
        self.version += 1
        self.weights = {name: tensor * 1.01 for name, tensor in self.weights.items()}


class World:
    """Some engines, their pool, a channel and a learner."""

    def __init__(self, processes: list[EngineProcess], folder: Path, channel: str, vain: Vain) -> None:
        self.processes = processes
        self.vain = vain
        self.loop = LoopThread()
        self.engines = [HttpEngine(p.url, request_timeout_s=HANG_S) for p in processes]
        self.pool = EnginePool(self.engines)
        self.learner = Learner()
        config = SyncConfig(bucket_mib=BUCKET_MIB, timeout_s=NEVER_S)  # type: ignore[call-arg]
        self.channel: Channel = open_channel(
            config,
            (self.pool, self.loop.submit),
            channel=channel,  # type: ignore[arg-type]
            folder=folder / "weights",
            hf_path=demo_model_path(),
        )
        self.channel.connect(self.learner)

    def push(self) -> SyncStats:
        self.learner.step()
        return self.channel.push(self.learner)

    def ask(self, engine: HttpEngine) -> GenerateResult:
        return self.loop.run(engine.generate(REQUEST), HANG_S)

    def assert_live(self, *indices: int) -> None:
        """Check that only these engines are asked, and that they answer with the learner's version."""
        assert self.pool.live() == [self.engines[i] for i in indices]
        answers = {self.ask(self.engines[i]).behaviour_logprobs.tobytes() for i in indices}
        assert len(answers) == 1, "the same seed and weights give the same answer"
        for i in indices:
            assert {span.version for span in self.ask(self.engines[i]).spans} == {self.learner.version}

    def hang(self, index: int) -> None:
        """Stop an engine between two buckets, so that only deadlines end the push."""
        self.vain.settle()
        stop(self.processes[index].process.pid)
        self.vain.begin(self.engines[index].url)

    def wait_until_back(self) -> None:
        watching = self.loop.submit(self.pool.watch())
        deadline = time.monotonic() + HANG_S
        while not self.pool.back():
            assert time.monotonic() < deadline, f"not back: {self.pool.describe()}"
            time.sleep(0.05)
        watching.cancel()

    def close(self) -> None:
        self.channel.close()
        for engine in self.engines:
            self.loop.run(engine.close(), HANG_S)
        self.loop.close()
        for process in self.processes:
            process.process.send_signal(signal.SIGCONT)
            process.end()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def build(num_engines: int = 2, channel: str = "broadcast") -> World:
            vain = Vain(tmp_path, monkeypatch)
            ports = stack.enter_context(reserved_ports(num_engines))  # also while no engine listens
            world = World(start(tmp_path / "engines", ports), tmp_path, channel, vain)
            stack.callback(world.close)
            return world

        yield build


def start(folder: Path, ports: Sequence[int]) -> list[EngineProcess]:
    update = ("--update-timeout-s", str(NEVER_S))
    return start_engines(folder, len(ports), *update, ports=ports, module="tests.integration.vain")


def restart(world: World, index: int, folder: Path) -> None:
    """Start a new process on the old port, with the initial weights."""
    port = world.processes[index].url.rsplit(":", 1)[1]
    (world.processes[index],) = start(folder / "again", [int(port)])
    assert world.processes[index].url == world.engines[index].url


@pytest.mark.parametrize("channel", ["broadcast", pytest.param("disk", marks=pytest.mark.slow)])
def test_killed_engines_are_fenced_and_admitted_again_with_verified_weights(
    make: Callable[..., World], tmp_path: Path, channel: str
) -> None:
    world = make(2, channel)
    world.push()
    world.assert_live(0, 1)

    world.processes[1].end()
    world.push()
    world.assert_live(0)

    restart(world, 1, tmp_path)
    world.wait_until_back()
    assert world.pool.live() == world.engines[:1]
    assert world.loop.run(world.engines[1].server_info(), HANG_S)["weight_version"] == "0"
    world.push()
    world.assert_live(0, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_engines", "index"), [(2, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (3, 1)))]
)
def test_an_engine_that_ends_or_hangs_in_a_push_tears_it_for_nobody_else(
    make: Callable[..., World], number: signal.Signals, num_engines: int, index: int
) -> None:
    """With three engines, the broadcast breaks off before another engine was sent anything."""
    world = make(num_engines)
    world.push()
    middle = len(world.learner.weights) // 2
    others = [i for i in range(num_engines) if i != index]

    def strike(position: int) -> None:
        if position == middle and world.pool.is_live(world.engines[index]):
            world.hang(index) if number == signal.SIGSTOP else world.processes[index].process.kill()

    world.learner.while_gathering = strike
    world.learner.num_read = 0
    world.push()
    assert world.learner.num_read == 2 * len(world.learner.weights), "broken off, read to its end, and repeated"
    world.assert_live(*others)
    world.learner.while_gathering = lambda position: None
    if number == signal.SIGKILL:
        assert world.engines[index].url in world.pool.describe()
    else:
        assert f"waited {NEVER_S:g} s for {world.engines[index].url} to take the bucket" in world.pool.describe()
    if number == signal.SIGSTOP:  # the torn engine continues: it answers its health check, and gets all weights
        world.processes[index].process.send_signal(signal.SIGCONT)
        world.wait_until_back()
        world.push()
        world.assert_live(*range(num_engines))


@pytest.mark.slow
def test_who_waits_for_a_hung_member_gets_out_of_the_torn_group_and_takes_part_again(
    make: Callable[..., World],
) -> None:
    """gloo sends along a tree: the third engine receives from the first one, which hangs."""
    world = make(3)
    world.push()
    world.learner.while_gathering = lambda i: world.hang(0) if i == 5 and len(world.pool.live()) == 3 else None
    world.push()
    world.assert_live(1, 2)
    assert world.engines[0].url in world.pool.describe()


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("reply", ['{"success": true, "message": "Success"}', '{"success": false}'])
def test_an_engine_that_confirms_weights_which_it_did_not_receive_is_fenced(
    make: Callable[..., World], reply: str, bucket: int
) -> None:
    """With a proxy or half-dead server, the healthy engine's broadcast fails; the run must continue with that one."""
    world = make(2)
    world.push()
    healthy, liar = world.engines
    send, num_taken = liar.send_request, 0

    async def lie(method: str, path: str, *arguments: Any, **options: Any) -> bytes:
        nonlocal num_taken
        if path == "/update_weights_from_distributed":
            num_taken += 1
            if num_taken == bucket + 1:
                return reply.encode()
        return await send(method, path, *arguments, **options)

    def before_the_lie(position: int) -> None:
        world.vain.settle()
        if num_taken == bucket:
            world.vain.begin()

    liar.send_request = lie  # type: ignore[method-assign]
    world.learner.while_gathering = before_the_lie
    world.push()
    world.assert_live(0)
    assert healthy.url not in world.pool.describe()
    world.wait_until_back()
    world.push()
    world.assert_live(0, 1)


def test_an_engine_that_cannot_join_does_not_hold_up_the_others(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine is released, even if it enters a cancelled rendezvous: no deadline passes here."""
    monkeypatch.setattr(broadcast, "RELEASE_S", HANG_S)
    world = make(2)

    async def refuse(*_: Any) -> None:
        raise EngineError(f"{world.engines[1].url}: HTTP 400: no more groups")

    world.engines[1].transport.join = refuse  # type: ignore[method-assign]
    world.push()
    world.assert_live(0)
    assert "no more groups" in world.pool.describe()


def test_a_late_announcement_is_not_overtaken_by_the_next(make: Callable[..., World]) -> None:
    """Broadcasts have no names: two buckets of one size could each end in the other's place.

    The third engine is the last in gloo's tree: the trainer has sent everything before this engine wants it.
    """
    world = make(3)
    sizes = [spec.num_bytes for spec in world.learner.manifest() if spec.name in (GATE, UP)]
    assert sizes == [BUCKET_MIB * 2**20] * 2, "a bucket each"
    last = world.engines[2]
    send, let_go, log = last.send_request, threading.Event(), []

    async def hold_back_the_first(method: str, path: str, body: Any = None, **options: Any) -> bytes:
        name = next((n for n in (GATE, UP) if n in (body or {}).get("names", ())), None)
        log.append(name)
        if name == UP:
            let_go.set()
        elif name == GATE:
            assert await asyncio.to_thread(let_go.wait, HANG_S)
        reply = await send(method, path, body, **options)
        log.append(name)
        return reply

    def poll(seconds: float) -> None:
        """Release the first announcement once only its reply is awaited."""
        if GATE in log and (flight := world.vain.flight) and not flight.works:
            let_go.set()
        time.sleep(seconds)

    last.send_request = hold_back_the_first  # type: ignore[method-assign, assignment]
    world.vain.sleep = poll  # type: ignore[method-assign]
    world.push()
    world.assert_live(0, 1, 2)
    assert [name for name in log if name] == [GATE, GATE, UP, UP], "announced and confirmed, one after the other"


# the handshake


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with started_engines(tmp_path_factory.mktemp("engine"), 1) as (process,):
        yield process


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def connect(url: str, specs: list[TensorSpec], loop: LoopThread, folder: Path, channel: str = "broadcast") -> None:
    engine = HttpEngine(url, request_timeout_s=HANG_S)
    config = SyncConfig(timeout_s=HANG_S)  # type: ignore[call-arg]
    learner = Learner()
    learner.manifest = lambda: specs  # type: ignore[method-assign]
    engines = EnginePool([engine]), loop.submit
    try:
        open_channel(config, engines, channel=channel, folder=folder, hf_path=demo_model_path()).connect(learner)  # type: ignore[arg-type]
    finally:
        loop.run(engine.close(), HANG_S)


def with_spec(specs: list[TensorSpec], which: str, **changes: Any) -> list[TensorSpec]:
    fields = {"name", "dtype", "shape"}
    return [TensorSpec(**{f: changes.get(f, getattr(s, f)) for f in fields}) if s.name == which else s for s in specs]


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("channel", ["broadcast", "disk"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: with_spec(s, NORM, name="model.final.weight"), r"it has no weight 'model\.final\.weight'"),
        (lambda s: [x for x in s if x.name != NORM], rf"the policy has no weight '{NORM}'"),
        (
            lambda s: with_spec(s, NORM, shape=(7,)),
            rf"it has {NORM} float32 \[\d+\], the policy has {NORM} float32 \[7\]",
        ),
        (lambda s: with_spec(s, NORM, dtype="bfloat16"), rf"it has {NORM} float32 .* the policy has {NORM} bfloat16"),
        (lambda s: with_spec(s, EMBEDDING, shape=(999, 4)), r"its vocabulary has \d+ tokens, the policy's 999"),
    ],
    ids=["unknown name", "missing name", "shape", "dtype", "vocabulary"],
)
def test_another_model_is_one_clear_error(
    engine: EngineProcess, loop: LoopThread, tmp_path: Path, change: Any, message: str, channel: str
) -> None:
    specs = change(Learner().manifest())
    with pytest.raises(EngineError, match=message) as raised:
        connect(engine.url, specs, loop, tmp_path, channel)
    assert engine.url in str(raised.value)
    assert "\n" not in str(raised.value)
    connect(engine.url, Learner().manifest(), loop, tmp_path, channel)


def test_nobody_at_the_url(loop: LoopThread, tmp_path: Path) -> None:
    with reserved_ports(1) as (port,), pytest.raises(EngineError, match=rf":{port}/.*is the server running\?"):
        connect(f"http://127.0.0.1:{port}", Learner().manifest(), loop, tmp_path)


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>hello</html>"), (200, b"[1, 2]"), (404, b"not here")])
def test_something_else_at_the_url(loop: LoopThread, tmp_path: Path, status: int, body: bytes) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.raises(EngineError, match=r"HTTP 404" if status == 404 else r"is the URL right\?") as raised:
            connect(url, Learner().manifest(), loop, tmp_path)
        assert url in str(raised.value)
    finally:
        server.shutdown()
        server.server_close()


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_named() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    check_tokenizer(tokenizer, vocab_size)
    with pytest.raises(CheckpointError, match=rf"has id {vocab_size - 1}, .* vocabulary has {vocab_size - 1}"):
        check_tokenizer(tokenizer, vocab_size - 1)


def test_an_engine_that_is_torn_samples_nothing_until_a_whole_push(make: Callable[..., World]) -> None:
    """This holds even if someone resumes it by mistake."""
    world = make(1)
    world.push()
    engine = world.engines[0]
    before = world.ask(engine)
    world.learner.weights = {n: torch.cat([t, t]) if n == NORM else t for n, t in world.learner.weights.items()}
    with pytest.raises(EngineError):
        world.push()  # the stream no longer matches the manifest
    world.loop.run(engine.resume(), HANG_S)
    asking = world.loop.submit(engine.generate(REQUEST))
    deadline = time.monotonic() + HANG_S
    while not (waiting := world.loop.run(engine.server_info(), HANG_S)["num_waiting_reqs"]):
        assert not asking.done()
        assert time.monotonic() < deadline
    for _ in range(3):  # the engine's thread answers each call between two steps
        info = world.loop.run(engine.server_info(), HANG_S)
        assert (info["num_waiting_reqs"], info["num_running_reqs"], asking.done()) == (waiting, 0, False)
    world.learner = Learner()
    world.learner.step()
    world.push()
    after = asking.result(HANG_S)
    assert {span.version for span in after.spans} == {2}
    assert after.behaviour_logprobs.tolist() != before.behaviour_logprobs.tolist()
