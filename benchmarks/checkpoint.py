"""Ways to save and load a training state: through rank 0, by torch.save on every rank, in shards, in the background.

    python benchmarks/checkpoint.py [--layers 8] [--runs 3] [--distributed]

A random Qwen3 at TP2 x DP2, four processes on this machine. All ways take turns in one run, write the same values to
the same disk and wait for it (fsync); medians are compared. Loading reads what was just written, from the page cache.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import hf_tensors, model_shape
from bapo_megatron.hf.writer import write_safetensors
from bapo_megatron.learner.hf.convert import fill_parameters, gather_weights
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.parallel import stop_processes
from bapo_megatron.learner.split_model import PARTS

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
LAYOUT = {"tensor": 2, "data": 2}
NUM_RANKS = 4


def write_model(folder: Path, num_layers: int) -> int:
    """Write random weights; return the bytes of weights and both moments."""
    config = MODEL | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.02 for name, shape in hf_tensors(model_shape(config)).items()}
    save_file(weights, folder / "model.safetensors")
    return sum(weight.nbytes for weight in weights.values()) * len(PARTS)


# Each way saves into an existing folder and loads from it.


def save_through_rank_0(learner: MegatronLearner, folder: Path) -> None:
    """Gather every tensor to rank 0, which writes it."""
    for part in PARTS:
        named = gather_weights(learner.model, learner.shape, learner.layout, partial(learner.adam.gather, name=part))
        if learner.layout.rank == 0:
            (folder / part).mkdir()
            write_safetensors(named, folder / part)
        else:
            for _ in named:
                pass
    dist.barrier()


@torch.no_grad()
def load_from_whole_tensors(learner: MegatronLearner, folder: Path) -> None:
    for part in PARTS:

        def fill(parameter: Any, tensor: Any, part: str = part) -> None:
            learner.adam.fill(part, parameter, tensor)

        with HFReader(folder / part) as read:
            fill_parameters(learner.model, learner.shape, learner.layout, read, fill)
    dist.barrier()


def save_with_torch(learner: MegatronLearner, folder: Path) -> None:
    """Save this rank's tensors, for this layout only; data replicas save copies, unless the optimizer is split."""
    state = [{part: learner.adam._part(p, part) for part in PARTS} for p in learner.model.parameters()]
    with (folder / f"{learner.layout.rank}.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


@torch.no_grad()
def load_with_torch(learner: MegatronLearner, folder: Path) -> None:
    state = torch.load(folder / f"{learner.layout.rank}.pt", weights_only=True)
    for parameter, parts in zip(learner.model.parameters(), state, strict=True):
        for part, values in parts.items():
            if values is not None:
                learner.adam._part(parameter, part).copy_(values)  # type: ignore[union-attr]
    dist.barrier()


def save_shards(learner: MegatronLearner, folder: Path) -> None:
    CheckpointStore(folder, CheckpointConfig()).save(1, {"learner": learner}, {})


def load_shards(learner: MegatronLearner, folder: Path) -> None:
    """Check the digests of all files, then read the needed slices."""
    assert CheckpointStore(folder, CheckpointConfig()).resume({"learner": learner}) is not None
    dist.barrier()


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "through rank 0": (save_through_rank_0, load_from_whole_tensors),
    "torch.save of each rank": (save_with_torch, load_with_torch),
    "shards": (save_shards, load_shards),
}


def timed(action: Callable[[], Any]) -> float:
    """Return the slowest rank's seconds."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(rank: int, port: int, folder: Path, num_runs: int, distributed: bool) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), **address}
    torch.set_num_threads(1)
    config = Config.model_validate({"parallel": LAYOUT, "optimizer": {"distributed": distributed}})
    learner = MegatronLearner(config, folder / "model")
    seconds: dict[str, list[float]] = {}

    def note(what: str, action: Callable[[], Any]) -> None:
        seconds.setdefault(what, []).append(timed(action))

    for _ in range(num_runs):
        for name, (save, load) in WAYS.items():
            target = fresh(folder / "saved", rank)
            note(f"{name}: save", partial(save, learner, target))
            note(f"{name}: load", partial(load, learner, target))
        store = CheckpointStore(fresh(folder / "saved", rank), CheckpointConfig(asynchronous=True))
        note("shards, in the background: training waits", partial(store.save, 1, {"learner": learner}, {}))
        note("shards, in the background: until complete", store.close)
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))
    stop_processes()


def fresh(folder: Path, rank: int) -> Path:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="50 MB each, besides 100 MB of embedding")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--distributed", action="store_true", help="with a distributed optimizer")
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.dir) as name, socket.socket() as probe:
        folder = Path(name)
        (folder / "model").mkdir()
        num_bytes = write_model(folder / "model", args.layers)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.start_processes(measure, (port, folder, args.runs, args.distributed), NUM_RANKS, start_method="spawn")
        found = json.loads((folder / "seconds.json").read_text())
    print(f"{num_bytes / 1e6:.0f} MB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.runs} runs")
    for what, seconds in found.items():
        print(f"{what:<45} {statistics.median(seconds):6.2f} s  ({min(seconds):.2f} - {max(seconds):.2f})")


if __name__ == "__main__":
    main()
