"""Standard streams, the border between a command and its terminal: nothing that controls a terminal passes.

A stream that cannot be written to is an error when a command starts, but does not end a run.
"""

import codecs
import logging
import os
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO, cast

from bapo_megatron.errors import escaped_lines

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
    """A wrapper of a text stream that escapes what controls a terminal and remembers why it could not be written to.

    Attributes:
        problem: the first write error, or None.
        is_lasting: whether to log an error and then discard all output. If not, the error is raised.
    """

    def __init__(self, stream: TextIO, *, with_bars: bool = False) -> None:
        """Wrap a stream; `with_bars` lets libraries redraw their progress bars."""
        self.problem: OSError | None = None
        self.is_lasting = False
        self._stream = stream
        self._with_bars = with_bars

    def write(self, text: str) -> int:
        return self.write_styled(escaped_lines(text, with_bars=self._with_bars))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def write_styled(self, text: str) -> int:
        """Write a text as it is: colours and movements of the cursor, around words that have been escaped."""
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


class Styled:
    """The file of a library that draws on an `Output`, and to which only escaped words are given."""

    def __init__(self, output: Output) -> None:
        self.write = output.write_styled
        self._output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error, escaped. For sys.excepthook: Python's own hook prints messages as they are."""
    sys.stderr.write(escaped_lines("".join(traceback.format_exception(kind, error, trace))))


def lasting(stream: TextIO) -> TextIO:
    """Return a stream for a run's messages whose errors do not end the run."""
    output = as_output(stream)
    output.is_lasting = True
    return cast(TextIO, output)


def as_output(stream: TextIO) -> Output:
    """Return a stream's wrapper, unless the stream is one."""
    return stream if isinstance(stream, Output) else Output(stream)


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
