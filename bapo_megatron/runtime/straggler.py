"""Detecting the slow rank that all others wait for in collectives.

Each rank measures its forward and backward passes (score, train, critic) from their start to the first collective over
data ranks, the sum of the gradients. Until then replicas of the model do not communicate. Tensor, pipeline and context
ranks of one replica do, in every layer, so their times are similar: a slow rank shows as a slow replica, and with only
one replica there is nothing to compare.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bapo_megatron.runtime.ranks import gather_json

SLOW = 1.5  # a rank is slow from this many times the median rank's own time
_WINDOW, _OFTEN = 5, 3  # steps to look back, and how many of them must be slow


def _now() -> float | torch.cuda.Event:
    if not torch.cuda.is_available():
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class LocalTime:
    """Seconds of this rank before the first collective over data ranks; on a GPU, measured with CUDA events."""

    def __init__(self, clock: Callable[[], float | torch.cuda.Event] = _now) -> None:
        self._clock = clock
        self._measured: list[tuple[Any, Any]] = []  # start and end on the clock

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of the body."""
        begin = self._clock()
        yield
        self._measured.append((begin, self._clock()))

    def take(self) -> float:
        """Return the seconds measured since the last call, waiting for the GPU."""
        measured, self._measured = self._measured, []
        return sum(_seconds(begin, end) for begin, end in measured)


def compare_ranks(local_time: LocalTime) -> dict[str, float]:
    """Return metrics of the slowest rank since the last call, on every rank; empty for a single rank. Collective."""
    return straggler_metrics(gather_json(local_time.take()))


def straggler_metrics(seconds: Sequence[float]) -> dict[str, float]:
    """Compute straggler metrics from per-rank seconds, using the lower median: with two ranks, the faster one."""
    median_s = statistics.median_low(seconds)
    if len(seconds) == 1 or not median_s:
        return {}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "straggler/ratio": seconds[slowest] / median_s,
        "straggler/rank": float(slowest),
        "straggler/slowest_s": seconds[slowest],
        "straggler/median_s": median_s,
    }


class StragglerAlarm:
    """An alarm for a rank that is slow in 3 of 5 steps, raised again only after it has been fast for 5."""

    def __init__(self) -> None:
        self._slow: deque[int | None] = deque(maxlen=_WINDOW)  # the slow rank of each of the last steps
        self._told: set[int] = set()

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning if the metrics of this step call for one."""
        if "straggler/ratio" not in metrics:
            return None
        rank, ratio = int(metrics["straggler/rank"]), metrics["straggler/ratio"]
        self._slow.append(rank if ratio > SLOW else None)
        self._told &= {r for r in self._slow if r is not None}
        if self._slow.count(rank) < _OFTEN or self._slow[-1] is None or rank in self._told:
            return None
        self._told.add(rank)
        slowest, median = metrics["straggler/slowest_s"], metrics["straggler/median_s"]
        return (
            f"trainer rank {rank} is slow: its own passes take {slowest:.2f} s, {ratio:.1f} times the median rank's "
            f"({median:.2f} s), and were slow in {self._slow.count(rank)} of the last {len(self._slow)} steps; with "
            "tensor, pipeline or context ranks it may be another rank of its replica"
        )


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
