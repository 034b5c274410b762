"""Judge of programs: the last Python block of a response, run against the tests of its prompt in a sandbox.

    response -> last ```python block -> one sandboxed interpreter per case (rewards/sandbox.py) -> 1.0 if all pass

The judge remembers verdicts, because small policies repeat themselves.

An answer is {"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.scratch import exceeds, scratch_folder

log = logging.getLogger(__name__)

MAX_VERDICTS_KEPT = 1 << 16
MAX_FILE_BYTES = 16 << 20  # for each file that a program writes, its output included
MAX_BYTES = 64 << 20  # for all of them together
MAX_ENTRIES = 1024  # files and folders
MAX_THREADS = 256
_WATCH_S = 0.05
_SANDBOX = str(Path(__file__).with_name("sandbox.py"))
_BLOCK = re.compile(r"^([ \t]*)```(?:python3?|py)[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_SHAPES = '{"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}'


def last_program(response: str) -> str | None:
    """Return the last closed code block marked as Python, or None.

    A block that is indented as a whole, as in a list, loses the indentation of its fence.
    """
    blocks = _BLOCK.findall(response)
    return _outdented(*blocks[-1]) if blocks else None


def _outdented(indent: str, block: str) -> str:
    lines = block.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first.startswith(indent):  # only the fence is indented: a program begins in the first column
        return block
    return "\n".join(line.removeprefix(indent) for line in lines)


class CodeJudge:
    """Runs programs one after the other; warns once about protection that the operating system lacks."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        """Judge within `timeout_s` per response, with `memory_bytes` of address space per process."""
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._has_warned = False
        self._verdicts: dict[bytes, float] = {}  # by digest of program and answer

    def judge(self, answer: Any, response: str) -> float:
        """Return 1.0 if the program passes every test, else 0.0.

        Raises:
            UserError: the answer has no tests that can be run.
            TimeoutError: the tests did not end in time.
        """
        tests, cases = _tests_of(answer)
        program = last_program(response)
        if program is None:
            return 0.0
        digest = hashlib.sha256(json.dumps([program, answer]).encode()).digest()
        if digest not in self._verdicts:
            if len(self._verdicts) == MAX_VERDICTS_KEPT:
                self._verdicts.clear()
            self._verdicts[digest] = float(self._passes(program, tests, cases))
        return self._verdicts[digest]

    def _passes(self, program: str, tests: str | None, cases: list[dict[str, str]]) -> bool:
        deadline_s = time.monotonic() + self.timeout_s
        if tests is not None and not self._passes_tests(program, tests, deadline_s):
            return False
        return all(self._passes_case(program, case, deadline_s) for case in cases)

    def _passes_tests(self, program: str, tests: str, deadline_s: float) -> bool:
        token = secrets.token_hex(16)  # read after the tests, so that leaving early with exit code 0 is no pass
        code, _, result = self._run({"program": program, "tests": tests, "stdin": ""}, token, deadline_s)
        return code == 0 and result == token.encode()

    def _passes_case(self, program: str, case: dict[str, str], deadline_s: float) -> bool:
        code, stdout, _ = self._run({"program": program, "stdin": case["stdin"]}, "", deadline_s)
        return code == 0 and same_output(stdout.decode(errors="replace"), case["stdout"])

    def _run(self, job: dict[str, Any], token: str, deadline_s: float) -> tuple[int, bytes, bytes]:
        """Run one sandboxed interpreter in a folder of its own; return its exit code, output and result."""
        limits = {"memory_bytes": self.memory_bytes, "cpu_s": int(self.timeout_s) + 1, "file_bytes": MAX_FILE_BYTES}
        with (
            scratch_folder("bapo-program-") as folder,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            tempfile.TemporaryFile() as result,
            _pipe_holding(token) as token_fd,
        ):
            stdin.write(json.dumps({**job, **limits}).encode())
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", _SANDBOX, str(result.fileno()), str(token_fd)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(result.fileno(), token_fd),
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                code = self._wait(process, folder, deadline_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._report_protection(stderr)
            for file in (stdout, result):
                file.seek(0)
            return code, stdout.read(), result.read()

    def _wait(self, process: subprocess.Popen[bytes], folder: str, deadline_s: float) -> int:
        """Return the exit code, -SIGKILL for a program over its limits. Raises TimeoutError."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left_s, _WATCH_S))
            if exceeds(folder, process.pid, max_entries=MAX_ENTRIES, max_bytes=MAX_BYTES, max_threads=MAX_THREADS):
                return -signal.SIGKILL
        raise TimeoutError(f"the program did not end in {self.timeout_s:g} s")

    def _report_protection(self, stderr: IO[bytes]) -> None:
        """Log the first line of stderr if the sandbox names missing protection there."""
        if self._has_warned:
            return
        stderr.seek(0)
        missing = stderr.readline(1000).decode(errors="replace").partition("sandbox lacks: ")[2].strip()
        if missing:
            log.warning("reward.kind = 'code': this system protects from programs only in part: %s", missing)
        self._has_warned = True


@contextlib.contextmanager
def _pipe_holding(text: str) -> Iterator[int]:
    """Yield the reading end of a pipe that holds `text`."""
    reader, writer = os.pipe()
    try:
        os.write(writer, text.encode())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def same_output(found: str, wanted: str) -> bool:
    """Compare line by line, ignoring blanks at line ends and empty lines at the end."""
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _tests_of(answer: Any) -> tuple[str | None, list[dict[str, str]]]:
    """Return an answer's (tests, cases). Raises UserError if neither can be run: no response could pass."""
    if not isinstance(answer, dict) or not answer.keys() & {"tests", "cases"}:
        raise _wrong("has neither tests nor cases", answer)
    tests, cases = answer.get("tests"), answer.get("cases")
    if tests is None and not cases:
        raise _wrong("has no cases", answer)
    if tests is not None and not (isinstance(tests, str) and tests.strip()):
        raise _wrong('has "tests" that are no Python text', answer)
    cases = [] if cases is None else cases
    if not isinstance(cases, list) or not all(map(_is_case, cases)):
        raise _wrong('has "cases" that are no list of {"stdin": text, "stdout": text}', answer)
    return tests, cases


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and isinstance(case.get("stdin"), str) and isinstance(case.get("stdout"), str)


def _wrong(what: str, answer: Any) -> UserError:
    return UserError(f"reward.kind = 'code': an answer {what}; it must be {_SHAPES}, not {answer!r:.200}")
