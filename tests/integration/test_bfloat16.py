"""bfloat16 with float32 main weights on a CPU, where a run refuses it: the optimizers and checkpoints are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.learner import megatron
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import BOUNDS, MIXTURE, random_batch, save_random_model
from tests.integration.learner_updates import TOKENS, make_config

ROUNDING = 0.1  # mean difference of log-probs around -4, in nats: bfloat16 has 8 bits
LR = 1e-3


def make_learner(folder: Path, dtype: str, *, parallel: dict[str, int], distributed: bool) -> MegatronLearner:
    config = make_config(
        distributed=distributed,
        model={"dtype": dtype},
        optimizer={"lr": LR, "distributed": distributed},
        parallel=parallel,
    )
    return MegatronLearner(resolve(config, folder))


def check_updates(rank: int, world_size: int, root: Path, parallel: dict[str, int], distributed: bool) -> None:
    """Compare two updates with float32's, and two resumed ones with the uninterrupted ones."""
    megatron.check_machine = lambda *_: None  # type: ignore[assignment]
    found: dict[str, list[Any]] = {}
    for dtype in ("float32", "bfloat16"):
        learner = make_learner(root / "model", dtype, parallel=parallel, distributed=distributed)
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
            assert all(bool((end[name] != start[name]).any()) for name in end), "an update changed nothing"
        parallel_state.destroy_model_parallel()

        resumed = make_learner(root / "model", dtype, parallel=parallel, distributed=distributed)
        assert store.resume({"learner": resumed}) is not None
        again = resumed.step(minibatch, BOUNDS)
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
    ("family", "parallel", "distributed"),
    [
        ("qwen3", {"tensor": 2}, False),
        ("qwen3", {"data": 2}, True),
        pytest.param(MIXTURE, {"data": 2, "expert": 2}, True, marks=pytest.mark.slow),
    ],
)
def test_updates_equal_float32s_up_to_rounding_and_resume_bit_for_bit(
    tmp_path: Path, family: str, parallel: dict[str, int], distributed: bool
) -> None:
    save_random_model(family, tmp_path / "model")
    run_distributed(check_updates, 2, tmp_path, parallel, distributed)


def test_a_run_on_a_cpu_is_refused(tmp_path: Path) -> None:
    save_random_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r'model\.dtype="bfloat16" needs a GPU; set it to "float32" on this machine'):
        MegatronLearner(resolve(make_config(model={"dtype": "bfloat16"}), tmp_path))
