"""What the ranks of a layout write: together, exactly weights and moments, spread over ranks; and bad shards."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT, digest_of, read_index, seal
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.exchange import gather_weights
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.split_model import PARTS
from bapo_megatron.resolved import resolve
from tests.distributed import run_distributed
from tests.integration.layouts import Layout
from tests.integration.learner_reference import BOUNDS, random_batch, save_random_model

NORM = "model.layers.1.input_layernorm.weight"
LAST_UP = "model.layers.1.mlp.up_proj.weight"


def updated(layout: Layout, model: Path) -> MegatronLearner:
    """Return a learner after one update, so that Adam has moments."""
    learner = MegatronLearner(resolve(layout.config(), model))
    minibatch = one_minibatch(random_batch(), max_tokens=layout.max_tokens, share=learner.share)
    learner.step(minibatch, BOUNDS)
    return learner


def gathered(learner: MegatronLearner) -> dict[str, dict[str, Tensor]]:
    """Return weights and moments through rank 0, tensor by tensor; empty tensors on other ranks."""
    return {
        part: {
            name: tensor.clone()
            for name, tensor in gather_weights(
                learner.model, learner.shape, learner.layout, partial(learner.adam.gather, name=part)
            )
        }
        for part in PARTS
    }


def check_saved(rank: int, world_size: int, root: Path, layouts: list[Layout]) -> None:
    """Check that each layout saves what it holds, bit for bit, and loads what the layout before it saved."""
    before: dict[str, dict[str, Tensor]] = {}
    for number, layout in enumerate(layouts):
        learner = updated(layout, root / "model")
        store = CheckpointStore(root / "run", CheckpointConfig(asynchronous=number % 2 == 1))
        if number > 0:
            assert store.resume({"learner": learner}) is not None
            assert_equal(gathered(learner), before, rank)
            assert learner.version == 1
        before = gathered(learner)
        path = store.save(number, {"learner": learner}, {})
        for parameter in learner.model.parameters():  # training continues
            parameter.data.add_(1.0 if number % 2 else 0.0)
        store.close()
        index = read_index(path / "learner")
        index.verify()
        saved = {}
        for part in PARTS:
            with ShardReader(index, part) as read:
                saved[part] = {name: read(name) for name in before[part]}
        assert_equal(saved, before, rank)
        sizes = [
            sum(n for f, (n, _) in index.files.items() if f.startswith(f"rank-{r:05d}")) for r in range(world_size)
        ]
        assert min(sizes) > 0.2 * sum(sizes), f"{layout.title}: one rank writes nearly all: {sizes}"
        parallel_state.destroy_model_parallel()


def assert_equal(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]], rank: int) -> None:
    if rank > 0:
        return
    for part, named in want.items():
        assert got[part].keys() == named.keys()
        for name, tensor in named.items():
            assert torch.equal(got[part][name], tensor), f"{part} of {name}"
    for moment in MOMENTS:
        assert any(tensor.abs().max() > 0 for tensor in want[moment].values())


@pytest.mark.slow
def test_all_ranks_together_save_weights_and_moments_bit_for_bit(tmp_path: Path) -> None:
    save_random_model("qwen2", tmp_path / "model")
    layouts = [
        Layout("TP2", {"tensor": 2}),
        Layout("DP2", {"data": 2}),
        Layout("DP2, distributed optimizer", {"data": 2}, distributed=True),
        Layout("PP2 x VPP2", {"pipeline": 2, "virtual_pipeline": 2}),
        Layout("CP2, distributed optimizer", {"context": 2}, distributed=True),
    ]
    run_distributed(check_saved, 2, tmp_path, layouts)


def reindexed(folder: Path, change: Any) -> None:
    """Change the index, and correct the digests."""
    body = json.loads((folder / "index.json").read_text())
    del body["xxh3_128"]
    change(body)
    for file in folder.glob("*.safetensors"):
        body["files"][file.name] = [file.stat().st_size, digest_of(file)]
    (folder / "index.json").write_text(seal(body))
    state = json.loads((folder.parent / "state.json").read_text())
    state.pop("xxh3_128", None)
    state["parts"][folder.name]["index"] = digest_of(folder / "index.json")
    (folder.parent / "state.json").write_text(seal(state))


def spoil(folder: Path) -> None:
    """Write nan where only the second tensor rank reads it."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for part in PARTS:
            if (key := f"{part}/{LAST_UP}") in tensors and part == MOMENTS[1]:
                tensors[key][-1, -1] = float("nan")
                save_file(tensors, file)


def check_refused(rank: int, world_size: int, root: Path) -> None:
    """A tensor that is missing, unexpected, mis-shaped or not finite gives the same error on every rank."""
    learner = updated(Layout("TP2", {"tensor": 2}), root / "model")
    changes: list[tuple[Any, str]] = [
        (lambda body: body["tensors"][WEIGHT].pop(NORM), f"weight in .* 1 missing: {NORM}"),
        (lambda body: body["tensors"].pop(MOMENTS[0]), f"{MOMENTS[0]} in .* missing: "),
        (lambda body: body["tensors"][WEIGHT].update(stray=body["tensors"][WEIGHT][NORM]), "1 unexpected: stray"),
        (lambda body: body["tensors"].update(stray={}), "holds stray, which this model does not have"),
        (lambda body: body["tensors"][WEIGHT].update({LAST_UP: body["tensors"][WEIGHT][NORM]}), f"shape: {LAST_UP}"),
        (lambda body: body["facts"]["model"].update(num_layers=7), "another model than model.path: num_layers is 7"),
    ]
    for number, (change, message) in enumerate(changes):
        store = CheckpointStore(root / f"run-{number}", CheckpointConfig())
        path = store.save(1, {"learner": learner}, {})
        if rank == 0:
            reindexed(path / "learner", change)
        dist.barrier()
        with pytest.raises(CheckpointError, match=message):
            store.resume({"learner": learner})
    store = CheckpointStore(root / "run-nan", CheckpointConfig())
    path = store.save(1, {"learner": learner}, {})
    if rank == 0:
        spoil(path / "learner")
        reindexed(path / "learner", lambda body: None)
    dist.barrier()
    with pytest.raises(CheckpointError, match=f"{MOMENTS[1]} of {LAST_UP} in .* holds nan or infinity"):
        store.resume({"learner": learner})
    parallel_state.destroy_model_parallel()


def test_bad_tensors_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    save_random_model("qwen2", tmp_path / "model")
    run_distributed(check_refused, 2, tmp_path)
