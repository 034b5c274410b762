"""One process of a small group that measures a real all-reduce and broadcast, and compares clocks."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.engines.group import connect_store, host_store
from bapo_megatron.engines.processes import LOOPBACK

_REPEATS = 4
_BYTES = {"gloo": 4 * 2**20, "nccl": 256 * 2**20}


@dataclass(frozen=True, slots=True)
class Task:
    """What one process is to do."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


def probe(task: Task, output: Path) -> None:
    """Write what is found as JSON: facts about torch at once, what the group measures in their place at the end."""
    facts: dict[str, Any] = {}
    try:
        facts = _facts()
        _write(output, facts)
        _write(output, facts | _measure(task))
    except (RuntimeError, OSError, ValueError) as error:  # torch.distributed's errors are RuntimeErrors
        _write(output, facts | {"problem": (str(error).strip() or type(error).__name__).splitlines()[0]})


def _write(output: Path, result: dict[str, Any]) -> None:
    """Whole or not at all: this process may be killed at any time."""
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(output)


def _facts() -> dict[str, Any]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "num_gpus": num_gpus}
    if num_gpus:
        facts["capability"] = torch.cuda.get_device_capability()
        if dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _measure(task: Task) -> dict[str, Any]:
    use_nccl = task.backend == "nccl"
    if use_nccl:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        torch.cuda.set_device(task.local_rank)
    elif task.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    size, timeout_s = task.world_size, task.timeout_s
    store = (
        host_store(task.host, size, timeout_s, task.port)
        if task.rank == 0
        else connect_store(task.host, task.port, size, timeout_s)
    )
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(task.backend, store=store, rank=task.rank, world_size=size, timeout=timeout)
    device = torch.device("cuda" if use_nccl else "cpu")
    num_bytes, world = _BYTES[task.backend], task.world_size
    data = torch.full((num_bytes // 4,), float(task.rank), device=device)
    broadcast_s = _seconds(lambda: dist.broadcast(data, src=0), use_nccl)
    is_right = bool((data == 0).all())
    reduce_s = _seconds(lambda: dist.all_reduce(data.fill_(task.rank)), use_nccl)
    is_right = is_right and bool((data == world * (world - 1) / 2).all())
    skews_s = _clock_skews(device)
    dist.destroy_process_group()
    return {
        "is_right": is_right,
        "broadcast_bytes_per_s": num_bytes / broadcast_s,
        "all_reduce_bytes_per_s": 2 * (world - 1) / world * num_bytes / reduce_s,  # what each process sends
        "skews_s": skews_s,
    }


def _seconds(collective: Callable[[], object], use_nccl: bool) -> float:
    """Median over repeats, after one that sets up connections."""
    times = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        start_s = time.monotonic()
        collective()
        if use_nccl:
            torch.cuda.synchronize()
        times.append(time.monotonic() - start_s)
    return statistics.median(times[1:])


def _clock_skews(device: torch.device) -> list[float]:
    """Each process's clock minus that of the first, seconds; right to the time of a barrier."""
    rounds = []
    for _ in range(_REPEATS):
        dist.barrier()
        mine: Tensor = torch.tensor([time.time()], dtype=torch.float64, device=device)
        clocks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(clocks, mine)
        rounds.append([float(clock - clocks[0]) for clock in clocks])
    return [statistics.median(skews) for skews in zip(*rounds, strict=True)]
