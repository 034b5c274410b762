"""A Python interpreter in the sandbox whose state is kept by replay.

Each call starts a fresh interpreter, runs the code of the sample's earlier calls again, and then the new code. So the
answer depends on the code alone, and a lost process or a killed run loses nothing. The state is a list of [code,
digest of what it printed].
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.rewards.code import MEMORY_BYTES, Sandbox

MAX_CHARS = 20_000  # of what one call prints
_MAX_CODE_BYTES = 500_000  # JSON of a sample's code: an answer has room for it (environments.MAX_ANSWER_BYTES)
_MAX_LINE_BYTES = 12 * (MAX_CHARS + 100)  # of what one call printed, as JSON: a character may become "\\ud83d\\ude00"
_SESSION = Path(__file__).with_name("session.py")  # the program that runs the code

State = Sequence[Sequence[str]]


class Interpreter:
    """Runner of code, one call after another."""

    def __init__(self, timeout_s: float) -> None:
        """Give a call with its replays `timeout_s` at most."""
        self._timeout_s = timeout_s
        self._sandbox = Sandbox("the tool python", timeout_s, is_repeatable=True)
        self._program = _SESSION.read_text(encoding="utf-8")

    def run(self, code: str, state: State, deadline_s: float | None = None) -> tuple[str, State]:
        """Run code after the code of earlier calls; return what it printed, and the new state.

        A call that does not end, or that ends the interpreter, leaves the state as it was. Whatever the code does is
        its own doing: the answer says so, and nothing is raised.

        Args:
            deadline_s: on the clock of time.monotonic, if earlier than the timeout.
        """
        latest_s = time.monotonic() + self._timeout_s
        latest_s = latest_s if deadline_s is None else min(deadline_s, latest_s)
        stdin = json.dumps({"pieces": [*(earlier for earlier, _ in state), code], "max_chars": MAX_CHARS})
        if len(stdin) > _MAX_CODE_BYTES:
            return f"The code of all calls is longer than {_MAX_CODE_BYTES} bytes. The last call did not run.", state
        try:
            if time.monotonic() >= latest_s:  # to start each of many late calls would take too long
                raise TimeoutError
            exit_code, stdout, _ = self._sandbox.run({"program": self._program, "stdin": stdin}, latest_s)
        except TimeoutError:
            again = ", after the code of earlier calls had run again," if state else ""
            return f"TimeoutError: the code{again} did not end in {self._timeout_s:g} s. Nothing of it is kept.", state
        printed = _printed(stdout, len(state) + 1) if exit_code == 0 else None
        if printed is None:
            memory = f"{MEMORY_BYTES >> 20} MiB"
            return f"The code ended its interpreter, perhaps by using over {memory}. Nothing of it is kept.", state
        changed = [
            n for n, (text, (_, digest)) in enumerate(zip(printed, state, strict=False), 1) if _digest(text) != digest
        ]
        note = (
            f"(The code of earlier calls ran again, and call {changed[0]} printed something else.)\n" if changed else ""
        )
        return note + printed[-1], [*state, [code, _digest(printed[-1])]]


def _printed(stdout: bytes, num_pieces: int) -> list[str] | None:
    """Return what each piece printed; None if the code has written over it, perhaps with brackets without an end."""
    line = stdout.rpartition(b"\n")[2]
    if len(line) > _MAX_LINE_BYTES * num_pieces:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError, MemoryError):
        return None
    is_right = isinstance(found, list) and len(found) == num_pieces and all(isinstance(text, str) for text in found)
    return found if is_right else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()
