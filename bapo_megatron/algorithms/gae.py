"""Advantages of single tokens from a critic's values: generalized advantage estimation and n-step returns.

V_t is the value of the state in which token t is sampled: the prompt and the response before t. With the temporal
difference error d_t = r_t + gamma V_{t+1} - V_t,

    gae      A_t = sum_k (gamma lam)^k d_{t+k}                        arXiv 1506.02438, Eq. 16
    n_step   A_t = sum_{k<n} gamma^k d_{t+k}
                 = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n} - V_t

Only sampled tokens count: tokens given in between add nothing, and V_{t+1} is the value before the next sampled token.
The reward comes with the last token, and V is 0 after it, for truncated responses too: their reward and
reward.overlong_penalty judge them as they are. PPO implementations for language models do the same, because a value
after the last token would promise the reward of an ending that the response never reached.

The critic learns to predict A_t + V_t. Tokens of an older policy are treated as the current policy's: stale samples
bias the values as they do in PPO with several epochs.

Shape legend: R sampled tokens, one sequence after the other; T all tokens, including given ones; S sequences.
"""

import torch
from torch import Tensor

from bapo_megatron.algorithms.advantages import has_spread

_EPSILON = 1e-8  # added to the standard deviation that advantages are divided by


def gae(td_errors_R: Tensor, num_left_R: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Compute generalized advantage estimates: lam = 0 gives the TD error, lam = 1 the whole return minus V_t."""
    return discounted_sums(td_errors_R, num_left_R, gamma * lam, max(1, int(num_left_R.max())))


def n_step(td_errors_R: Tensor, num_left_R: Tensor, *, gamma: float, num_steps: int) -> Tensor:
    """Compute advantages of n-step returns; near the end of the response, the whole return minus V_t."""
    return discounted_sums(td_errors_R, num_left_R, gamma, min(num_steps, max(1, int(num_left_R.max()))))


def td_errors(rewards_S: Tensor, values_R: Tensor, num_sampled_S: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute the TD errors of sampled tokens, and the number of sampled tokens left in each one's sequence.

    Args:
        rewards_S: each sequence's reward, which comes with its last token.
        values_R: V of each sampled token, float.
        num_sampled_S: each sequence's number of sampled tokens, int64, at least 1.

    Returns td_errors_R, of the values' type, and num_left_R, int64, which counts the token itself.
    """
    assert bool((num_sampled_S > 0).all()), "every response has a token"
    ends_S = num_sampled_S.cumsum(0)
    num_left_R = ends_S.repeat_interleave(num_sampled_S) - torch.arange(values_R.numel(), device=values_R.device)
    errors_R = gamma * _ahead(values_R, 1, num_left_R) - values_R
    errors_R[ends_S - 1] += rewards_S.to(values_R)
    return errors_R, num_left_R


def discounted_sums(x_R: Tensor, num_left_R: Tensor, discount: float, num_terms: int) -> Tensor:
    """Compute sum_{k < num_terms} discount^k x_{t+k} within each response.

    Doubles the sums of 1, 2, 4, ... terms: log2(num_terms) passes over all tokens, and no loop over them.
    """
    total_R, num_covered = torch.zeros_like(x_R), 0
    block_R, size = x_R, 1  # sums of `size` terms, starting at each token
    while True:
        if num_terms & size:
            total_R = total_R + discount**num_covered * _ahead(block_R, num_covered, num_left_R)
            num_covered += size
        if num_covered == num_terms:
            return total_R
        block_R = block_R + discount**size * _ahead(block_R, size, num_left_R)
        size *= 2


def whitened(advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Compute (A - mean) / (std + 1e-8) over the trained tokens, 0 elsewhere.

    A single token stays as it is, and several with equal advantages get 0.
    """
    trained = advantages_T[mask_T]
    if trained.numel() < 2:
        return torch.where(mask_T, advantages_T, 0.0)
    if not has_spread(float(trained.min()), float(trained.max())):
        return torch.zeros_like(advantages_T)
    return torch.where(mask_T, (advantages_T - trained.mean()) / (trained.std() + _EPSILON), 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Compute 0.5 (V - R)^2 per token, and whether clipping removed its gradient.

    Args:
        old_values: V before the first update with this batch.
        clip: if given as c, the loss is the larger of that and 0.5 (V' - R)^2, where V' is V kept within c of its old
            value: a token has no gradient once V has moved towards R by more than c (as in PPO's first implementation).
    """
    loss = 0.5 * (values - returns) ** 2
    if clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    bounded_loss = 0.5 * (bounded - returns) ** 2
    is_clipped = (bounded_loss > loss) & (bounded != values)
    return torch.where(is_clipped, bounded_loss.detach(), loss), is_clipped


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Compute 1 - Var(returns - values) / Var(returns).

    It is 1 for a perfect critic, 0 for one no better than a constant, and nan if all returns are equal.
    """
    if not (returns.numel() and has_spread(float(returns.min()), float(returns.max()))):
        return float("nan")
    return 1 - float((returns - values).var(correction=0)) / float(returns.var(correction=0))


def _ahead(x_R: Tensor, num_tokens: int, num_left_R: Tensor) -> Tensor:
    """Shift x by `num_tokens` within each response: x_{t + num_tokens} at t, 0 past the end."""
    shifted_R = torch.zeros_like(x_R)
    shifted_R[: x_R.numel() - num_tokens] = x_R[num_tokens:]
    return torch.where(num_left_R > num_tokens, shifted_R, 0.0)
