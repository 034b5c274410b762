"""Which tokens raise the policy's entropy, which lower it, and which are clipped.

Tokens are classified by the Entropy-Clip Rule, and by their probability (the token profile: the data behind Figures 5
and 10 of BAPO).

For a softmax policy pi over one token, a change dz of its logits changes its entropy, to first order, by

    dH = -Cov_{y ~ pi}( log pi(y), dz(y) )

    step of length eta along             dz(y)                                    dH / eta
    the gradient of the logits           eta pi(y) (A(y) X(y) - E_pi[A X])        -Cov(log pi, pi (A X - E_pi[A X]))
    the natural gradient                 eta A(y) X(y)                            -Cov(log pi, A X)          (the rule)

with X(y) = 0 for a clipped token, which carries no gradient, and 1 for others. The second line is Eq. 6 of BAPO (arXiv
2510.18927) and, without X, the covariance of arXiv 2505.22617. The paper's own logit step is the one in the first line,
but its Eq. 6 leaves out the factor pi(y). Adam does neither to a transformer: read only the rule's sign and trend.

In training each state has one token, sampled from an older policy mu. The mean of log pi in a state is known to be -H,
so one sample suffices for the covariance: with w = pi / mu,

    E_{y ~ mu}[ w(y) (log pi(y) + H) A(y) X(y) ] = Cov_{y ~ pi}( log pi, A X )

Adding a constant to all A of a state changes nothing. The signs of log pi + H and A give the token's class: probability
`high` (above the state's typical probability, e^-H) or `low`, advantage positive or negative.

    raise entropy: positive_low, negative_high        lower entropy: positive_high, negative_low

Shape legend: R response tokens of a micro-batch, V values, C cells (ages x classes, or bins), K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN_CLASSES = ("positive_high", "positive_low", "negative_high", "negative_low")
AGES = {"age_0": 0, "age_1_3": 1, "age_4_up": 4}
"""Classes of token ages by their lowest age, in optimizer updates."""
BINS = tuple(f"profile/p{b}0" for b in range(10))
"""Bins of the token profile: pNN holds probabilities from 0.NN to 0.NN + 0.1; the last one includes 1."""
MEANS = ("ratio", "abs_log_ratio", "entropy", "clip_high_share", "clip_low_share")
"""Values averaged over the tokens of a bin. A bin also has its `share` of the trained tokens."""


def covariance_terms(log_probs_R: Tensor, entropy_R: Tensor, weight_R: Tensor, kept_advantages_R: Tensor) -> Tensor:
    """Compute w (log pi + H) A X per token; its mean over tokens estimates the rule's covariance without bias.

    Args:
        log_probs_R, entropy_R: the current policy's, float, nats.
        weight_R: float, pi / mu, where mu is the policy that sampled each token.
        kept_advantages_R: A X, float.
    """
    return weight_R * (log_probs_R + entropy_R) * kept_advantages_R


def entropy_rule_sums(
    *,
    mask_R: Tensor,
    log_probs_R: Tensor,
    entropy_R: Tensor,
    ages_R: Tensor,
    weight_R: Tensor,
    advantages_R: Tensor,
    clipped_R: Tensor,
) -> dict[str, Tensor]:
    """Sum each metric over trained tokens: float32 scalars that add up over micro-batches and ranks.

        entropy_rule/covariance[_AGE]    sum of `covariance_terms`
        entropy_rule/CLASS[_AGE]         number of tokens of a class
        entropy_rule/CLASS_clipped       number of its tokens that are clipped

    A token without advantage belongs to no class.

    Args:
        log_probs_R, entropy_R: the current policy's, float, nats; what is masked may hold anything.
        weight_R: float, pi / mu, where mu is the policy that sampled each token.
        clipped_R: bool: the token has no gradient.
    """
    counted_R = mask_R & (advantages_R != 0)
    log_probs_R = torch.where(counted_R, log_probs_R.detach(), 0.0).double()
    entropy_R = torch.where(counted_R, entropy_R, 0.0).double()
    kept_advantages_R = torch.where(counted_R & ~clipped_R, advantages_R, 0.0).double()
    weight_R = torch.where(counted_R, weight_R, 0.0).double()
    terms_R = covariance_terms(log_probs_R, entropy_R, weight_R, kept_advantages_R)

    class_R = 2 * (advantages_R < 0).long() + (log_probs_R + entropy_R < 0).long()
    starts = torch.tensor(list(AGES.values())).to(advantages_R.device, non_blocking=True)
    age_R = torch.bucketize(ages_R.clamp(min=0), starts, right=True) - 1
    num_classes = len(TOKEN_CLASSES)
    values = [counted_R, clipped_R, terms_R]
    table_C3 = _sum_by_cell(age_R * num_classes + class_R, len(AGES) * num_classes, counted_R, values)
    table_AK3 = table_C3.reshape(len(AGES), num_classes, 3)

    num_K, num_clipped_K, _ = table_AK3.sum(0).unbind(-1)
    sums = {"covariance": table_AK3[..., 2].sum()}
    sums |= {f"covariance_{age}": table_AK3[a, :, 2].sum() for a, age in enumerate(AGES)}
    for k, name in enumerate(TOKEN_CLASSES):
        sums |= {name: num_K[k], f"{name}_clipped": num_clipped_K[k]}
        sums |= {f"{name}_{age}": table_AK3[a, k, 0] for a, age in enumerate(AGES)}
    return {f"entropy_rule/{name}": value for name, value in sums.items()}


def token_profile_sums(
    *,
    mask_R: Tensor,
    log_probs_R: Tensor,
    entropy_R: Tensor,
    ratio_R: Tensor,
    clipped_high_R: Tensor,
    clipped_low_R: Tensor,
) -> dict[str, Tensor]:
    """Sum over the trained tokens of each bin: float32 scalars that add up over micro-batches and ranks.

    BIN_share is the number of tokens, and BIN_NAME the sum of a value in `MEANS`.
    """
    log_probs_R = torch.where(mask_R, log_probs_R.detach(), 0.0).double()
    ratio_R = torch.where(mask_R, ratio_R, 1.0).double()
    bin_R = (log_probs_R.exp() * len(BINS)).long().clamp(0, len(BINS) - 1)
    values = [mask_R, ratio_R, ratio_R.log().abs(), entropy_R, clipped_high_R, clipped_low_R]
    table_CV = _sum_by_cell(bin_R, len(BINS), mask_R, values)
    return {
        f"{name}_{value}": table_CV[b, v] for b, name in enumerate(BINS) for v, value in enumerate(("share", *MEANS))
    }


def _sum_by_cell(cell_R: Tensor, num_cells: int, counted_R: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Sum each value over the counted tokens of each cell: float32 [C, V]."""
    is_in_RC = cell_R[:, None] == torch.arange(num_cells, device=cell_R.device)
    cells_RC = (is_in_RC & counted_R[:, None]).double()
    values_RV = torch.stack([value_R.double() for value_R in values], dim=1)
    # A matrix product, because on a GPU the order of scattered additions changes from run to run.
    return (cells_RC.T @ values_RV).float()
