"""The search for BAPO's bounds: one table against loops that read every token for every probe, on 1 and 4 ranks.

    python -m benchmarks.clip_bounds [--quick]

Our search is compared with two loops, each at the loop's settings: Algorithm 1 to the letter (contribution "gradient"),
and the authors' recipe (contribution "official", lower bound first). On several ranks, each probe of a loop makes one
blocking all-reduce of its two sums, as the recipe does; our search exchanges its table once, as the learner does. All
must find the same bounds. Times are CPU seconds on one rank, and seconds on four, which share this machine's cores.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.errors import plural
from bapo_megatron.kernels import kernels_of
from benchmarks.ranks import Ranks
from benchmarks.side_by_side import LeftOut, Row, Rows, Turns, main, same, take_turns

NUM_RANKS = 4
TOKENS_OF_A_TURN = 200_000  # smaller searches are repeated until a turn has read this many
OURS, LITERAL, AUTHORS = "one table", "literal loop of Algorithm 1", "authors' loop"
STOPS_EARLY, SATURATES = "stops early", "saturates"
NUM_TURNS = {STOPS_EARLY: 7, SATURATES: 3}  # more if the ways are closer
CONFIGS = {  # by loop, and by what it does on these tokens
    (LITERAL, STOPS_EARLY): ClipBoundConfig(rho0=0.4, contribution="gradient"),
    (LITERAL, SATURATES): ClipBoundConfig(rho0=0.9, contribution="gradient"),
    (AUTHORS, SATURATES): ClipBoundConfig(rho0=9.0, contribution="official", order="low_first"),
}

Bounds = tuple[float, float]


def add_up(sums: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def one_table(ratio: Tensor, advantages: Tensor, config: ClipBoundConfig) -> Bounds:
    mask = torch.ones_like(ratio, dtype=torch.bool)
    table = contribution_table(ratio, advantages, mask, None, config)
    bounds = search_bounds(kernels_of(table).combine(table) if dist.is_initialized() else table, config)
    return bounds.low, bounds.high


def literal_loop(ratio: Tensor, advantages: Tensor, config: ClipBoundConfig) -> Bounds:
    """Run Algorithm 1 in the "gradient" reading, on integer grids."""
    highs, lows = config.high.points, config.low.points
    i = j = 0
    while True:
        positive = (ratio * advantages)[(advantages > 0) & (ratio < highs[i])].sum()
        negative = (ratio * -advantages)[(advantages < 0) & (ratio > lows[j])].sum()
        p, n = add_up(torch.stack([positive, negative])).tolist()
        if p / (p + n) >= config.rho0 or j + 1 == len(lows):
            return lows[j], highs[i]
        if i + 1 < len(highs):
            i += 1
        else:
            j += 1


def authors_loop(ratio: Tensor, advantages: Tensor, config: ClipBoundConfig) -> Bounds:
    """Compare the positive and negative sums of the clipped objective; raise the lower bound first."""
    highs, lows = config.high.points, config.low.points

    def is_reached(low: float, high: float) -> bool:
        positive = (advantages * ratio.clamp(max=high))[advantages > 0].sum()
        negative = (-advantages * ratio.clamp(min=low))[advantages < 0].sum()
        p, n = add_up(torch.stack([positive, negative])).tolist()
        return p / n >= config.rho0

    for low in lows:
        if is_reached(low, highs[0]):
            return low, highs[0]
    for high in highs[1:]:
        if is_reached(lows[-1], high):
            return lows[-1], high
    return lows[-1], highs[-1]


LOOPS = {LITERAL: literal_loop, AUTHORS: authors_loop}


def search_turns(loop: str, end: str, num_tokens: int, num_turns: int) -> Turns:
    """Let our search and a loop take turns over this rank's `num_tokens` tokens; collective if there is a group."""
    config = CONFIGS[loop, end]
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    ratio = torch.randn(num_tokens, generator=generator, dtype=torch.float64).mul(0.3).exp()
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    num_repeats = max(1, TOKENS_OF_A_TURN // num_tokens)

    def repeated(search: Callable[[Tensor, Tensor, ClipBoundConfig], Bounds]) -> Callable[[], Bounds]:
        def run() -> Bounds:
            if dist.is_initialized():
                dist.barrier()
            for _ in range(num_repeats):
                bounds = search(ratio, advantages, config)
            return bounds

        return run

    clock = time.perf_counter if dist.is_initialized() else time.process_time
    ways = {OURS: repeated(one_table), loop: repeated(LOOPS[loop])}
    return take_turns(ways, num_turns, agree=same(), clock=clock)


def on_ranks() -> Callable[..., Turns]:
    dist.init_process_group("gloo")
    return search_turns


def rows(quick: bool) -> Rows:
    """Compare both loops on 1e5 to 1e7 tokens, counted over all ranks."""
    cases = [(loop, end, n) for loop, end in CONFIGS for n in (100_000, 1_000_000, 10_000_000)]
    if quick:  # the longest loops over the most tokens take minutes
        cases = [case for case in cases if case[1] == STOPS_EARLY or case[2] <= 1_000_000]
    for loop, end, num_tokens in cases:
        yield describe(search_turns(loop, end, num_tokens, NUM_TURNS[end]), loop, end, num_tokens, 1)
    with Ranks(NUM_RANKS, on_ranks) as work:
        for loop, end, num_tokens in cases:
            turns = work(loop, end, num_tokens // NUM_RANKS, NUM_TURNS[end])
            yield describe(turns, loop, end, num_tokens, NUM_RANKS)


def describe(turns: Turns, loop: str, end: str, num_tokens: int, num_ranks: int) -> Row | LeftOut:
    repeats = max(1, TOKENS_OF_A_TURN * num_ranks // num_tokens)
    case = f"{num_tokens:.0e} tokens, {plural(num_ranks, 'rank')}, the loop {end}".replace("e+0", "e")
    if repeats > 1:
        case += f"; {repeats} searches"
    return turns.row(case, loop, unit="CPU s" if num_ranks == 1 else "s")


if __name__ == "__main__":
    main(__doc__, rows)
