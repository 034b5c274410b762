"""System calls that the sandbox refuses. The judge answers them, and so learns their names.

    program: chmod() -> seccomp holds the thread -> descriptor readable in the judge -> EPERM, and the name is kept

The judge never lets a refused call continue, because its arguments may change in the meantime. If the judge ends, the
descriptor closes, and the kernel answers ENOSYS.
"""

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import struct

from bapo_megatron.config.system_calls import Answer
from bapo_megatron.rewards.sandbox import ARCHITECTURES

MAX_NAMES = 16  # kept per program; a program may try every number
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl: SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_NOTIFICATION = struct.Struct("=QIIiI56x")  # id, process, flags, number of the call, architecture, ...
_RESPONSE = struct.Struct("=QqiI")  # id, value, error, flags
_MAX_REPORT_BYTES = 4096


class Refusals:
    """The judge's end of a sandbox's report: first what the system lacks, then the refused calls by name."""

    def __init__(self, report: socket.socket, machine: str, calls: dict[Answer, dict[str, int]]) -> None:
        """Read from `report`, which this object closes; `calls` holds numbers on `machine` by answer and name."""
        self.lacking: tuple[str, ...] = ()
        self.names: dict[str, None] = {}  # in order of the first refusal
        self._report: socket.socket | None = report
        self._listener: int | None = None
        self._architecture = ARCHITECTURES.get(machine)
        self._known = {n: name for answer in ("check", "refuse") for name, n in calls.get(answer, {}).items()}
        report.setblocking(False)

    def register(self, poller: select.poll) -> None:
        """Let `poller` watch for the next event."""
        if self._report is not None:
            poller.register(self._report, select.POLLIN)
        elif self._listener is not None:
            poller.register(self._listener, select.POLLIN)

    def on_event(self, fd: int, event: int, poller: select.poll) -> None:
        """Handle one event only: a program that makes calls in a loop must not delay its judge past the deadline."""
        if self._report is not None and fd == self._report.fileno():
            poller.unregister(fd)
            self.read_report()
            self.register(poller)
        elif event & select.POLLIN:
            self._answer()
        elif event & select.POLLHUP:  # nobody is left to make calls; POLLERR alone says that a signal came
            poller.unregister(fd)

    def read_report(self) -> None:
        """Read the sandbox's report if it has arrived, and stop reading."""
        if self._report is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError), self._report as report:
            text, fds, *_ = socket.recv_fds(report, _MAX_REPORT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            self._listener = fds[0] if fds else None
            self.lacking = tuple(json.loads(text)["lacking"]) if text else ()
        self._report = None

    def close(self) -> None:
        """Close the descriptors; calls still held return ENOSYS."""
        if self._report is not None:
            self._report.close()
        if self._listener is not None:
            os.close(self._listener)
        self._report = self._listener = None

    def _answer(self) -> None:
        assert self._listener is not None
        notification = bytearray(_NOTIFICATION.size)
        with contextlib.suppress(OSError):  # ENOENT: the thread was interrupted or has ended
            fcntl.ioctl(self._listener, _RECEIVE, notification)
            key, _, _, number, architecture = _NOTIFICATION.unpack(notification)
            is_native = architecture == self._architecture
            name = self._known.get(number) if is_native else None
            if len(self.names) < MAX_NAMES:
                self.names[name or f"{'' if is_native else '32-bit '}number {number}"] = None
            error = errno.ENOSYS if name is None else errno.EPERM
            fcntl.ioctl(self._listener, _SEND, bytearray(_RESPONSE.pack(key, 0, -error, 0)))
