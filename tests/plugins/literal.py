"""Plain formulas, and recordings of a host's tensors, for the runs of slime, miles and Megatron-LM."""

from typing import Any

import torch
from torch import Tensor

from bapo_megatron.config.schema_loss import ClipBoundConfig

Tokens = tuple[Tensor, Tensor, Tensor]  # ratios, advantages, weights


def literal_bounds(tokens: Tokens, c: ClipBoundConfig) -> tuple[float, float]:
    """Run Algorithm 1, reading every token at every probe (the gradient's share)."""
    ratio, advantages, weights = (x.double() for x in tokens)
    lows, highs, i, j = c.low.points, c.high.points, 0, 0
    while True:
        positive = (weights * ratio * advantages)[(advantages > 0) & (ratio < highs[j])].sum()
        negative = (weights * ratio * -advantages)[(advantages < 0) & (ratio > lows[i])].sum()
        if positive / (positive + negative) >= c.rho0 * (1 - 1e-5) or i == len(lows) - 1:
            return lows[i], highs[j]
        i, j = (i, j + 1) if j < len(highs) - 1 else (i + 1, j)


def clipped(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Return PPO's loss per token."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


def as_lists(value: Any) -> Any:
    """Return tensors as lists, for JSON; seven digits are enough for float32."""
    if isinstance(value, Tensor):
        return as_lists(value.detach().tolist())
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list | tuple):
        return [as_lists(each) for each in value]
    return {key: as_lists(each) for key, each in value.items()} if isinstance(value, dict) else value
