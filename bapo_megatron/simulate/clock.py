"""An asyncio event loop in simulated time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop with its own clock, which jumps to the next timer when nothing else is left to do.

    Work for a thread is done immediately, and its result comes after the seconds that it announced with `work`.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._work_s = 0.0
        super().__init__(_ClockSelector(self))

    def time(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self._work_s += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done, self._work_s = self.create_future(), 0.0
        try:
            finish = partial(done.set_result, func(*args))
        except Exception as error:
            finish = partial(done.set_exception, error)
        self.call_later(self._work_s, lambda: done.done() or finish())
        return done


class _ClockSelector(selectors.DefaultSelector):
    def __init__(self, loop: ClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all are waiting for each other"
        self._loop.now_s += timeout
        return super().select(0)


def run_on_clock(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on a `ClockLoop`: the order of events depends on the coroutine alone, not on the machine."""
    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        return runner.run(coroutine)
