"""Run pieces of Python in one namespace: the program that rewards/interpreter.py starts in the sandbox.

It reads {"pieces": [...], "max_chars": n} from stdin, and writes one line last: a JSON list of what each piece printed.
It uses the standard library only and imports nothing from the package.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any


class Output(io.TextIOBase):
    """The first characters of what is written."""

    def __init__(self, max_chars: int) -> None:
        self._pieces: list[str] = []
        self._room = max_chars
        self._num_left_out = 0

    def write(self, text: str) -> int:
        kept = text[: self._room]
        self._pieces.append(kept)
        self._room -= len(kept)
        self._num_left_out += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        left_out = f"\n... and {self._num_left_out} more characters" if self._num_left_out else ""
        return "".join(self._pieces) + left_out


def main() -> None:
    """Run the pieces, and tell what they printed."""
    job, stdout = json.load(sys.stdin), sys.stdout
    random.seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # dataclasses and pickle look there
    printed = [run(code, f"<call {n}>", module.__dict__, job["max_chars"]) for n, code in enumerate(job["pieces"], 1)]
    stdout.write("\n" + json.dumps(printed))
    stdout.flush()
    os._exit(0)  # threads of the pieces may still run


def run(code: str, name: str, namespace: dict[str, Any], max_chars: int) -> str:
    """Run a piece as an interactive interpreter does; return what it printed, or its traceback."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
    output = Output(max_chars)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            body = ast.parse(code, name).body
            last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
            exec(compile(ast.Module(body, []), name, "exec"), namespace)
            exec(compile(ast.Interactive(last), name, "single"), namespace)  # shows a value
        except BaseException as error:  # also SystemExit: the interpreter stays
            frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
            if isinstance(error, SyntaxError) and error.filename == name:
                frames = None
            traceback.print_exception(error.with_traceback(frames), file=output)
    return output.text()


if __name__ == "__main__":
    main()
