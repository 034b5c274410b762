"""Whose turn it is to take the memory of GPUs that trainer and servers share: a lock on a file of the run.

The trainer holds it alone from before its models move to the GPUs until they have left. A server's supervisor shares it
with others while the server starts, because a starting server takes all its memory. The system releases the lock when
its holder ends for any reason.
"""

import contextlib
import fcntl
import logging
import time
from collections.abc import Callable
from pathlib import Path

from bapo_megatron.errors import UserError

_POLL_S = 0.1

log = logging.getLogger(__name__)


class Turn:
    """One holder's handle of the lock. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """`path`: a file that need not exist, in a folder that all processes of the run see."""
        self._path = path
        self._held = contextlib.ExitStack()
        self.is_held = False

    def take(self, *, shared: bool, is_over: Callable[[], bool]) -> bool:
        """Wait for the lock, unless it is held already. Return False if `is_over` became true first.

        A file system without locks is told in the log; nobody then waits.
        """
        if self.is_held:
            return True
        try:
            file = self._path.open("a")
        except OSError as error:
            raise UserError(f"cannot open {self._path}: {error.strerror}; set run.dir") from error
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        with contextlib.ExitStack() as stack:
            stack.enter_context(file)
            while True:
                try:
                    fcntl.flock(file, how)
                except BlockingIOError:
                    if is_over():
                        return False
                    time.sleep(_POLL_S)
                    continue
                except OSError as error:
                    log.warning("%s: this file system cannot lock (%s)", self._path, error)
                else:
                    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked child may keep the file open
                break
            self._held = stack.pop_all()
        self.is_held = True
        return True

    def give(self) -> None:
        """Release the lock, if it is held."""
        self._held.close()
        self.is_held = False
