"""bfloat16 against float32, Transformer Engine against our layers, FP8 against bfloat16. Runs: docs/status.md.

Bounds are what rounding should stay below, not measurements: e4m3 has 3 bits of mantissa, bfloat16 has 7.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.learner.precision import RECIPES
from tests.gpu.updates import Result, check_exact, gradient_cosine, log_prob_distance, needs, one_update, save_model
from tests.integration.learner_reference import load_float64, random_batch, reference_update

BF16 = "model.dtype=bfloat16"
ENGINE = "model.implementation=transformer_engine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def float32(folder: Path) -> Result:
    return one_update(folder, "model.implementation=local")


@pytest.fixture(scope="module")
def bfloat16(folder: Path) -> Result:
    """Return the update in bfloat16, by Transformer Engine if it is installed."""
    return one_update(folder, BF16)


def original_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_float32_equals_the_float64_reference(folder: Path, float32: Result) -> None:
    check_exact(float32, reference_update(load_float64(folder), random_batch()))


def test_bfloat16_is_near_float32(folder: Path, float32: Result) -> None:
    ours = one_update(folder, BF16, "model.implementation=local")
    assert log_prob_distance(ours, float32) < 0.02
    assert gradient_cosine(ours, float32) > 0.99


def test_transformer_engine_is_as_near(folder: Path, float32: Result) -> None:
    needs(folder, BF16, ENGINE)
    engine = one_update(folder, BF16, ENGINE)
    assert log_prob_distance(engine, float32) < 0.02
    assert gradient_cosine(engine, float32) > 0.99
    for name, weight in original_weights(folder).items():
        assert torch.equal(engine.exported[name], weight), name


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
def test_fp8_is_near_bfloat16(folder: Path, bfloat16: Result, recipe: str, fp8_format: str) -> None:
    settings = (BF16, f"precision.fp8={fp8_format}", f"precision.recipe={recipe}")
    needs(folder, *settings)
    fp8 = one_update(folder, *settings)
    assert 0 < log_prob_distance(fp8, bfloat16) < 0.1, "0 would say that nothing is FP8"
    assert gradient_cosine(fp8, bfloat16) > 0.95
    assert all(torch.isfinite(weight).all() for weight in fp8.updated.values())


def test_delayed_scaling_runs(folder: Path) -> None:
    """The first log-probs are coarse (scales start at 1), so only the gradient is tested, and only for being finite."""
    settings = (BF16, "precision.fp8=hybrid", "precision.recipe=delayed")
    needs(folder, *settings)
    delayed = one_update(folder, *settings)
    assert all(torch.isfinite(gradient).all() for gradient in delayed.gradients.values())


def test_bf16_layers_stay_out_of_fp8(folder: Path, bfloat16: Result) -> None:
    """With all layers left out, the numbers are the same as in bfloat16."""
    layers = "{first_last_layers_bf16=true, num_layers_at_start_in_bf16=4, num_layers_at_end_in_bf16=0}"
    settings = (BF16, "precision.fp8=hybrid", f"megatron.extra={layers}")
    needs(folder, *settings)
    assert log_prob_distance(one_update(folder, *settings), bfloat16) < 1e-3


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_parameters_export_what_bfloat16_ones_do(folder: Path, recipe: str) -> None:
    settings = (BF16, "precision.fp8=hybrid", f"precision.recipe={recipe}", "optimizer.distributed=true")
    needs(folder, *settings, "precision.fp8_params=true")
    kept, cast = one_update(folder, *settings, "precision.fp8_params=true"), one_update(folder, *settings)
    for name, weight in original_weights(folder).items():
        assert torch.equal(kept.exported[name], weight), name
    assert log_prob_distance(kept, cast) < 0.02
    for name in kept.updated:
        if name.endswith("_proj.weight"):  # a step of 1e-4 is lost when norms, which are near 1, are rounded
            assert not torch.equal(kept.updated[name], kept.exported[name]), f"no update reached {name}"


def test_triton_log_probs_in_the_learner(folder: Path, bfloat16: Result) -> None:
    triton = one_update(folder, BF16, "train.logprob_backend=triton")
    assert log_prob_distance(triton, bfloat16) < 1e-4
    assert gradient_cosine(triton, bfloat16) > 0.9999
