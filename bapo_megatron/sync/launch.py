"""Starting a broadcast in a thread of its own, where starting it may block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist


class Launch(dist.Work):
    """A broadcast on its way, to be polled until it is completed.

    Over NCCL the first collective of a group makes the communicator, and blocks until all ranks have entered it
    (ncclCommInitRank): no deadline of torch's covers that, and nothing can end it. So it is started in a daemon thread,
    which stays behind, with what it was to send, where a rank never comes. Not yet run on a GPU.
    """

    def __init__(self, start: Callable[[], dist.Work], device: torch.device) -> None:
        """Returns at once.

        Args:
            start: starts it; its work sees all that was issued on the caller's current stream of `device` until now.
        """
        super().__init__()
        self._work: Future[dist.Work] = Future()
        place = _after_current_stream(device)
        self._thread = threading.Thread(target=self._run, args=(start, place), name="launch-broadcast", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """It was sent, or has failed: `wait` tells."""
        return self._work.done() and (self._work.exception() is not None or self._work.result().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """To be called once it is completed. Raises RuntimeError where it failed."""
        assert self._work.done(), "is_completed() comes before wait()"
        return self._work.result().wait(timeout)

    def join(self) -> None:
        """Until it has been started, or could not be: possibly for ever."""
        self._thread.join()

    def _run(self, start: Callable[[], dist.Work], place: contextlib.AbstractContextManager[None]) -> None:
        try:
            with place:
                self._work.set_result(start())
        except Exception as problem:  # whatever it is: it belongs to who waits
            self._work.set_exception(problem)


def _after_current_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For another thread: a stream on `device` that goes on from where the caller's current one is now."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    issued = torch.cuda.Event()
    issued.record(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def place() -> Iterator[None]:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            stream.wait_event(issued)
            with torch.cuda.stream(stream):
                yield

    return place()
