"""Outcomes of attacks, counted, and deadlines for what is attacked."""

import contextlib
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import FrameType


class Outcomes:
    """Outcomes by kind of attack."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.failures: list[str] = []

    def add(self, kind: str, outcome: str, failure: str | None = None) -> None:
        """Count one outcome; `failure` describes an outcome that must not happen."""
        self.counts[kind][outcome] += 1
        if failure is not None:
            self.failures.append(f"{kind}: {failure}")

    @property
    def total(self) -> int:
        return sum(counter.total() for counter in self.counts.values())

    def __str__(self) -> str:
        names = sorted({name for counter in self.counts.values() for name in counter})
        rows = [["kind", *names], *([kind, *(str(c[name]) for name in names)] for kind, c in self.counts.items())]
        rows.append(["all", *(str(sum(c[name] for c in self.counts.values())) for name in names)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


class HangError(BaseException):
    """Something that did not return in time. Not an Exception, so that nothing swallows it."""


@contextlib.contextmanager
def deadline(seconds: float, timer: int = signal.ITIMER_REAL) -> Iterator[None]:
    """Raise HangError in the main thread after `seconds` of wall-clock time, or of CPU time with ITIMER_PROF."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not done in {seconds:g} s")

    number = signal.SIGALRM if timer == signal.ITIMER_REAL else signal.SIGPROF
    before = signal.signal(number, ring)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
