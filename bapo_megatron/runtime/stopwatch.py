"""The breakdown of a training step's time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bapo_megatron.runtime.heartbeat import Heartbeat


class Stopwatch:
    """Seconds per named span between one `lap` and the next; each span is also a beat of the heartbeat.

    Example:
        watch = Stopwatch(HEARTBEAT, ("rollout", "train"))
        with watch.span("rollout"):
            ...
        watch.lap()  # {"time/step_s": 3.1, "time/rollout_s": 3.0, "time/train_s": 0.0, "time/other_s": 0.1}
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        spans: Sequence[str] = ("rollout", "critic", "score", "train", "sync", "eval", "checkpoint"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._heartbeat = heartbeat
        self._seconds = dict.fromkeys(spans, 0.0)
        self._open: str | None = None
        self._lap_start = clock()

    def begin(self, step: int) -> None:
        """Record in the heartbeat which step, numbered from 0, is running."""
        self._heartbeat.step = step + 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the body's seconds to `name`, even if it raises. Spans do not nest."""
        assert name in self._seconds, f"unknown span {name!r}, expected one of {sorted(self._seconds)}"
        assert self._open is None, f"span {name!r} opened inside {self._open!r}"
        self._heartbeat.enter(name)
        self._open, start = name, self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start
            self._open = None
        self._heartbeat.enter(None)  # not after an error: the out-of-memory report names the span

    def lap(self) -> dict[str, float]:
        """Return seconds since the previous lap as metrics: the step, each span, and `time/other_s` for the rest."""
        assert self._open is None, f"lap taken inside span {self._open!r}"
        now = self._clock()
        step_s, spans_s = now - self._lap_start, dict(self._seconds)
        self._lap_start, self._seconds = now, dict.fromkeys(self._seconds, 0.0)
        return {
            "time/step_s": step_s,
            **{f"time/{name}_s": seconds for name, seconds in spans_s.items()},
            "time/other_s": max(0.0, step_s - sum(spans_s.values())),
        }
