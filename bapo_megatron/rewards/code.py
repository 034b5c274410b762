"""Judge of programs: it runs the last Python block of a response against its prompt's tests, in a sandbox.

    response -> last ```python block -> one sandboxed interpreter per case (rewards/sandbox.py) -> 1.0 if all pass

The judge remembers verdicts, because small policies repeat themselves.

An answer is {"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.config.system_calls import calls_of
from bapo_megatron.errors import UserError
from bapo_megatron.rewards.refusals import Refusals
from bapo_megatron.rewards.scratch import exceeds, scratch_folder
from bapo_megatron.rewards.stated import spoken
from bapo_megatron.rewards.verdicts import Refused

log = logging.getLogger(__name__)

MAX_VERDICTS_KEPT = 1 << 16
MAX_WRITTEN_BYTES = 16 << 20  # limit of each file that a program writes, including its output
MEMORY_BYTES = 1 << 30  # address space of a process
MAX_BYTES = 64 << 20  # limit of all files together, including shared memory
MAX_ENTRIES = 1024  # files and folders
MAX_THREADS = 256
_BOUNDS = {
    "max_entries": MAX_ENTRIES,
    "max_bytes": MAX_BYTES,
    "max_file_bytes": MAX_WRITTEN_BYTES,
    "max_threads": MAX_THREADS,
}
_WATCH_S = 0.05
MORE_CPU_S = 1  # CPU time beyond the deadline: ends a program if its judge does not
SANDBOX = str(Path(__file__).with_name("sandbox.py"))  # the script that runs one program
_BLOCK = re.compile(r"^([ \t]*)```(?:python3?|py)[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
_SHAPES = '{"tests": "assert f(1) == 2"} and/or {"cases": [{"stdin": "1 2", "stdout": "3"}, ...]}'


def last_program(response: str, in_thought: bool = False) -> str | None:
    """Return the last closed code block marked as Python outside thoughts, or None.

    If the whole block is indented, as in a list, the indentation of its fence is removed.
    """
    blocks = _BLOCK.findall(spoken(response, in_thought))
    return _outdented(*blocks[-1]) if blocks else None


def _outdented(indent: str, block: str) -> str:
    lines = block.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first.startswith(indent):  # only the fence is indented: a program begins in the first column
        return block
    return "\n".join(line.removeprefix(indent) for line in lines)


class ProgramReward(Refused, float):
    """Reward of a program and, if it failed, the system calls that the sandbox refused."""

    @classmethod
    def of(cls, reward: float, refused: Iterable[str]) -> "ProgramReward":
        found = cls(reward)
        found.refused_calls = () if reward == 1.0 else tuple(refused)
        return found


class ProgramTimeoutError(Refused, TimeoutError):
    """A program that missed its deadline, and the system calls that the sandbox refused."""

    def __init__(self, message: str, refused: Iterable[str]) -> None:
        super().__init__(message)
        self.refused_calls = tuple(refused)


class CodeJudge:
    """Judge of one program after another."""

    def __init__(self, timeout_s: float, allowed_calls: Collection[str] = ()) -> None:
        """Judge within `timeout_s` per response."""
        self.timeout_s = timeout_s
        self.sandbox = Sandbox("reward.kind = 'code'", timeout_s, allowed_calls)
        self._verdicts: dict[bytes, ProgramReward] = {}  # by digest of program and answer

    def judge(self, answer: Any, response: str, in_thought: bool = False) -> ProgramReward:
        """Return 1.0 if the program passes every test, or 0.0 with the system calls that the sandbox refused.

        Raises:
            UserError: the answer has no tests that can run.
            ProgramTimeoutError: the tests did not end in time.
        """
        tests, cases = _tests_of(answer)
        program = last_program(response, in_thought)
        if program is None:
            return ProgramReward(0.0)
        digest = hashlib.sha256(json.dumps([program, answer]).encode()).digest()
        if digest not in self._verdicts:
            if len(self._verdicts) == MAX_VERDICTS_KEPT:
                self._verdicts.clear()
            refused: dict[str, None] = {}
            try:
                passes = self.passes(program, tests, cases, refused)
            except TimeoutError as error:
                raise ProgramTimeoutError(str(error), refused) from None
            self._verdicts[digest] = ProgramReward.of(float(passes), refused)
        return self._verdicts[digest]

    def passes(self, program: str, tests: str | None, cases: list[dict[str, str]], refused: dict[str, None]) -> bool:
        """Return whether a program passes within `timeout_s`; add the names of refused system calls to `refused`."""
        deadline_s = time.monotonic() + self.timeout_s
        if tests is not None and not self._passes_tests(program, tests, refused, deadline_s):
            return False
        return all(self._passes_case(program, case, refused, deadline_s) for case in cases)

    def _passes_tests(self, program: str, tests: str, refused: dict[str, None], deadline_s: float) -> bool:
        token = secrets.token_hex(16)  # read after the tests: exiting early with code 0 must not count as a pass
        job = {"program": program, "tests": tests, "stdin": ""}
        code, _, result = self.sandbox.run(job, deadline_s, token, refused)
        return code == 0 and result == token.encode()

    def _passes_case(self, program: str, case: dict[str, str], refused: dict[str, None], deadline_s: float) -> bool:
        job = {"program": program, "stdin": case["stdin"]}
        code, stdout, _ = self.sandbox.run(job, deadline_s, refused=refused)
        return code == 0 and same_output(stdout.decode(errors="replace"), case["stdout"])


class Sandbox:
    """Runner of one program after another; it warns once about protection that the operating system lacks."""

    def __init__(
        self, setting: str, timeout_s: float, allowed_calls: Collection[str] = (), *, is_repeatable: bool = False
    ) -> None:
        """Run programs that use up to `timeout_s` of a processor.

        Args:
            setting: the setting that asks for programs to run, for messages.
            allowed_calls: system calls that programs may make in addition to the usual ones.
            is_repeatable: whether sets and hashes are the same each time.
        """
        self.timeout_s = timeout_s
        self.lacking: tuple[str, ...] = ()  # protection that the system lacks, found by the first program
        self._setting = setting
        self._calls = calls_of(platform.machine(), allowed_calls)
        # -I ignores PYTHONHASHSEED; -P and -s are the rest of what it does, as no other variable of Python is passed
        self._flags = ("-P", "-s", "-B") if is_repeatable else ("-I", "-B")
        self._environment = {"PYTHONHASHSEED": "0"} if is_repeatable else {}

    def run(
        self, job: dict[str, Any], deadline_s: float, token: str = "", refused: dict[str, None] | None = None
    ) -> tuple[int, bytes, bytes]:
        """Run one sandboxed interpreter in its own folder; return its exit code, output and result.

        Args:
            job: "program" and "stdin", and perhaps "tests".
            deadline_s: on the clock of time.monotonic.
            token: the result if the tests pass.
            refused: gets the names of refused system calls.

        Raises:
            TimeoutError: the program did not end before the deadline.
        """
        surroundings = {
            "memory_bytes": MEMORY_BYTES,
            "cpu_s": int(self.timeout_s) + MORE_CPU_S,
            "file_bytes": MAX_WRITTEN_BYTES,
            "machine": platform.machine(),
            "calls": self._calls,
            "judge": os.getpid(),
        }
        ours, theirs = socket.socketpair()
        with (
            scratch_folder("bapo-program-") as folder,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            tempfile.TemporaryFile() as result,
            _pipe_holding(token) as token_fd,
            contextlib.closing(Refusals(ours, platform.machine(), self._calls)) as refusals,
        ):
            stdin.write(json.dumps(job | surroundings).encode())
            stdin.seek(0)
            fds = (result.fileno(), token_fd, theirs.fileno())
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, *self._flags, SANDBOX, *map(str, fds)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=fds,
                    cwd=folder,
                    env={
                        "PATH": os.defpath,
                        "HOME": folder,
                        "TMPDIR": folder,
                        "LANG": "C.UTF-8",
                        "OMP_NUM_THREADS": "1",
                        **self._environment,
                    },
                    start_new_session=True,
                )
            try:
                has_ended = self._wait(process, folder, refusals, deadline_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if refused is not None:
                    refused.update(refusals.names)
            self._report_protection(refusals)
            if not has_ended:
                return -signal.SIGKILL, b"", b""
            for file in (stdout, result):
                file.seek(0)
            return process.returncode, stdout.read(), result.read()

    def _wait(self, process: subprocess.Popen[bytes], folder: str, refusals: Refusals, deadline_s: float) -> bool:
        """Return True if the program ended by itself, False if it exceeded its limits. Raises TimeoutError."""
        ended = os.pidfd_open(process.pid)
        try:
            poller = select.poll()
            poller.register(ended, select.POLLIN)
            refusals.register(poller)
            next_watch_s = time.monotonic() + _WATCH_S
            while (now_s := time.monotonic()) < deadline_s:
                events = dict(poller.poll(max(0.0, min(deadline_s, next_watch_s) - now_s) * 1000))
                if ended in events:
                    return True
                for fd, event in events.items():
                    refusals.on_event(fd, event, poller)
                if time.monotonic() >= next_watch_s:
                    if exceeds(folder, process.pid, deadline_s, **_BOUNDS):
                        return False
                    next_watch_s = time.monotonic() + _WATCH_S
            raise TimeoutError(f"the program did not end in {self.timeout_s:g} s")
        finally:
            os.close(ended)

    def _report_protection(self, refusals: Refusals) -> None:
        """Log the protection that the system lacks, according to the sandbox."""
        refusals.read_report()
        if refusals.lacking and not self.lacking:
            missing = ", ".join(refusals.lacking)
            log.warning("%s: this system protects from programs only in part: %s", self._setting, missing)
            self.lacking = refusals.lacking


@contextlib.contextmanager
def _pipe_holding(text: str) -> Iterator[int]:
    """Yield the read end of a pipe that holds `text`."""
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
    """Return an answer's (tests, cases). Raises UserError if neither can run, so that no response could pass."""
    if not isinstance(answer, dict) or not answer.keys() & {"tests", "cases"}:
        raise _wrong("has neither tests nor cases", answer)
    tests, cases = answer.get("tests"), answer.get("cases")
    if tests is None and not cases:
        raise _wrong("has no cases", answer)
    if tests is not None and not (isinstance(tests, str) and tests.strip()):
        raise _wrong('has "tests" that are not Python text', answer)
    cases = [] if cases is None else cases
    if not isinstance(cases, list) or not all(map(_is_case, cases)):
        raise _wrong('has "cases" that are not a list of {"stdin": text, "stdout": text}', answer)
    return tests, cases


def _is_case(case: Any) -> bool:
    return isinstance(case, dict) and isinstance(case.get("stdin"), str) and isinstance(case.get("stdout"), str)


def _wrong(what: str, answer: Any) -> UserError:
    return UserError(f"reward.kind = 'code': an answer {what}; it must be {_SHAPES}, not {answer!r:.200}")
