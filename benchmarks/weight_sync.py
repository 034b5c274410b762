"""Weight sync against a raw broadcast of the same bytes on the same group, side by side in one run.

    python -m benchmarks.weight_sync [--quick]

The engine processes (embedded) and the channels are real, on loopback. A push pauses the engines, gathers, packs,
announces and broadcasts the weights, puts them in place, compares digests of both sides (unequal digests are an error),
and lets the engines continue. The raw broadcast sends buffers of the same sizes to the same processes in the same
group; it is announced once, and the engines discard what they receive. The disk channel writes files that the engines
read. Times are seconds.

The last rows push from two and four pipeline stages: tensors of later stages travel to rank 0 ahead of their bucket, or
one parameter after the other.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.embedded import server
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import plural
from bapo_megatron.hf.shape import hf_tensors, model_shape
from bapo_megatron.learner import exchange
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.sync import open_channel
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.disk import DiskChannel
from benchmarks.ranks import Ranks
from benchmarks.side_by_side import MIB, Row, Rows, main, take_turns
from tests.engine_processes import start_engines

TIMEOUT_S = 120.0
PUSH, RAW, DISK = "push", "raw broadcast of the bytes", "push over the disk"
IN_TURN = "one parameter after the other"
MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class RawServer(server.Server):
    """An engine that can also receive and discard bytes."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/receive_raw", self.receive_raw)
        return app

    async def receive_raw(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.to_thread(self._receive, body["group_name"], body["sizes"])
        return web.Response()

    def _receive(self, group_name: str, sizes: list[int]) -> None:
        data = torch.empty(max(sizes), dtype=torch.uint8)
        group = self.updater.groups[group_name]
        for work in [group.broadcast(data[:size]) for size in sizes]:  # overwriting each other: nothing uses the data
            work.wait()


def write_model(folder: Path, num_layers: int) -> dict[str, Tensor]:
    """Save random weights as a checkpoint and return them."""
    config = MODEL | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.02 for name, shape in hf_tensors(model_shape(config)).items()}
    save_file(weights, folder / "model.safetensors")
    return weights


def broadcast_raw(channel: BroadcastChannel, urls: list[str], loop: LoopThread, buffers: list[Tensor]) -> None:
    """Send the buffers to every engine, and wait until all have arrived."""
    group = channel.group
    assert group is not None
    body = {"group_name": group.name, "sizes": [data.numel() for data in buffers]}

    async def announce() -> None:
        async with aiohttp.ClientSession() as session:
            replies = await asyncio.gather(*(session.post(f"{url}/receive_raw", json=body) for url in urls))
            assert all(reply.status == 200 for reply in replies)

    announced = loop.submit(announce())
    for work in [group.broadcast(data) for data in buffers]:
        work.wait()
    announced.result(TIMEOUT_S)


@contextmanager
def ways(folder: Path, num_layers: int, num_engines: int) -> Iterator[tuple[int, dict[str, Callable[[], None]]]]:
    """Yield the size of the weights in bytes, and the ways to send them to running engines."""
    weights = write_model(folder, num_layers)
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    arguments = ("--max-running", "1", "--serve")
    started = start_engines(folder, num_engines, *arguments, model=folder, module="benchmarks.weight_sync")
    urls = [engine.url for engine in started]
    loop = LoopThread()
    engines = [HttpEngine(url, request_timeout_s=TIMEOUT_S) for url in urls]
    config = SyncConfig(timeout_s=TIMEOUT_S)
    channel = BroadcastChannel(EnginePool(engines), config, loop.submit)
    disk = DiskChannel(EnginePool(engines), config, loop.submit, folder=folder / "weights", hf_path=folder)
    version = 0

    def push(way: BroadcastChannel | DiskChannel) -> None:
        nonlocal version
        version += 1
        assert way.push(iter(weights.items()), version).is_whole

    try:
        channel.connect(manifest)
        disk.connect(manifest)
        push(channel)  # forms the group
        buffers = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in channel.plan]
        yield (
            sum(weight.nbytes for weight in weights.values()),
            {
                PUSH: lambda: push(channel),
                RAW: lambda: broadcast_raw(channel, urls, loop, buffers),
                DISK: lambda: push(disk),
            },
        )
        channel.close()
        for engine in engines:
            loop.run(engine.close(), TIMEOUT_S)
    finally:
        loop.close()
        for process in started:
            process.end()


def stages(folder: str, url: str, num_stages: int) -> Callable[[int], None]:
    """Return a push from pipeline stages to an engine, on one of their ranks."""
    config = load_config([], [f"model.path={folder}", f"parallel.pipeline={num_stages}", "sync.bucket_mib=16"])
    learner = MegatronLearner(resolve(config, Path(folder)))
    callees = None
    if dist.get_rank() == 0:
        callees = EnginePool([HttpEngine(url, request_timeout_s=TIMEOUT_S)]), LoopThread().submit
    path = Path(folder)
    channel = open_channel(config.sync, callees, channel="broadcast", folder=path / "weights", hf_path=path)
    channel.connect(learner.weights())

    def work(ahead_bytes: int) -> None:
        exchange.AHEAD_BYTES = ahead_bytes
        learner.version += 1
        sent = channel.send(learner.weights())
        assert sent.is_whole
        channel.resume(sent)

    return work


def from_stages(num_stages: int, num_layers: int, num_turns: int) -> Row:
    """Compare the two ways from stages to rank 0."""
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as name:
        folder = Path(name)
        write_model(folder, num_layers)
        (engine,) = start_engines(folder, 1, "--max-running", "1", model=folder)
        try:
            with Ranks(num_stages, stages, name, engine.url, num_stages) as work:
                sends = {"ahead": partial(work, exchange.AHEAD_BYTES), IN_TURN: partial(work, 1)}
                turns = take_turns(sends, num_turns, clock=time.perf_counter)
        finally:
            engine.end()
    return turns.row(f"push from {num_stages} stages, {num_layers} layers", IN_TURN, unit="s")


def rows(quick: bool) -> Rows:
    """Compare a push with the two other ways, with one engine and with two; then pushes from pipeline stages."""
    num_layers, num_turns = (2, 7) if quick else (9, 15)
    for num_engines in (1,) if quick else (1, 2):
        with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
            with ways(Path(folder), num_layers, num_engines) as (num_bytes, sends):
                turns = take_turns(sends, num_turns, clock=time.perf_counter)
            engines = plural(num_engines, "engine")
            for other in (RAW, DISK):
                yield turns.row(f"{num_bytes / MIB:.0f} MiB to {engines}", other, unit="s")
    for num_stages in (2,) if quick else (2, 4):
        yield from_stages(num_stages, 4 if quick else 8, num_turns)


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        server.Server = RawServer  # type: ignore[misc]
        server.main()
    else:
        main(__doc__, rows)
