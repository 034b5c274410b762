"""Standard streams. A stream that cannot be written to is an error when a command starts, but does not end a run."""

import codecs
import logging
import os
import sys
from typing import Any, TextIO, cast

log = logging.getLogger(__name__)

ESCAPING = "bapo_megatron.escaping"
"""Encoding error handler: a character that the encoding lacks is written as a Python escape, such as "\\xfc"; a byte of
a file name that is not text is written unchanged."""


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(ESCAPING, _escape)


class Output:
    """A wrapper of a text stream that remembers why it could not be written to.

    Attributes:
        problem: the first write error, or None.
        is_lasting: whether to log an error and then discard all output. If not, the error is raised.
    """

    def __init__(self, stream: TextIO) -> None:
        self.problem: OSError | None = None
        self.is_lasting = False
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return len(text) if self._is_lost else self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            if not self._is_lost:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def discard(self) -> None:
        """Discard what the stream still holds: Python would write it at exit."""
        try:
            target = self._stream.fileno()
        except (OSError, ValueError):  # a stream without a file
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)

    @property
    def _is_lost(self) -> bool:
        return self.is_lasting and self.problem is not None

    def _lose(self, error: OSError) -> None:
        self.problem = error
        if not self.is_lasting:
            raise error
        log.warning("nothing more is shown: the output cannot be written any more (%s)", error.strerror or error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO) -> TextIO:
    """Return a stream for a run's messages whose errors do not end the run."""
    output = stream if isinstance(stream, Output) else Output(stream)
    output.is_lasting = True
    return cast(TextIO, output)


def open_closed_streams() -> bool:
    """Open /dev/null in place of closed standard streams (`<&-`); return whether standard output was closed.

    Otherwise the next file to be opened, such as one of a run, would take their place and receive what is printed.
    """
    is_output_closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null(number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    return is_output_closed


def _open_null(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(opened, number)
        os.close(opened)
