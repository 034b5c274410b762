"""Weight sync against a raw broadcast of the same bytes on the same group, side by side in one run.

    python benchmarks/weight_sync.py [--engines 1] [--layers 9] [--bucket-mib 64] [--runs 7] [--channel broadcast]

Real engine processes (embedded) and the real channel, on loopback. A push pauses, gathers, packs, announces,
broadcasts, puts in place, digests on both sides, compares, and lets the engines go on. The raw broadcast sends buffers
of the buckets' sizes to the same processes on the same group, announced once; they are received and forgotten.
The two take turns; medians are compared.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines import processes
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.embedded import server
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.hf.shape import hf_tensors, model_shape
from bapo_megatron.sync.base import SyncStats
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.disk import DiskChannel

TIMEOUT_S = 120.0
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
        group = self._updater._groups[group_name]
        for work in [group.broadcast(data[:size]) for size in sizes]:  # overwriting each other: the data is not used
            work.wait()


def write_model(folder: Path, num_layers: int) -> dict[str, Tensor]:
    """Save random weights as a checkpoint and return them."""
    config = MODEL | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.02 for name, shape in hf_tensors(model_shape(config)).items()}
    save_file(weights, folder / "model.safetensors")
    return weights


def start_engines(model: Path, count: int) -> tuple[list[subprocess.Popen[bytes]], list[str]]:
    ready = [model / f"ready-{i}.json" for i in range(count)]
    command = [sys.executable, __file__, "--serve", "--model-path", str(model), "--max-context", "64"]
    command += ["--max-running", "1", "--exit-with-parent"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, "--ready-file", str(file)], stdin=subprocess.PIPE, env=environment)
        for file in ready
    ]
    for process, file in zip(started, ready, strict=True):
        processes.wait_until(file.exists, process, file, TIMEOUT_S)
    return started, [f"http://127.0.0.1:{json.loads(file.read_text())['port']}" for file in ready]


def raw_seconds(channel: BroadcastChannel, urls: list[str], loop: LoopThread, buffers: list[Tensor]) -> float:
    """Measure from the announcement until every engine has received all buffers."""
    group = channel._group
    assert group is not None
    body = {"group_name": group.name, "sizes": [data.numel() for data in buffers]}

    async def announce() -> None:
        async with aiohttp.ClientSession() as session:
            replies = await asyncio.gather(*(session.post(f"{url}/receive_raw", json=body) for url in urls))
            assert all(reply.status == 200 for reply in replies)

    began = time.perf_counter()
    announced = loop.submit(announce())
    for work in [group.broadcast(data) for data in buffers]:
        work.wait()
    announced.result(TIMEOUT_S)
    return time.perf_counter() - began


def measure(args: argparse.Namespace, folder: Path) -> None:
    weights = write_model(folder, args.layers)
    manifest = [TensorSpec.of(name, tensor) for name, tensor in weights.items()]
    started, urls = start_engines(folder, args.engines)
    loop = LoopThread()
    engines = [HttpEngine(url, request_timeout_s=TIMEOUT_S) for url in urls]
    config = SyncConfig(bucket_mib=args.bucket_mib, timeout_s=TIMEOUT_S)
    channel = BroadcastChannel(EnginePool(engines), config, loop.submit)
    disk = DiskChannel(EnginePool(engines), config, loop.submit, folder=folder / "weights", hf_path=folder)
    try:
        channel.connect(manifest)
        disk.connect(manifest)
        channel.push(iter(weights.items()), 0)  # forms the group
        buffers = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in channel._plan]
        raw: list[float] = []
        pushes: list[SyncStats] = []
        elapsed: list[float] = []
        for version in range(1, args.runs + 1):
            raw.append(raw_seconds(channel, urls, loop, buffers))
            began = time.perf_counter()
            pushes.append((disk if args.channel == "disk" else channel).push(iter(weights.items()), version))
            elapsed.append(time.perf_counter() - began)
            assert pushes[-1].is_whole
        report(args, raw, elapsed, pushes)
        channel.close()
        for engine in engines:
            loop.run(engine.close(), TIMEOUT_S)
    finally:
        loop.close()
        processes.end(started)


def report(args: argparse.Namespace, raw: list[float], elapsed: list[float], pushes: list[SyncStats]) -> None:
    gib = pushes[0].num_bytes / 2**30
    print(
        f"{pushes[0].num_bytes / 2**20:.0f} MiB in {pushes[0].num_buckets} buckets to {args.engines} engine(s), "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {args.runs} (min - max)"
    )
    for name, seconds in (("raw broadcast", raw), (f"{args.channel} push", elapsed)):
        rate = gib / statistics.median(seconds)
        spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
        print(f"{name:<16} {statistics.median(seconds):7.3f} s  ({spread})  {rate:5.2f} GiB/s")
    for stage in ("pause", "gather", "broadcast", "verify", "resume"):
        print(f"  {stage:<14} {statistics.median(p.seconds[stage] for p in pushes):7.3f} s")
    print(f"  {'gen. pause':<14} {statistics.median(p.generation_pause_s for p in pushes):7.3f} s")
    ratios = sorted(r / e for r, e in zip(raw, elapsed, strict=True))
    print(
        f"ratio of rates   {statistics.median(raw) / statistics.median(elapsed):.2f} of medians, "
        f"{statistics.median(ratios):.2f} median of pairs"
    )


def main() -> None:
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        server.Server = RawServer  # type: ignore[misc]
        server.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layers", type=int, default=9, help="38 MiB each, besides 64 MiB of embedding")
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--channel", choices=("broadcast", "disk"), default="broadcast")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
