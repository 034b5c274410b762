"""The last actions of this process, kept for reports of a stalled run (monitor/stall.py).

There is one `HEARTBEAT` per process, like the root logger. The code that beats it (requests, reading files) is far
below trainer.py and need not know its readers; trainer.py passes it to them. A beat costs about a microsecond.
"""

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
    """Last actions by role. Any thread may beat while another reads: single operations on dicts are atomic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.step = 0  # counted from 1; 0 before the first
        self.span: str | None = None  # the stopwatch's current span; None between spans
        self.loops: dict[str, asyncio.AbstractEventLoop] = {}  # by name; a report shows their tasks
        self._beats: dict[str, Beat] = {}

    def beat(self, role: str, action: str) -> None:
        """Record that `role` has just begun or finished `action`."""
        self._beats[role] = Beat(action, self.clock())

    def enter(self, span: str | None) -> None:
        """Record that the trainer begins a span, or (None) ends the current one."""
        left, self.span = self.span, span
        self.beat(TRAINER, f"end of {left}" if span is None else f"begin of {span}")

    def beats(self) -> dict[str, Beat]:
        """Return a copy of the latest beat of each role."""
        return dict(self._beats)


HEARTBEAT = Heartbeat()
