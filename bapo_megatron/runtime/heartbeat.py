"""What this process did last, and when: kept for the day on which nothing moves any more (stall.py).

There is one `HEARTBEAT` per process, as there is one root logger: the code that beats need not know who listens.
A beat costs about a microsecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Beat:
    """The last action of a role. Example: Beat("micro-batch 3 of 16", 1234.5)."""

    action: str
    at_s: float  # on the heartbeat's clock


class Heartbeat:
    """Last actions by role. Any thread may beat, another may read: single operations on dicts are atomic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.step = 0  # counted from 1; 0 before the first
        self.span: str | None = None  # of the stopwatch; None between spans
        self.loops: dict[str, asyncio.AbstractEventLoop] = {}  # by name, whose tasks a report shows
        self._beats: dict[str, Beat] = {}

    def beat(self, role: str, action: str) -> None:
        """Say that `role` has just begun, or done, `action`."""
        self._beats[role] = Beat(action, self.clock())

    def enter(self, span: str | None) -> None:
        """The trainer begins a span, or (None) ends the one it is in."""
        left, self.span = self.span, span
        self.beat(TRAINER, f"end of {left}" if span is None else f"begin of {span}")

    def beats(self) -> dict[str, Beat]:
        """Of all roles, at this moment."""
        return dict(self._beats)


HEARTBEAT = Heartbeat()
