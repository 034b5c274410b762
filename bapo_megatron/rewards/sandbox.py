"""Run one untrusted program: `python -I sandbox.py RESULT_FD TOKEN_FD REPORT_FD < job`, started by `rewards/code.py`.

The process permanently gives up, in this order: resources (rlimits), capabilities, changes to files outside its
working directory and signals to other processes (Landlock), and every system call that honest programs do not need
(seccomp). Landlock needs Linux 5.13, seccomp x86_64 or aarch64. The socket REPORT_FD gets {"lacking": [...]}, naming
what the system cannot take away, and the descriptor from which the judge learns of refused calls; it closes before the
program starts. docs/security.md says what remains possible. The limits do not protect against attacks on the kernel.

This program uses the standard library only and imports nothing from the package.
"""

import _socket
import builtins
import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SECCOMP = {"x86_64": 317, "aarch64": 277}  # number of the system call
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as seccomp calls them

MAX_LANDLOCK_ABI = 6  # the newest version that this program uses
MAX_OPEN_FILES = 64
SENDMSG_FD = MAX_OPEN_FILES  # sendmsg is allowed on this descriptor alone, which the program can never open
_MAX_SIGNALS_PENDING = 64  # the system counts them per user
MAX_SHARED_BYTES = 16 << 20  # per shared mapping

_ALL = 0xFFFFFFFF
_STREAM = (1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800)  # SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC
_ACCESS, _ACCESSES = 0x203, (0, 1, 2, 0x201, 0x202)  # O_TRUNC needs write access: Landlock ignores it before Linux 6.2
# Arguments that are allowed: (argument, bits to compare, their values). `filter_code` adds the arguments of mmap and
# of calls that take process ids.
CHECKS: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "open": [(1, _ACCESS, _ACCESSES)],
    "openat": [(2, _ACCESS, _ACCESSES)],
    # the flags of a thread, in glibc and musl: threads share their descriptors
    "clone": [(0, _ALL, (0x3D0F00, 0x7D0F00))],
    # F_DUPFD to F_SETLKW, F_OFD_GETLK to F_OFD_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
    "fcntl": [(1, _ALL, (*range(8), *range(36, 39), 1030, 1032))],
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2
    "ioctl": [(1, _ALL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A))],
    # PR_GET_ PDEATHSIG, DUMPABLE, NAME, SECCOMP, NO_NEW_PRIVS; PR_SET_NAME, PR_CAPBSET_READ, PR_SET_VMA
    "prctl": [(0, _ALL, (2, 3, 16, 21, 39, 15, 23, 0x53564D41))],
    # none or CLOSE_RANGE_CLOEXEC: a thread with its own descriptors could hide what they hold
    "close_range": [(2, _ALL, (0, 4))],
    # not FALLOC_FL_KEEP_SIZE, which RLIMIT_FSIZE does not bound
    "fallocate": [(1, _ALL, (0,))],
    # AF_UNIX streams: a datagram socket can be aimed at another process
    "socketpair": [(0, _ALL, (1,)), (1, _ALL, _STREAM)],
    # without an address
    "sendto": [(5, _ALL, (0,))],
    # it could hide open files in a socket
    "sendmsg": [(0, _ALL, (SENDMSG_FD,))],
}


def main() -> None:
    job = json.load(sys.stdin.buffer)
    result_fd, token_fd, report_fd = (_moved_down(int(fd)) for fd in sys.argv[1:])
    _replace_stdin(job["stdin"])
    confine(job, report_fd)
    if "tests" in job:
        run_tests(job["program"], job["tests"], token_fd, result_fd)
    else:
        os.closerange(min(result_fd, token_fd), max(result_fd, token_fd) + 1)
        _execute(job["program"], "__main__")


def confine(job: dict[str, Any], report_fd: int) -> None:
    """Give up what a program must not have, and report to the judge what the system cannot take away."""
    report = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, _moved_up(report_fd))
    lacking = []
    _limit_resources(job["memory_bytes"], job["cpu_s"], job["file_bytes"])
    _drop_capabilities()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after the capabilities: a change of credentials may clear it
    if os.getppid() != job["judge"]:
        os._exit(1)  # the judge had already ended
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        lacking.append("no_new_privs")
    if not _confine_files(os.getcwd()):
        lacking.append("files elsewhere may be changed (no Landlock)")
    is_confined, listener = _confine_calls(job["machine"], job["calls"])
    if not is_confined:
        lacking.append("network and other processes are open (no seccomp)")
        with contextlib.suppress(OSError, ValueError):  # second best: it counts all processes of the user
            resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))
    elif listener is None:
        lacking.append("refused system calls go unnamed (no seccomp notification)")
    descriptors = [] if listener is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))]
    report.sendmsg([json.dumps({"lacking": lacking}).encode()], descriptors)
    report.close()
    if listener is not None:
        os.close(listener)


def _moved_down(fd: int) -> int:
    """Move a descriptor to the lowest free number: a judge with many open files may have passed SENDMSG_FD itself."""
    lowest = os.dup(fd)
    os.close(fd)
    return lowest


def _moved_up(report_fd: int) -> int:
    """Move a descriptor to SENDMSG_FD if the limit on open files allows it."""
    try:
        fd = os.dup2(report_fd, SENDMSG_FD, inheritable=False)
    except OSError:
        return report_fd
    os.close(report_fd)
    return fd


def _limit_resources(memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_SIGPENDING: _MAX_SIGNALS_PENDING,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError says more


def _replace_stdin(text: str) -> None:
    """Replace the job on stdin by the program's input, so that the program cannot seek back to the job."""
    fd = os.memfd_create("stdin")
    data = memoryview(text.encode())
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def run_tests(program: str, tests: str, token_fd: int, result_fd: int) -> None:
    """Run the program, then its tests in the same namespace, and report the token once they have passed.

    The tests are compiled first and see the builtins as they were before the program, which may have replaced them.
    It may also have replaced any function that is looked up by name. No memory holds the token before the tests have
    passed. A program that knows this file can still forge a verdict; see docs/security.md.
    """
    run, read, write, leave, trace, profile = exec, os.read, os.write, os._exit, sys.settrace, sys.setprofile
    builtins_now, builtins_before = vars(builtins), dict(vars(builtins))
    compiled = compile(tests, "<tests>", "exec")
    namespace = _execute(program, "solution")
    trace(None)  # a tracer could jump over an assert
    profile(None)
    builtins_now.clear()
    builtins_now.update(builtins_before)
    namespace["__builtins__"] = builtins_now
    run(compiled, namespace)
    write(result_fd, read(token_fd, 64))
    leave(0)


def _execute(program: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look there
    exec(compile(program, "<program>", "exec"), module.__dict__)
    return module.__dict__


def _drop_capabilities() -> None:
    """Drop all capabilities. Without them, root is an ordinary user that owns root's files."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _LIBC.capset(header, ctypes.create_string_buffer(24))


def _confine_files(folder: str) -> bool:
    """Let the process change only files below `folder` and /dev/null, and signal no other process.

    Returns False without Landlock.
    """
    create, add, restrict = 444, 445, 446  # the same on every machine
    abi = min(_LIBC.syscall(create, None, 0, 1), MAX_LANDLOCK_ABI)
    if abi < 1:
        return False
    write_file, truncate, control_device = 1 << 1, 1 << 14, 1 << 15
    changes = write_file | sum(1 << bit for bit in range(4, 13))  # remove_dir ... make_sym
    changes |= (1 << 13 if abi >= 2 else 0) | (truncate if abi >= 3 else 0)  # refer: renames between folders
    changes |= control_device if abi >= 5 else 0
    network = 0b11 if abi >= 4 else 0  # bind and connect TCP
    scope = 0b11 if abi >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("=QQQ", changes, network, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _LIBC.syscall(create, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    if ruleset < 0:
        return False
    for path, allowed in ((folder, changes), ("/dev/null", changes & (write_file | truncate | control_device))):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, fd))
        is_added = _LIBC.syscall(add, ruleset, 1, rule, 0) == 0
        os.close(fd)
        if not is_added:
            return False
    is_confined = _LIBC.syscall(restrict, ruleset, 0) == 0
    os.close(ruleset)
    return is_confined


def _confine_calls(machine: str, calls: dict[str, dict[str, int]]) -> tuple[bool, int | None]:
    """Refuse system calls (seccomp). Threads are allowed, processes are not.

    Args:
        calls: numbers by answer ("allow", "check", "missing", "refuse") and name; empty for an unknown machine.

    Returns:
        (whether calls are refused, the descriptor that tells the judge which, or None if the system has none).
    """
    if not calls or sys.byteorder != "little":
        return False, None
    told = 0x7FC00000  # the judge answers, with the same error numbers as below
    code = filter_code(machine, calls, refused=told, unknown=told)
    new_listener = 1 << 3
    program, _instructions = _loadable(code)
    listener = _LIBC.syscall(_SECCOMP[machine], 1, new_listener, program)
    if listener >= 0:
        return True, listener
    code = filter_code(machine, calls, refused=0x50000 | errno.EPERM, unknown=0x50000 | errno.ENOSYS)
    program, _instructions = _loadable(code)
    return _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0, None


def filter_code(
    machine: str, calls: dict[str, dict[str, int]], refused: int, unknown: int
) -> list[tuple[int, int, int, int]]:
    """Return BPF that allows calls by number and arguments, and answers the others with `refused` or `unknown`.

    It never kills. Calls of another architecture or with an x32 number are unknown.
    """
    load, mask, equal, above, any_bit, answer = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06  # ld [k], and, jeq, jgt, jset, ret
    at_least = 0x35
    allowed, missing = 0x7FFF0000, 0x50000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (answer, 0, 0, unknown), (load, 0, 0, 0)]

    def low(argument: int) -> int:
        return 16 + 8 * argument  # offset in struct seccomp_data

    def add_all(kind: str, value: int) -> None:
        for first, last in _ranges(calls[kind].values()):
            code.extend([(at_least, 0, 2, first), (above, 1, 0, last), (answer, 0, 0, value)])

    def add(number: int, rule: list[tuple[int, int, int, int]]) -> None:
        code.extend([(equal, 0, len(rule), number), *rule])

    add_all("allow", allowed)
    own = os.getpid()
    checks = CHECKS | {name: [(0, _ALL, (own,))] for name in ("kill", "tgkill")}  # kill(0) reaches the whole group
    checks["prlimit64"] = [(0, _ALL, (own, 0))]
    for name, number in calls["check"].items():
        if name == "mmap":
            huge_or_locked, shared = 0x40000 | 0x2000, 1
            rule = [(load, 0, 0, low(3)), (any_bit, 6, 0, huge_or_locked), (any_bit, 0, 4, shared)]
            rule += [(load, 0, 0, low(1) + 4), (equal, 0, 3, 0), (load, 0, 0, low(1)), (above, 1, 0, MAX_SHARED_BYTES)]
            rule += [(answer, 0, 0, allowed), (answer, 0, 0, refused)]
        else:
            rule = []
            for argument, bits, values in checks[name]:
                tests = [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
                rule += [(load, 0, 0, low(argument)), (mask, 0, 0, bits), *tests, (answer, 0, 0, refused)]
            rule.append((answer, 0, 0, allowed))
        add(number, rule)
    add_all("missing", missing)
    add_all("refuse", refused)
    return [*code, (answer, 0, 0, unknown)]


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the sorted numbers as ranges. Example: [3, 1, 2, 7] is [(1, 3), (7, 7)]"""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _loadable(code: list[tuple[int, int, int, int]]) -> tuple[Any, Any]:
    """Return struct sock_fprog and the instructions that it points to; keep them alive as long as the struct."""
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    return program, instructions


if __name__ == "__main__":
    main()
