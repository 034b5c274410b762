"""LoRA on Megatron's layers against `peft` on transformers, in every layout."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.hf.adapters import PEFT_PREFIX, Adapters
from bapo_megatron.hf.peft import adapter_tensors, write_peft
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import Resolved, resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    BOUNDS,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_learner import make_config, make_minibatch

ADAPTERS = Adapters(4, 8.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
SOME = Adapters(3, 5.0, ("q_proj", "v_proj", "down_proj"))
CASES = {"qwen2": ADAPTERS, "qwen3": SOME, "llama_biases": ADAPTERS}
RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"recompute": True, "recompute_layers": 1},
    {"recompute": True, "recompute_modules": ["core_attn", "mlp"]},
]
LAYOUTS: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "distributed": True, "overlap_communication": True},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2},
]
TOLERANCE = 1e-5


def save_adapters(model: Path, adapters: Adapters, folder: Path) -> None:
    """Save random adapters, B too, so that every gradient is other than zero."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = adapter_tensors(model_shape(load_hf_config(model)).with_adapters(adapters))
    named = [(name, 0.1 * torch.randn(size, generator=generator)) for name, size in tensors.items()]
    write_peft(folder, named, adapters, str(model))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for family, adapters in CASES.items():
        save_random_model(family, root / family)
        save_adapters(root / family, adapters, root / f"{family}-adapters")
        model = peft.PeftModel.from_pretrained(
            load_float64(root / family), root / f"{family}-adapters", is_trainable=True
        )
        model.double()
        found = reference_update(model, random_batch())
        gradients = {name.removeprefix(PEFT_PREFIX).replace(".default", ""): g for name, g in found.gradients.items()}
        torch.save((gradients, found.grad_norm, found.log_probs_T), root / f"{family}.pt")
    return root


def resolved(root: Path, family: str, layout: dict[str, Any], *, init: bool = True, **train: Any) -> Resolved:
    config, adapters = make_config(layout, **train), CASES[family]
    lora = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": adapters.targets}
    lora |= {"init_from": str(root / f"{family}-adapters")} if init else {}
    return resolve(type(config).model_validate(config.model_dump() | {"lora": lora}), root / family)


def difference(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_gradients(rank: int, world_size: int, root: Path) -> None:
    for family in CASES:
        gradients, norm, _ = torch.load(root / f"{family}.pt")
        for layout in LAYOUTS:
            for train in RECOMPUTE if family == "qwen2" else RECOMPUTE[:2]:
                if layout.get("virtual_pipeline") and "recompute_layers" in train:
                    continue
                learner = MegatronLearner(resolved(root, family, layout, **train))
                result = learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
                found = dict(learner.named_gradients())
                if rank == 0:
                    what = f"{family} {layout} {train}"
                    assert found.keys() == gradients.keys(), what
                    worst = max((difference(found[name], g), name) for name, g in gradients.items())
                    assert worst[0] < TOLERANCE, (what, worst)
                    assert abs(result.metrics["optimizer/grad_norm"] - norm) < TOLERANCE * norm, what
                parallel_state.destroy_model_parallel()


def test_gradients_are_those_of_peft(root: Path) -> None:
    run_distributed(check_gradients, 2, root)
