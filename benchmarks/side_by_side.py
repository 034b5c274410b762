"""The common form of the benchmarks: ways to do one piece of work take turns, and a row is the ratio of two of them.

A script in this folder yields its rows from `rows(quick)` and ends with `main(__doc__, rows)`, so that
`python -m benchmarks` and `python -m benchmarks.SCRIPT` measure the same. A ratio is "other / ours" within one turn, so
that other work on the machine slows down both sides. Above 1, ours is faster or takes less memory.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.row import TABLE_HEAD, LeftOut, Row, Rows

Result = TypeVar("Result")
MIB = 1 << 20


class DisagreementError(Exception):
    """Two ways that should do the same work but had different results."""


@dataclass(slots=True)
class Turns:
    """What each way took in each turn, in seconds or bytes. The first way is ours."""

    amounts: dict[str, list[float]]
    load_before: float
    load_after: float

    def row(self, case: str, other: str, *, ours: str | None = None, unit: str = "CPU s") -> Row:
        """Compare `ours` (default: the first way) with another way, turn by turn."""
        mine, theirs = self.amounts[ours or next(iter(self.amounts))], self.amounts[other]
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        low, middle, high = middle_half(ratios)
        medians = statistics.median(mine), statistics.median(theirs)
        return Row(case, other, unit, middle, low, high, len(ratios), *medians, self.load_before, self.load_after)


def middle_half(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def take_turns(
    ways: Mapping[str, Callable[[], Result]],
    num_turns: int,
    *,
    agree: Callable[[Mapping[str, Result]], None] | None = None,
    clock: Callable[[], float] = time.process_time,
    warm_up: bool = True,
) -> Turns:
    """Time each way once per turn, in an order that reverses from turn to turn.

    Args:
        ways: the ways by name; ours is the first.
        agree: gets each turn's results by way, and raises DisagreementError if they differ.
        clock: returns seconds. The default is this process's CPU seconds, which other processes barely affect.
        warm_up: whether to begin with one more turn, uncounted, which loads libraries and fills caches.
    """
    load_before = os.getloadavg()[0]
    amounts: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(0 if warm_up else 1, num_turns + 1):
        results: dict[str, Result] = {}
        for name in order:
            start = clock()
            results[name] = ways[name]()
            took = clock() - start
            if turn:
                amounts[name].append(took)
        if agree:
            agree(results)
        order.reverse()
    return Turns(amounts, load_before, os.getloadavg()[0])


def same(tolerance: float = 0.0) -> Callable[[Mapping[str, Any]], None]:
    """Return a check that all ways have the same result, with numbers and tensors within a relative tolerance."""

    def agree(results: Mapping[str, Any]) -> None:
        (first, expected), *others = results.items()
        for name, result in others:
            if not _are_close(expected, result, tolerance):
                raise DisagreementError(f"{first} and {name} disagree: {expected!r}, {result!r}")

    return agree


def _are_close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * float(a.abs().max())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_are_close(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return abs(a - b) <= tolerance * max(1.0, abs(a))
    return bool(a == b)


def peak_allocated(work: Callable[[], object]) -> int:
    """Return the peak of the bytes that torch allocates on the CPU during a call, above what it held before.

    Every allocation is recorded, so that neither other processes nor the system's own accounting matter.
    """
    gc.collect()  # otherwise what an earlier call left may be freed midway, and be missing from the peak
    gc.disable()  # otherwise the peak depends on when Python happens to collect
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            work()
    finally:
        gc.enable()
    assert profiler.profiler is not None
    allocations = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocations.sort(key=lambda e: e.start_ns())
    held = peak = 0
    for event in allocations:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def resident_bytes(which: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {which}: this benchmark needs Linux")


def main(doc: str, rows: Callable[[bool], Rows], argv: Sequence[str] | None = None) -> None:
    """Run a script's comparisons from the command line; print a table and write JSON to a file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases and few turns: a minute")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="file for the rows")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: list[Row | LeftOut] = []
    print(TABLE_HEAD, flush=True)
    for row in rows(args.quick):
        print(row, flush=True)
        found.append(row)
        if args.output:
            args.output.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
