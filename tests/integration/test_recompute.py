"""Whatever is recomputed, loss and gradients stay the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.integration.learner_reference import HYBRID, save_random_model
from tests.integration.learner_updates import assert_close, make_config, updates

WAYS: list[dict[str, Any]] = [
    {"recompute": True},
    {"recompute": True, "recompute_layers": 1},
    {"recompute": True, "recompute_modules": ["mlp"]},
    {"recompute": True, "recompute_layers": 99},
    {"recompute": True, "recompute_modules": ["core_attn"]},
    {"recompute": True, "recompute_modules": ["core_attn", "mlp"]},
    {"recompute": True, "recompute_modules": ["mlp"], "schedule": "forwards_first"},
]


def check(
    rank: int, world_size: int, root: Path, families: list[str], ways: list[dict[str, Any]], parallel: dict[str, Any]
) -> None:
    for family in families:
        nothing, *others = [updates(make_config(parallel=parallel, train=t), root / family) for t in ({}, *ways)]
        for other in others:
            assert_close(other, nothing, rtol=0, atol=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for family in ("qwen3", "gemma", "olmo2", HYBRID):
        save_random_model(family, tmp_path / family)
    return tmp_path


def test_a_layer_and_a_part_of_each(root: Path) -> None:
    run_distributed(check, 1, root, ["qwen3"], WAYS[1:3], {})


@pytest.mark.slow
def test_one_process(root: Path) -> None:
    run_distributed(check, 1, root, ["qwen3", "gemma", "olmo2", HYBRID], WAYS, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2, "sequence": True}, {"context": 2}],
    ids=["PP2 x VPP2", "TP2 + SP", "CP2"],
)
def test_layouts(root: Path, parallel: dict[str, Any]) -> None:
    run_distributed(check, 2, root, ["qwen3"], [WAYS[0], WAYS[1], WAYS[5]], parallel)
