"""docs/measured/lora.toml: how many bfloat16 weights an adapter changes."""

import tomllib
from pathlib import Path

import pytest
import torch

FIGURES = Path(__file__).parents[2] / "docs" / "measured" / "lora.toml"
ROUNDING = tomllib.loads(FIGURES.read_text(encoding="utf-8"))["rounding"]
SIZE, RANK = 1024, 16


@pytest.mark.parametrize(
    ("relative_size", "percent"), list(zip(ROUNDING["relative_size"], ROUNDING["changed_percent"], strict=True))
)
def test_the_share_of_values_that_an_adapter_changes(relative_size: float, percent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE, SIZE, generator=generator).bfloat16()
    delta = torch.randn(SIZE, RANK, generator=generator) @ torch.randn(RANK, SIZE, generator=generator)
    delta *= relative_size * weight.float().norm() / delta.norm()
    changed = (weight.float() + delta).bfloat16() != weight
    assert 100 * changed.float().mean().item() == pytest.approx(percent, rel=0.03, abs=0.05)
