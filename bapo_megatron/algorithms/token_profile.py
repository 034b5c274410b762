"""Trained tokens by their probability under the current policy: their ratios, entropy and clipping.

The data behind Figures 5 and 10 of BAPO (arXiv 2510.18927). Bin pNN holds probabilities from 0.NN to 0.NN + 0.1; the
last one includes 1.

Shape legend: R response tokens of a micro-batch, B bins, V values of a bin.
"""

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import ClippedTokenLoss

BINS = tuple(f"profile/p{b}0" for b in range(10))
MEANS = ("ratio", "abs_log_ratio", "entropy", "clip_high_share", "clip_low_share")
"""Values averaged over the tokens of a bin. A bin also has its `share` of the trained tokens."""


def token_profile_sums(tokens: ClippedTokenLoss) -> dict[str, Tensor]:
    """Sum over the trained tokens of each bin: float32 scalars that add up over micro-batches and ranks.

    BIN_share is the number of tokens, BIN_NAME the sum of a value in `MEANS`.
    """
    mask_R = tokens.mask_R
    log_probs_R = torch.where(mask_R, tokens.inputs.log_probs_R.detach(), 0.0).double()
    ratio_R = torch.where(mask_R, tokens.ratio_R, 1.0).double()
    bin_R = (log_probs_R.exp() * len(BINS)).long().clamp(0, len(BINS) - 1)
    values = [mask_R, ratio_R, ratio_R.log().abs(), tokens.entropy_R, tokens.clipped_high_R, tokens.clipped_low_R]
    values_RV = torch.stack([value_R.double() for value_R in values], dim=1)
    cells_RB = torch.nn.functional.one_hot(bin_R, len(BINS)).double() * mask_R[:, None]
    # A matrix product: on a GPU, the order of scattered additions changes from run to run.
    table_BV = (cells_RB.T @ values_RV).float()
    return {
        f"{name}_{value}": table_BV[b, v] for b, name in enumerate(BINS) for v, value in enumerate(("share", *MEANS))
    }
