"""bfloat16 with float32 main weights on a CPU, where a run refuses it: the optimizers and checkpoints are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.peft import WEIGHTS
from bapo_megatron.learner import megatron
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    ADAPTERS,
    BOUNDS,
    MIXTURE,
    merged_float64,
    random_batch,
    save_adapters,
    save_random_model,
)
from tests.integration.learner_updates import TOKENS, make_config

ROUNDING = 0.1  # mean difference of log-probs around -4, in nats: bfloat16 has 8 bits
LR = 1e-3
LORA: dict[str, Any] = {"rank": ADAPTERS.rank, "alpha": ADAPTERS.alpha}


def make_learner(
    folder: Path, dtype: str, *, parallel: dict[str, int], distributed: bool, lora: dict[str, Any]
) -> MegatronLearner:
    config = make_config(
        distributed=distributed,
        model={"dtype": dtype},
        optimizer={"lr": LR, "distributed": distributed},
        parallel=parallel,
        lora=lora,
    )
    return MegatronLearner(resolve(config, folder))


def check_updates(
    rank: int, world_size: int, root: Path, parallel: dict[str, int], distributed: bool, lora: dict[str, Any]
) -> None:
    """Compare two updates with float32's, and two resumed ones with the uninterrupted ones."""
    megatron.check_machine = lambda *_: None  # type: ignore[assignment]
    found: dict[str, list[Any]] = {}
    for dtype in ("float32", "bfloat16"):
        learner = make_learner(root / "model", dtype, parallel=parallel, distributed=distributed, lora=lora)
        minibatch = one_minibatch(random_batch(), max_tokens=TOKENS, share=learner.share)
        store = CheckpointStore(root / f"run-{dtype}", CheckpointConfig())
        start = {name: weight.clone() for name, weight in learner.weights().whole()}
        first = learner.step(minibatch, BOUNDS)
        store.save(1, {"learner": learner}, {})
        second = learner.step(minibatch, BOUNDS)
        end = {name: weight.clone() for name, weight in learner.weights().whole()}
        found[dtype] = [first, second]
        if rank == 0:  # the others get empty tensors
            assert {weight.dtype for weight in end.values()} == {getattr(torch, dtype)}
            changed = {name for name in end if bool((end[name] != start[name]).any())}
            assert changed == {name for name in end if not lora or name.endswith("_proj.weight")}
        parallel_state.destroy_model_parallel()

        resumed = make_learner(root / "model", dtype, parallel=parallel, distributed=distributed, lora=lora)
        assert store.resume({"learner": resumed}) is not None
        again = resumed.step(minibatch, BOUNDS)
        second.metrics.pop("optimizer/merged_share", None)  # the resumed learner has made no push
        assert again.metrics == second.metrics
        for name, weight in resumed.weights().whole():
            assert torch.equal(weight, end[name]), name
        store.close()
        parallel_state.destroy_model_parallel()
    for mine, other in zip(found["bfloat16"], found["float32"], strict=True):
        for low, high in zip(mine.log_probs, other.log_probs, strict=True):
            assert 0 < float((low - high).abs().mean()) < ROUNDING
        assert mine.metrics["optimizer/grad_norm"] == pytest.approx(other.metrics["optimizer/grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("family", "parallel", "distributed", "lora"),
    [
        pytest.param("qwen3", {"tensor": 2}, False, {}, marks=pytest.mark.slow),
        ("qwen3", {"data": 2}, True, {}),
        pytest.param("qwen3", {"tensor": 2}, True, LORA, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {"data": 2, "expert": 2}, True, {}, marks=pytest.mark.slow),
    ],
)
def test_updates_equal_float32s_up_to_rounding_and_resume_bit_for_bit(
    tmp_path: Path, family: str, parallel: dict[str, int], distributed: bool, lora: dict[str, Any]
) -> None:
    save_random_model(family, tmp_path / "model")
    run_distributed(check_updates, 2, tmp_path, parallel, distributed, lora)


def check_merging(rank: int, world_size: int, root: Path) -> None:
    megatron.check_machine = lambda *_: None  # type: ignore[assignment]
    lora = LORA | {"init_from": str(root / "adapters")}
    learner = make_learner(root / "model", "bfloat16", parallel={"tensor": 2}, distributed=False, lora=lora)
    found = {name: weight.double() for name, weight in learner.weights().whole()}
    if rank == 0:
        for name, exact in merged_float64(root / "model", root / "adapters", ADAPTERS).items():
            step = torch.exp2(exact.abs().log2().floor() - 7)  # between bfloat16's numbers next to it
            assert bool(((found[name] - exact).abs() <= 0.51 * step).all()), name


def test_merged_weights_are_those_of_float64_rounded_once(tmp_path: Path) -> None:
    save_random_model("qwen3", tmp_path / "model")
    save_adapters(tmp_path / "model", ADAPTERS, tmp_path / "adapters")
    for file in (tmp_path / "model" / "model.safetensors", tmp_path / "adapters" / WEIGHTS):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    run_distributed(check_merging, 2, tmp_path)


def test_a_run_on_a_cpu_is_refused(tmp_path: Path) -> None:
    save_random_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r'model\.dtype="bfloat16" needs a GPU; set it to "float32" on this machine'):
        MegatronLearner(resolve(make_config(model={"dtype": "bfloat16"}), tmp_path))
