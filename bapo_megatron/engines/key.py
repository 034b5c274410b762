"""The key that a run shares with its engines. Without it an engine answers nothing.

The process that starts the engines makes it. The engines and trainer rank 0 inherit a socket that holds it, the nodes
of a SLURM job read it from a file in the meeting folder; it is in no environment, command line, log, configuration or
checkpoint. A socket, unlike a pipe, cannot be opened through /proc/PID/fd.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.errors import UserError
from bapo_megatron.runtime.files import regular_file

KEY_VARIABLE = "BAPO_ENGINE_KEY"
"""The key of an engine that you start yourself."""
_SOCKET_VARIABLE = "BAPO_ENGINE_KEY_SOCKET"  # in processes of a run: the number of the socket

_NUM_BYTES = 32
_MAX_BYTES = 4096


def new_key() -> str:
    """Make the key of one attempt of a run."""
    return secrets.token_hex(_NUM_BYTES)


@contextlib.contextmanager
def handed_over(key: str | None) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Yield the variables and the descriptors with which a process that the block starts finds the key."""
    if key is None:
        yield {}, ()
        return
    mine, other = socket.socketpair()
    with other:
        with mine:
            mine.sendall(key.encode())
        yield {_SOCKET_VARIABLE: str(other.fileno())}, (other.fileno(),)


def take_key() -> str | None:
    """Return the key that this process was given, if any, and hide it from the processes that this one starts."""
    own = os.environ.pop(KEY_VARIABLE, None) or None
    if (number := os.environ.pop(_SOCKET_VARIABLE, None)) is None:
        return own
    with open(int(number), "rb") as holder:
        return holder.read().decode()


def client_key(kind: EngineKind, api_key: str | None) -> str | None:
    """Return the key that this run's engines ask for; servers of your own use the key in rollout.api_key.

    Raises:
        UserError: that file holds no key.
    """
    key = take_key()
    if kind.specs is not None:
        return key
    return None if api_key is None else read_key(api_key)


def read_key(path: str, setting: str = "rollout.api_key") -> str:
    """Return the key in the file that a setting names: one line of printable ASCII characters.

    Raises UserError; no message shows the file.
    """
    try:
        with regular_file(Path(path).expanduser()).open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{setting}={path}: {why}; name the file that holds the servers' key") from error
    key = text.strip()
    if not key or len(text) > _MAX_BYTES or any(not 33 <= byte < 127 for byte in key):
        raise UserError(f"{setting}={path}: the file is not one key of printable ASCII characters")
    return key.decode()
