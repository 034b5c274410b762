"""Pushes in which an engine drops out at some bucket, so that only deadlines can end them.

These deadlines pass immediately, and all others never do, however busy the machine is.

    python -m tests.integration.vain ...     an embedded engine that knows of broadcasts in vain, as the nursery's do
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.engines.update_group import UpdateGroup
from bapo_megatron.sync import broadcast, session
from bapo_megatron.sync.broadcast import BucketSender, Flight
from bapo_megatron.sync.session import Replies
from tests.distributed import HANG_S

NEVER_S = 3 * HANG_S  # deadline of everything in a push: a hang that is not in vain is found earlier
_SWITCH = "BAPO_TEST_VAIN_BROADCASTS"  # the path of a file that exists while broadcasts are in vain
_VAIN_S = 0.1  # the deadline of a broadcast that cannot end, for a tensor of any size
_POLL_S = 0.002

_broadcast = UpdateGroup.broadcast


class Vain:
    """A switch for broadcasts in vain in this process's pushes. Create it before the engines start.

    It is also the clock of pushes, and skips the time in which only silent engines are awaited.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent: set[str] = set()  # urls of engines that do not answer before their deadline
        self._switch = folder / "vain-broadcasts"
        self._skipped_s = 0.0
        self._sender: BucketSender | None = None
        monkeypatch.setenv(_SWITCH, str(self._switch))
        monkeypatch.setattr(UpdateGroup, "broadcast", _send_or_fail)
        for module in (session, broadcast):
            monkeypatch.setattr(module, "time", self)
        wait_until, send = Replies.wait_until, BucketSender.send

        def wait_for_those_who_answer(replies: Replies[Any], deadline: float, *, first_failure: bool = False) -> None:
            self._wait(replies, first_failure=first_failure)
            wait_until(replies, deadline, first_failure=first_failure)

        def send_in_vain_or_not(sender: BucketSender, *arguments: Any) -> None:
            self._sender = sender
            try:
                send(sender, *arguments)
            finally:
                self._sender = None
                self._switch.unlink(missing_ok=True)
                self.silent.clear()

        monkeypatch.setattr(Replies, "wait_until", wait_for_those_who_answer)
        monkeypatch.setattr(BucketSender, "send", send_in_vain_or_not)

    @property
    def members(self) -> set[str]:
        """The urls of the engines to which weights are being sent."""
        return {engine.url for engine in self._sender.members.engines} if self._sender else set()

    @property
    def flight(self) -> Flight | None:
        """The bucket that is being sent."""
        return self._sender.flight if self._sender else None

    def settle(self) -> None:
        """Wait, between two buckets of a push, until all engines hold what was sent, or one has failed."""
        if flight := self.flight:
            flight.replies.wait_until(flight.replies.deadline, first_failure=True)

    def begin(self, *silent: str) -> None:
        """Make all later broadcasts of the current push unable to end: an engine takes no part."""
        assert self._sender is not None
        self.silent.update(silent)
        self._switch.touch()

    # the clock

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    sleep = staticmethod(time.sleep)

    def _wait(self, replies: Replies[Any], *, first_failure: bool) -> None:
        end = time.monotonic() + HANG_S
        while (missing := replies.unanswered()) and not (first_failure and replies.failed()):
            if missing <= self.silent:
                self._skipped_s += NEVER_S
                return
            assert time.monotonic() < end, f"{missing - self.silent} hang"
            time.sleep(_POLL_S)


def _broadcast_or_fail(group: UpdateGroup, tensor: Tensor, timeout_s: float | None = None) -> dist.Work:
    return _broadcast(group, tensor, _VAIN_S if Path(os.environ[_SWITCH]).exists() else timeout_s)


def _send_or_fail(group: UpdateGroup, tensor: Tensor, timeout_s: float) -> dist.Work:
    assert timeout_s < NEVER_S, "a hung engine has to end the broadcast before the replies are late"
    return _broadcast_or_fail(group, tensor, timeout_s)


def build_in_engine() -> None:
    """Let this process, an engine, know which broadcasts are in vain, if the test has any."""
    if _SWITCH in os.environ:
        UpdateGroup.broadcast = _broadcast_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    from bapo_megatron.engines.embedded import server

    build_in_engine()
    server.main()
