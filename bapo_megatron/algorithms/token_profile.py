"""Trained tokens by their probability under the current policy: their ratios, entropy, and what clipping touches.

The data behind Figures 5 and 10 of BAPO (arXiv 2510.18927). Bin pNN holds probabilities from 0.NN to 0.NN + 0.1; the
last one includes 1.

Shape legend: R response tokens of a micro-batch, B bins, V values of a bin.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BINS = tuple(f"profile/p{b}0" for b in range(10))
MEANS = {
    "ratio": "ratio",
    "abs_log_ratio": "nats",
    "entropy": "nats",
    "clip_high_share": "share",
    "clip_low_share": "share",
}
"""What is averaged over the tokens of a bin, with its unit. A bin also has its `share` of the trained tokens."""


def token_profile_sums(
    *,
    log_probs_R: Tensor,
    ratio_R: Tensor,
    entropy_R: Tensor,
    clipped_high_R: Tensor,
    clipped_low_R: Tensor,
    mask_R: Tensor,
) -> dict[str, Tensor]:
    """Sums over the trained tokens of each bin: float32 scalars that add up over micro-batches and ranks.

    BIN_share is the number of tokens, BIN_NAME the sum of what `MEANS` names.

    Args:
        log_probs_R, entropy_R: float, nats, of the current policy.
        ratio_R: float, the ratio that the loss clips.
        clipped_high_R, clipped_low_R: bool: positive tokens over the upper bound, negative ones under the lower bound.
        mask_R: bool; others may hold anything.
    """
    log_probs_R, entropy_R = (torch.where(mask_R, x.detach(), 0.0).double() for x in (log_probs_R, entropy_R))
    ratio_R = torch.where(mask_R, ratio_R.detach(), 1.0).double()
    bin_R = (log_probs_R.exp() * len(BINS)).long().clamp(0, len(BINS) - 1)
    values = [mask_R, ratio_R, ratio_R.log().abs(), entropy_R, clipped_high_R, clipped_low_R]
    values_RV = torch.stack([value_R.double() for value_R in values], dim=1)
    cells_RB = torch.nn.functional.one_hot(bin_R, len(BINS)).double() * mask_R[:, None]
    # A product, and no scattered addition, whose order on a GPU changes from run to run.
    table_BV = (cells_RB.T @ values_RV).float()
    return {
        f"{name}_{value}": table_BV[b, v] for b, name in enumerate(BINS) for v, value in enumerate(("share", *MEANS))
    }


def bin_means(per_token: Mapping[str, float]) -> dict[str, float]:
    """Sums of `token_profile_sums`, each divided by the number of all trained tokens, as means over the tokens of the
    bin; nan where it has none. Other metrics stay as they are, as does BIN_share."""
    metrics = dict(per_token)
    for name in BINS:
        share = per_token.get(f"{name}_share")
        if share is not None:
            metrics |= {f"{name}_{v}": per_token[f"{name}_{v}"] / share if share else float("nan") for v in MEANS}
    return metrics
