"""Sampling one token per row, reproducible whatever else is in the batch.

Each token takes one uniform number, a hash of (seed, position). Position counts from the start of the prompt, so a
request draws the same numbers alone, in a batch, or resumed in pieces. Inverting the cumulative distribution needs one
number per row; the Gumbel trick needs one per vocabulary entry.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.engines.embedded.protocol import SamplingParams

_GREEDY_BELOW = 1e-6  # as SGLang; dividing by less overflows float32


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Float64 [B] in [0, 1), multiples of 2**-40: splitmix64 (Steele et al., 2014) over seed and position."""
    seed_B = np.array(seeds, dtype=np.uint64)
    position_B = np.array(positions, dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seed_B) ^ position_B)
    return (mixed >> np.uint64(24)).astype(np.float64) * 2.0**-40


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float], list[float]]:
    """Sample one token per row.

    Args:
        logits_BV: float32, overwritten.
        params: a temperature below 1e-6 means greedy, with log-probs at temperature 1.
        seeds, positions: hashed into each row's random number.

    Returns token ids; log-probs under the tempered distribution over all tokens; log-probs under that distribution cut
    by top_k, top_p and min_p and renormalised (0 where greedy). A row whose logits are not finite has nan for both.
    """
    is_greedy = [p.temperature < _GREEDY_BELOW for p in params]
    temperature_B = torch.tensor([1.0 if g else p.temperature for g, p in zip(is_greedy, params, strict=True)])
    logprobs_BV = torch.log_softmax(logits_BV.div_(temperature_B[:, None]), dim=-1)
    token_ids_B = torch.empty(len(params), dtype=torch.int64)
    is_cut = any(p.truncates for p in params)
    if not all(is_greedy):
        probs_BV = logprobs_BV.exp()
        if is_cut:
            probs_BV = _truncate(probs_BV, params)
        cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
        draw_B = torch.from_numpy(uniform(seeds, positions)) * cdf_BV[:, -1]
        token_ids_B = torch.searchsorted(cdf_BV, draw_B[:, None], right=True)[:, 0]
    if any(is_greedy):
        token_ids_B = torch.where(torch.tensor(is_greedy), logprobs_BV.argmax(-1), token_ids_B)
    token_ids_B = token_ids_B.clamp_(max=logits_BV.shape[1] - 1)  # only nan logits reach the clamp
    logprobs_B = logprobs_BV.gather(1, token_ids_B[:, None])[:, 0]
    logprobs_B = torch.where(torch.isfinite(logprobs_B), logprobs_B, torch.nan)
    cut_logprobs_B = logprobs_B
    if is_cut and not all(is_greedy):
        renormalised_B = (logprobs_B - cdf_BV[:, -1].log()).clamp(max=0)
        cut_logprobs_B = torch.where(torch.tensor([p.truncates for p in params]), renormalised_B, logprobs_B)
    if any(is_greedy):
        cut_logprobs_B = torch.where(torch.tensor(is_greedy), logprobs_B.clamp(min=0), cut_logprobs_B)
    return token_ids_B.tolist(), logprobs_B.tolist(), cut_logprobs_B.tolist()


def _truncate(probs_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero the probabilities that top_k, top_p and min_p exclude."""
    vocab_size = probs_BV.shape[1]
    top_k_B = torch.tensor([vocab_size if p.top_k == -1 else p.top_k for p in params])
    top_p_B = torch.tensor([2.0 if p.top_p >= 1 else p.top_p for p in params])  # 2 keeps rounding from cutting a tail
    min_p_B = torch.tensor([p.min_p for p in params])
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    drop_BV = torch.arange(vocab_size) >= top_k_B[:, None]
    drop_BV |= before_BV > top_p_B[:, None]
    drop_BV |= sorted_BV < (sorted_BV[:, :1] * min_p_B[:, None])
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV.masked_fill(drop_BV, 0.0))


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
