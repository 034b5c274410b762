"""Experts on a GPU: ours in float32 against float64, Transformer Engine's grouped linears against ours, with replay.

A router in bfloat16 chooses other experts where two are nearly equal: narrow tolerances need the same recorded routes.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.updates import Result, check_exact, gradient_cosine, log_prob_distance, needs, one_update, save_model
from tests.integration.learner_reference import load_float64, random_batch, reference_update

BF16, ENGINE, LOCAL = "model.dtype=bfloat16", "model.implementation=transformer_engine", "model.implementation=local"
REPLAY = "model.replay_routes=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpu") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def replayed(folder: Path) -> Result:
    return one_update(folder, LOCAL, REPLAY)


def test_float32_equals_the_float64_reference(folder: Path) -> None:
    check_exact(one_update(folder, LOCAL), reference_update(load_float64(folder), random_batch()))


def test_replayed_routes_equal_the_float64_reference_with_the_same_experts(folder: Path, replayed: Result) -> None:
    from tests.integration.test_routes import expected_update

    want, other_share = expected_update(folder)
    check_exact(replayed, want)
    assert replayed.metrics["routes/other_share"] == pytest.approx(other_share, abs=0.01)
    assert other_share > 0.5


def test_grouped_linears_are_near(folder: Path, replayed: Result) -> None:
    needs(folder, BF16, ENGINE)
    engine = one_update(folder, BF16, ENGINE, REPLAY)
    assert log_prob_distance(engine, replayed) < 0.02
    assert gradient_cosine(engine, replayed) > 0.99
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(engine.exported[name], weight.float()), name


def test_grouped_linears_with_recomputation_are_the_same(folder: Path) -> None:
    needs(folder, BF16, ENGINE)
    kept, recomputed = (one_update(folder, BF16, ENGINE, REPLAY, f"train.recompute={x}") for x in ("false", "true"))
    assert gradient_cosine(kept, recomputed) > 0.9999


def test_routers_of_bfloat16_choose_nearly_the_same(folder: Path) -> None:
    needs(folder, BF16, ENGINE)
    engine, exact = one_update(folder, BF16, ENGINE), one_update(folder, LOCAL)
    assert log_prob_distance(engine, exact) < 0.02
    assert gradient_cosine(engine, exact) > 0.97
