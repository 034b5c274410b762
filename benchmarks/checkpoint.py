"""Ways to save and load training state: through rank 0, with torch.save on every rank, in shards, in the background.

    python -m benchmarks.checkpoint [--quick]

The model is a random Qwen3 at TP2 x DP2, in four processes on this machine. All ways write the same values to the same
disk and wait for it (fsync); after each load the weights must equal the saved ones. Loading reads what was just
written, from the page cache. Times are the slowest rank's seconds.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import hf_tensors, model_shape
from bapo_megatron.hf.writer import write_safetensors
from bapo_megatron.learner.exchange import fill_parameters, gather_weights
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.split_model import PARTS
from bapo_megatron.resolved import resolve
from benchmarks.ranks import Ranks
from benchmarks.side_by_side import Rows, Turns, main, same, take_turns

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
    """Write random weights; return the number of bytes of weights and both moments."""
    config = MODEL | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.02 for name, shape in hf_tensors(model_shape(config)).items()}
    save_file(weights, folder / "model.safetensors")
    return sum(weight.nbytes for weight in weights.values()) * len(PARTS)


# Each way saves into an existing folder and loads from it.


def save_through_rank_0(learner: MegatronLearner, folder: Path) -> None:
    """Gather every tensor on rank 0, which writes it."""
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
    """Save this rank's tensors, for this layout only. Data replicas save copies unless the optimizer is split."""
    state = [{part: learner.adam.part(p, part) for part in PARTS} for p in learner.model.parameters()]
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
                learner.adam.part(parameter, part).copy_(values)  # type: ignore[union-attr]
    dist.barrier()


def save_shards(learner: MegatronLearner, folder: Path) -> None:
    CheckpointStore(folder, CheckpointConfig()).save(1, {"learner": learner}, {})


def load_shards(learner: MegatronLearner, folder: Path) -> None:
    """Check the digests of all files, then read the needed slices."""
    assert CheckpointStore(folder, CheckpointConfig()).resume({"learner": learner}) is not None
    dist.barrier()


BACKGROUND, SHARDS = "shards, in the background", "shards"
RANK_0, TORCH = "every tensor through rank 0", "torch.save of what each rank holds"
WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    SHARDS: (save_shards, load_shards),
    RANK_0: (save_through_rank_0, load_from_whole_tensors),
    TORCH: (save_with_torch, load_with_torch),
}


def on_ranks(folder: Path) -> Callable[..., dict[str, Turns]]:
    return partial(
        measure, MegatronLearner(resolve(Config.model_validate({"parallel": LAYOUT}), folder / "model")), folder
    )


def measure(learner: MegatronLearner, folder: Path, num_turns: int) -> dict[str, Turns]:
    """Time saving, loading, and how long a background writer blocks training."""

    def saving(name: str) -> Callable[[], None]:
        target = folder / name

        def save() -> None:
            WAYS[name][0](learner, fresh(target, learner.layout.rank))

        return save

    def loading(name: str) -> Callable[[], float]:
        def load() -> float:
            for parameter in learner.model.parameters():
                parameter.data.zero_()
            WAYS[name][1](learner, folder / name)
            return sum(float(parameter.detach().double().sum()) for parameter in learner.model.parameters())

        return load

    saves = take_turns({name: saving(name) for name in WAYS}, num_turns, clock=together)
    loads = take_turns({name: loading(name) for name in WAYS}, num_turns, agree=same(), clock=together)
    return {"saving": saves, "loading": loads, "training waits for": background_turns(learner, folder, num_turns)}


def background_turns(learner: MegatronLearner, folder: Path, num_turns: int) -> Turns:
    """Time how long training waits for a background save, which finishes before the next turn."""
    load_before = os.getloadavg()[0]
    amounts: dict[str, list[float]] = {BACKGROUND: [], SHARDS: []}
    for _ in range(num_turns):
        for name in amounts:
            target = fresh(folder / name, learner.layout.rank)
            store = CheckpointStore(target, CheckpointConfig(asynchronous=name == BACKGROUND))
            start = together()
            store.save(1, {"learner": learner}, {})
            amounts[name].append(together() - start)
            store.close()
    return Turns(amounts, load_before, os.getloadavg()[0])


def together() -> float:
    """Wait until all ranks are here, and return the time."""
    dist.barrier()
    return time.perf_counter()


def fresh(folder: Path, rank: int) -> Path:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    return folder


def rows(quick: bool) -> Rows:
    """Compare shards with the two other ways."""
    num_layers, num_turns = (2, 3) if quick else (8, 5)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        num_bytes = write_model(folder / "model", num_layers)
        with Ranks(NUM_RANKS, on_ranks, folder) as work:
            for what, turns in work(num_turns).items():
                ours, *others = turns.amounts
                for other in others:
                    yield turns.row(f"{what} {num_bytes / 1e6:.0f} MB, {ours}", other, unit="s")


if __name__ == "__main__":
    main(__doc__, rows)
