"""BAPO's bound search: one table against the literal loop of Algorithm 1, side by side in one run.

    python benchmarks/clip_bounds.py [NUM_TOKENS]

The literal loop evaluates rho on all tokens at every probe (up to 52 at the paper's ranges), as the paper prints it;
spread over data-parallel ranks it would also make one blocking all-reduce per probe, which is not counted here.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.config.schema_loss import ClipBoundConfig

NUM_RUNS = 7


def literal_search(ratio: Tensor, advantages: Tensor, config: ClipBoundConfig) -> tuple[float, float, int]:
    """Run Algorithm 1 with the gradient reading, on integer grids; return the bounds and the number of probes."""
    highs, lows = config.high.points, config.low.points
    i = j = 0
    num_probes = 0
    while True:
        positive = (ratio * advantages)[(advantages > 0) & (ratio < highs[i])].sum()
        negative = (ratio * -advantages)[(advantages < 0) & (ratio > lows[j])].sum()
        num_probes += 1
        reached = float(positive / (positive + negative)) >= config.rho0
        if reached or j + 1 == len(lows):
            return lows[j], highs[i], num_probes
        if i + 1 < len(highs):
            i += 1
        else:
            j += 1


def seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(num_tokens, generator=generator, dtype=torch.float64).mul(0.3).exp()
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    print(f"{num_tokens} tokens, {torch.get_num_threads()} threads, median of {NUM_RUNS}")
    for rho0 in (0.4, 0.52, 0.9):
        config = ClipBoundConfig(rho0=rho0, contribution="gradient")  # type: ignore[call-arg]
        bounds = search_bounds(contribution_table(ratio, advantages, mask, None, config), config)
        low, high, num_probes = literal_search(ratio, advantages, config)
        assert (bounds.low, bounds.high) == (low, high), "the two searches disagree"
        one_table = seconds(lambda c=config: search_bounds(contribution_table(ratio, advantages, mask, None, c), c))
        literal = seconds(lambda c=config: literal_search(ratio, advantages, c))
        print(
            f"rho0 {rho0:.2f}: bounds [{low}, {high}], {num_probes} probes: one table {one_table * 1e3:.0f} ms, "
            f"literal loop {literal * 1e3:.0f} ms, ratio {literal / one_table:.1f}"
        )


if __name__ == "__main__":
    main()
