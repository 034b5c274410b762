"""Errors that a user can act on: one sentence saying what, where, and what to do.

The command line prints the message of a `UserError` and exits with code 2, without a traceback.
Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_FIELDS = 4  # in one message


def escaped(text: str) -> str:
    """Escape control characters as Python writes them, such as "\\n", so that a terminal shows one plain line."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


_CONTROL = r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # a terminal, or the order of writing
_CONTROLS, _CONTROLS_BUT_BARS = re.compile(rf"(?!\r\n){_CONTROL}"), re.compile(rf"(?!\r|\x1b\[A){_CONTROL}")


def escaped_lines(text: str, *, with_bars: bool = False) -> str:
    r"""Escape what controls a terminal, such as "\x1b[2J", and leave alone lines, tabs and letters of any script.

    Args:
        text: words of a policy, a program, a file or a server, and ours.
        with_bars: leave alone what redraws a progress bar: "\r", and "\x1b[A" for the line above.
    """
    return (_CONTROLS_BUT_BARS if with_bars else _CONTROLS).sub(lambda found: escaped(found[0]), text)


def in_one_line(error: BaseException) -> str:
    """Return an exception's type and text. Example: "ValueError: no such file"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra from this package's checkout, because no index has the package."""
    checkout = Path(__file__).parents[1]
    place = str(checkout) if (checkout / "setup.py").is_file() else "bapo-megatron"  # installed as a wheel: it is there
    return f"pip install {shlex.quote(f'{place}[{extra}]')}"


def plural(number: int, noun: str, spec: str = "") -> str:
    """Return a number with its noun: "1 engine", "2 engines", "2 mini-batches"; `spec` formats the number."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:{spec}} {noun}{ending}"


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the most similar of `choices` alone; empty if none is similar enough."""
    return difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)


def did_you_mean(*names: str) -> str:
    """Return the question that suggests names instead of a wrong one: "did you mean train?"; empty without any."""
    return f"did you mean {' or '.join(names)}?" if names else ""


class UserError(ValueError):
    """Bad input or a bad environment, described so that the user can fix it."""


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the error that ends the block to `problems`, and continue after it, so that an error can name them all."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))


class ConfigError(UserError):
    """One or more violations in a configuration, all in one message."""


class DataError(UserError):
    """A prompt source that cannot be read: names the file and the line."""


class CheckpointError(UserError):
    """A checkpoint that is missing, torn, or made for another model or layout."""


class DivergedError(UserError):
    """Training that cannot continue: one update after the other is skipped."""


class NoGroupKeptError(UserError):
    """Sampling that dropped one group after the other, so that none is left to train on."""


class OutOfMemoryError(UserError):
    """A trainer rank that ran out of GPU or machine memory; the message says where, and what to change."""


class TornCheckpointError(CheckpointError):
    """A checkpoint with a missing, truncated or changed file; the previous one may be intact."""


class EngineError(UserError):
    """A rollout engine that is unreachable, answers nonsense, or holds the wrong weights."""


class RequestRefusedError(EngineError):
    """A request that a healthy engine refuses (HTTP 4xx): retrying, also on another engine, would not help."""


class KeyRefusedError(RequestRefusedError):
    """A request with a missing or wrong key (HTTP 401)."""


class NoEngineLeftError(EngineError):
    """All rollout engines are fenced off; some may come back."""


class UnreachableEngineError(EngineError):
    """A rollout engine that cannot be connected to, or did not answer in time."""


class BroadcastLostError(EngineError):
    """A broadcast that did not reach a rollout engine; the sender or another receiver may be at fault."""


def wrong_fields(error: ValidationError) -> str:
    """Name the wrong fields of some parsed data, with the reasons: "files.a.0: Input should be a valid integer"."""
    found = error.errors(include_url=False, include_input=False)
    fields = [f"{'.'.join(map(str, e['loc'])) or 'the whole'}: {e['msg']}" for e in found[:_MAX_FIELDS]]
    return "; ".join(fields) + (f"; and {len(found) - len(fields)} more" if len(found) > len(fields) else "")
