"""Judge of programs: the last Python block of a response, run against the tests of its prompt in a sandbox.

    response -> last ```python block -> one sandboxed interpreter per case (rewards/sandbox.py) -> 1.0 if all pass

A program that was judged by the same tests before is not run again: small policies repeat themselves.

An answer is {"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}.
"""

from __future__ import annotations

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

log = logging.getLogger(__name__)

MAX_VERDICTS_KEPT = 1 << 16
MAX_FILE_BYTES = 16 << 20  # of anything that a program writes, its output included
_SANDBOX = str(Path(__file__).with_name("sandbox.py"))
_BLOCK = re.compile(r"^([ \t]*)```(?:python3?|py)[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_SHAPES = '{"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}'


def last_program(response: str) -> str | None:
    """The last fenced block marked as Python, None without one. A block that is not closed was cut off: not counted.

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
    """Runs programs one after the other; says once what the operating system does not protect from."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        """`timeout_s` bounds all tests of one response together, `memory_bytes` the address space of each process."""
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._has_warned = False
        self._verdicts: dict[bytes, float] = {}  # by digest of program and answer

    def judge(self, answer: Any, response: str) -> float:
        """1.0 if the program passes every test, else 0.0.

        Raises:
            UserError: the answer has no tests that can be run.
            TimeoutError: the tests were not done in time.
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
        # Only a run that got to its end knows the token: leaving early with exit code 0 is no pass.
        token = secrets.token_hex(16)
        with self._run({"program": program, "tests": tests, "token": token, "stdin": ""}, deadline_s) as run:
            return run.code == 0 and run.result.read() == token.encode()

    def _passes_case(self, program: str, case: dict[str, str], deadline_s: float) -> bool:
        with self._run({"program": program, "stdin": case["stdin"]}, deadline_s) as run:
            return run.code == 0 and same_output(run.stdout.read().decode(errors="replace"), case["stdout"])

    @contextlib.contextmanager
    def _run(self, job: dict[str, Any], deadline_s: float) -> Iterator[_Run]:
        """One sandboxed interpreter in a folder of its own, dead before the body runs."""
        limits = {"memory_bytes": self.memory_bytes, "cpu_s": int(self.timeout_s) + 1, "file_bytes": MAX_FILE_BYTES}
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            tempfile.TemporaryFile() as result,
        ):
            stdin.write(json.dumps({**job, **limits}).encode())
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", _SANDBOX, str(result.fileno())],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(result.fileno(),),
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"the program was not done in {self.timeout_s:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._report_protection(stderr)
            for file in (stdout, result):
                file.seek(0)
            yield _Run(code, stdout, result)

    def _report_protection(self, stderr: IO[bytes]) -> None:
        """The sandbox writes first what the operating system refused."""
        if self._has_warned:
            return
        stderr.seek(0)
        missing = stderr.readline(1000).decode(errors="replace").partition("sandbox lacks: ")[2].strip()
        if missing:
            log.warning("reward.kind = 'code': programs are not kept from everything here: %s", missing)
        self._has_warned = True


class _Run:
    def __init__(self, code: int, stdout: IO[bytes], result: IO[bytes]) -> None:
        self.code, self.stdout, self.result = code, stdout, result


def same_output(found: str, wanted: str) -> bool:
    """Equal line by line, but for blanks at the end of lines and empty lines at the end."""
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _tests_of(answer: Any) -> tuple[str | None, list[dict[str, str]]]:
    """(tests, cases) of an answer. Raises UserError where neither can be run: no response could pass."""
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
