"""A row of the benchmarks' tables. This module imports no torch: benchmarks/page.py needs rows only."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison of ours with one other way, in one case."""

    case: str
    other: str  # the way with which ours is compared
    unit: str  # unit of `ours` and `theirs`
    ratio: float  # theirs / ours, median over the turns
    low: float  # lower end of the middle half of the turns
    high: float
    num_turns: int
    ours: float  # median
    theirs: float  # median
    load_before: float  # load average over the last minute
    load_after: float

    def __str__(self) -> str:
        return (
            f"| {self.case} | {self.other} | {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) | {self.num_turns} "
            f"| {self.ours:.3g} {self.unit} | {self.theirs:.3g} {self.unit} "
            f"| {self.load_before:.0f}, {self.load_after:.0f} |"
        )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A comparison that this machine cannot make."""

    case: str
    reason: str

    def __str__(self) -> str:
        return f"{self.case}: left out, {self.reason}"


Rows = Iterator[Row | LeftOut]
TABLE_HEAD = "| case | against | ratio (middle half) | turns | ours | other | load |\n|---|---|---|---|---|---|---|"
