"""The table of system calls, the filter made of it for each machine, and the calls that honest programs make."""

import errno
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bapo_megatron.rewards.code as code_module
import bapo_megatron.rewards.sandbox as sandbox_module
from bapo_megatron.config.system_calls import calls_of, system_calls
from tests.debian import require
from tests.unit import as_nobody
from tests.unit.honest_programs import HANG_S, HONEST, TOLERATED, judged

MACHINES = ("x86_64", "aarch64")
ALLOW, MISSING, REFUSE, UNKNOWN = "allow", "missing", "refuse", "unknown"
ANSWERS = {0x7FFF0000: ALLOW, 0x50000 | errno.ENOSYS: MISSING, 1: REFUSE, 2: UNKNOWN}
HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h",),
    "aarch64": ("aarch64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h"),
}
X32, I386, ARM = 0x40000000, 0x40000003, 0x40000028


class Filter:
    """The sandbox's filter of a machine, for the process `pid`, interpreted."""

    def __init__(self, machine: str, pid: int) -> None:
        self.architecture = sandbox_module.ARCHITECTURES[machine]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid)
            self._code = sandbox_module.filter_code(machine, calls_of(machine, ()), refused=1, unknown=2)

    def answer(self, number: int, *arguments: int, architecture: int | None = None) -> str:
        """Return the answer to a call."""
        words = [number, self.architecture if architecture is None else architecture, 0, 0]
        for argument in (*arguments, *[0] * 6)[:6]:
            words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
        accumulator = position = 0
        while True:
            operation, if_true, if_false, value = self._code[position]
            position += 1
            match operation:
                case 0x20:
                    accumulator = words[value // 4]
                case 0x54:
                    accumulator &= value
                case 0x06:
                    return ANSWERS[value]
                case _:
                    tests = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
                    tests[0x45] = bool(accumulator & value)
                    position += if_true if tests[operation] else if_false


@pytest.mark.parametrize("machine", MACHINES)
class TestNumbers:
    def table(self, machine: str) -> dict[str, int]:
        return {call.name: call.numbers[machine] for call in system_calls().values() if machine in call.numbers}

    def test_they_are_those_of_the_kernel(self, machine: str) -> None:
        text = Path(__file__).with_name("system_call_numbers.txt").read_text()
        rows = [entry.split() for entry in text.partition("\n")[2].split(",") if entry.strip()]
        column = 1 + MACHINES.index(machine)
        assert self.table(machine) == {row[0]: int(row[column]) for row in rows if row[column] != "-"}

    def test_they_are_those_of_the_headers_here(self, machine: str) -> None:
        found = [path for name in HEADERS[machine] if (path := Path("/usr/include", name)).exists()]
        if not found:
            pytest.skip("no kernel headers: apt-get install linux-libc-dev")
        lines = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", found[0].read_text(), re.MULTILINE)
        numbers, table = {name: int(number) for name, number in lines}, self.table(machine)
        common = numbers.keys() & table.keys()
        assert len(common) > 290
        assert {name: numbers[name] for name in common} == {name: table[name] for name in common}


@pytest.mark.parametrize("machine", MACHINES)
class TestFilter:
    """The filter is interpreted here for both machines, as the kernel would run it."""

    def test_every_number_gets_the_answer_of_the_table(self, machine: str) -> None:
        calls = calls_of(machine, ())
        expected = {number: answer for answer in (ALLOW, MISSING, REFUSE) for number in calls[answer].values()}
        checked, judge = set(calls["check"].values()), Filter(machine, pid=1)
        for number in {*range(2000), X32 - 1, 2**31 - 1, 2**31, 2**32 - 1} - checked:
            assert judge.answer(number) == expected.get(number, UNKNOWN), number

    def test_calls_of_another_architecture_are_unknown(self, machine: str) -> None:
        judge = Filter(machine, pid=1)
        others = {I386, ARM, *sandbox_module.ARCHITECTURES.values()} - {judge.architecture}
        for number in range(600):
            assert {judge.answer(number, architecture=other) for other in others} == {UNKNOWN}
            assert judge.answer(X32 | number) == UNKNOWN

    def test_arguments_decide_about_calls_that_are_checked(self, machine: str) -> None:
        judge, checked = Filter(machine, pid=77), calls_of(machine, ())["check"]
        for name, checks in sandbox_module.CHECKS.items():
            if name not in checked:  # open is openat on aarch64
                continue
            for index, (argument, bits, values) in enumerate(checks):
                right = [0] * 6
                for other, _, allowed in checks:
                    right[other] = allowed[0]
                near = {value + step for value in values for step in (-1, 0, 1)}
                for value in {*range(64), *(1 << bit for bit in range(32)), *near}:
                    given = [*right[:argument], value, *right[argument + 1 :]]
                    expected = ALLOW if value & bits in values else REFUSE
                    assert judge.answer(checked[name], *given) == expected, (name, index, value)
        for name in ("kill", "tgkill"):
            assert [judge.answer(checked[name], pid, pid, 9) for pid in (77, 78, 0, -1)] == [ALLOW, *[REFUSE] * 3]
        assert [judge.answer(checked["prlimit64"], pid) for pid in (77, 0, 78)] == [ALLOW, ALLOW, REFUSE]

    def test_shared_mappings_are_bounded(self, machine: str) -> None:
        judge, number = Filter(machine, pid=1), calls_of(machine, ())["check"]["mmap"]
        most, shared, private, locked, huge = sandbox_module.MAX_SHARED_BYTES, 0x21, 0x22, 0x2000, 0x40000
        for length, flags, expected in (
            (most, shared, ALLOW),
            (most + 1, shared, REFUSE),
            (1 << 32, shared, REFUSE),
            (1 << 33, private, ALLOW),
            (4096, private | locked, REFUSE),
            (4096, private | huge, REFUSE),
        ):
            assert judge.answer(number, 0, length, 3, flags) == expected, (length, flags)

    def test_every_call_that_is_checked_has_its_arguments_listed(self, machine: str) -> None:
        checked = calls_of(machine, ())["check"].keys()
        assert checked <= {*sandbox_module.CHECKS, "kill", "tgkill", "prlimit64", "mmap"}
        assert sandbox_module.CHECKS.keys() - checked <= {"open"}


@pytest.mark.parametrize("uses", HONEST)
class TestHonestPrograms:
    def test_it_runs(self, uses: str) -> None:
        passes, refused = judged(HONEST[uses])
        assert passes
        assert set(refused) <= TOLERATED.get(uses, set())

    @pytest.mark.slow
    def test_it_runs_as_an_ordinary_user(self, uses: str, as_ordinary_user: dict[str, tuple[bool, list[str]]]) -> None:
        passes, refused = as_ordinary_user[uses]
        assert passes
        assert set(refused) <= TOLERATED.get(uses, set()) - {"fchown", "chown", "fchownat"}

    @pytest.mark.slow
    def test_the_list_has_every_call_that_it_makes_without_the_sandbox(
        self, uses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sandbox itself records no call that gets ENOSYS."""
        require(["strace"], ["strace"])
        made = set(calls_made(HONEST[uses], tmp_path, monkeypatch))
        assert ("exit_group", ALLOW) in made
        assert {name for name, answer in made if answer == MISSING} <= {"clone3", "mbind"}  # glibc, OpenBLAS
        follow = {"connect", "execve"}  # after a socket, after a fork
        assert {name for name, answer in made if answer == REFUSE} <= TOLERATED.get(uses, set()) | follow
        assert {answer for _, answer in made} <= {ALLOW, MISSING, REFUSE}


@pytest.fixture(scope="module")
def as_ordinary_user() -> dict[str, tuple[bool, list[str]]]:
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user")
    command = [*as_nobody.COMMAND, sys.executable, "-B", "-m", "tests.unit.honest_programs"]
    limit_s = len(HONEST) * HANG_S
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True
    )
    return json.loads(run.stdout)


def calls_made(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Run a program under strace, without seccomp and Landlock; yield each call and what the filter would answer."""
    source = Path(code_module.SANDBOX).read_text()
    for old, new in (
        ("if not calls or", "if True or"),  # no seccomp
        ("if abi < 1:", "if True:"),  # no Landlock
        ('os.getppid() != job["judge"]', "False"),  # strace is in between
        ("resource.RLIMIT_NPROC, (256, 256)", "resource.RLIMIT_NPROC, (-1, -1)"),
    ):
        assert old in source
        source = source.replace(old, new)
    (folder / "sandbox.py").write_text(source)
    python, trace = folder / "python", folder / "trace"
    options = f"-ff -n -qq -e raw=all -e signal=none -o {trace}"
    python.write_text(f'#!/bin/sh\nexec strace {options} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(code_module, "SANDBOX", str(folder / "sandbox.py"))
    monkeypatch.setattr(sys, "executable", str(python))
    assert judged(program)[0]
    threads = {int(path.suffix[1:]): path.read_text().splitlines() for path in folder.glob("trace.*")}
    # The main thread sends the report; the lowest pid may belong to a later thread, as pids wrap around.
    sent = f"sendmsg({sandbox_module.SENDMSG_FD:#x},"
    [(pid, report)] = {pid: n for pid, lines in threads.items() for n, line in enumerate(lines) if sent in line}.items()
    judge = Filter(platform.machine(), pid)
    del threads[pid][: report + 1]
    for line in itertools.chain.from_iterable(threads.values()):
        if found := re.match(r"\[ *(\d+)\] (\w+)\(([^)<]*)", line):  # a call may be cut off: "(0 <detached ...>"
            arguments = [int(argument, 0) for argument in found[3].split(", ") if argument]
            yield found[2], judge.answer(int(found[1]), *arguments)
