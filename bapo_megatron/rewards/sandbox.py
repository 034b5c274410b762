"""Run one untrusted program: `python -I sandbox.py RESULT_FD TOKEN_FD < job.json`, started by `rewards/code.py`.

The process gives up, for good and in this order: resources (rlimits), capabilities, changes to files outside its
working directory and signals to other processes (Landlock), network, other processes and everything else that reaches
them (seccomp). Landlock needs Linux 5.13, seccomp x86_64 or aarch64; the first line of stderr names what is missing.
docs/security.md lists the attacks tried. The limits are no wall against an attack on the kernel.

Standard library only: this program imports nothing of the package.
"""

import builtins
import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2

MAX_LANDLOCK_ABI = 6  # the newest one that this program uses

_TABLE = os.path.join(os.path.dirname(__file__), "system_calls.txt")
# Numbers of system calls by machine: (x86_64, aarch64).
_OWN_PID_ONLY = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}  # prlimit64 also for 0, itself
_FCNTL, _IOCTL = (72, 25), (16, 29)
_REFUSED_FCNTL = (8, 10, 15, 1024)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others; F_SETLEASE: blocks others
_REFUSED_IOCTL = (0x8901, 0x8902, 0x5412, 0x540E, 0x541C)  # FIOSETOWN, SIOCSPGRP; TIOCSTI, TIOCSCTTY, TIOCLINUX
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def main() -> None:
    job = json.load(sys.stdin.buffer)
    result_fd, token_fd = map(int, sys.argv[1:])
    for fd in (result_fd, token_fd):
        os.set_inheritable(fd, False)
    _replace_stdin(job["stdin"])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lacking = confine(job["memory_bytes"], job["cpu_s"], job["file_bytes"])
    if lacking:
        os.write(2, f"sandbox lacks: {', '.join(lacking)}\n".encode())
    if "tests" in job:
        _run_tests(job["program"], job["tests"], token_fd, result_fd)
    else:
        os.closerange(min(result_fd, token_fd), max(result_fd, token_fd) + 1)
        _execute(job["program"], "__main__")


def confine(memory_bytes: int, cpu_s: int, file_bytes: int) -> list[str]:
    """Give up what a program must not have. Return what the system refuses to take away."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an OSError tells more
    lacking = []
    _drop_capabilities()
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        lacking.append("no_new_privs")
    if not _confine_files(os.getcwd()):
        lacking.append("files elsewhere may be changed (no Landlock)")
    if not _confine_calls():
        lacking.append("network and other processes are open (no seccomp)")
        with contextlib.suppress(OSError, ValueError):  # second best: it counts all processes of the user
            resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))
    return lacking


def _replace_stdin(text: str) -> None:
    """Put the program's input in place of the job, so that the program cannot seek back to it."""
    fd = os.memfd_create("stdin")
    data = memoryview(text.encode())
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _run_tests(program: str, tests: str, token_fd: int, result_fd: int) -> None:
    """Run the program, then its tests in the same namespace, and report the token once they have passed.

    The tests are compiled first, and see the builtins as they were before the program, which may have replaced them;
    so may it have replaced any function that is looked up by name. No memory holds the token before the tests have
    passed. A program that knows this file can still forge a verdict: docs/security.md.
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
    """Drop all capabilities: root without them is an ordinary user that owns root's files."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _LIBC.capset(header, ctypes.create_string_buffer(24))


def _confine_files(folder: str) -> bool:
    """Let the process change files below `folder` and /dev/null only, and signal no other. False without Landlock."""
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


def _refused_calls(column: int) -> list[int]:
    """Read the numbers of refused system calls from the column of a machine."""
    with open(_TABLE, encoding="utf-8") as table:
        rows = [line.split() for line in table if line.strip() and not line.startswith("#")]
    return [int(number) for _, *numbers in rows if (number := numbers[column]) != "-"]


def _confine_calls() -> bool:
    """Refuse system calls (seccomp). Threads are allowed, processes are not. False where seccomp is missing."""
    column, architecture = _ARCHITECTURES.get(platform.machine(), (None, 0))
    if column is None or sys.byteorder != "little":
        return False
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld [k]; jeq; jge; jset; ret
    allow, refuse, missing, kill = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38, 0x80000000  # EPERM, ENOSYS
    nr, arch, argument0, argument1 = 0, 4, 16, 24  # offsets in struct seccomp_data; the low halves of arguments
    code = [(load, 0, 0, arch), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, nr)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # x32: the same calls under other numbers

    def add(number: int, argument: int, values: tuple[int, ...], if_listed: int, otherwise: int) -> None:
        nonlocal code
        tests = [(equal, len(values) - i, 0, value) for i, value in enumerate(values)]
        rule = [(load, 0, 0, argument), *tests, (answer, 0, 0, otherwise), (answer, 0, 0, if_listed)]
        code += [(equal, 0, len(rule), number), *rule]

    for number in _refused_calls(column):
        code += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    code += [(equal, 0, 1, _CLONE3[column]), (answer, 0, 0, missing)]  # its flags are out of sight: use clone
    code += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, argument0), (any_bit, 1, 0, 0x10000)]  # CLONE_THREAD
    code += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    for name, numbers in _OWN_PID_ONLY.items():
        own = (os.getpid(), 0) if name == "prlimit64" else (os.getpid(),)  # kill(0) reaches the whole group
        add(numbers[column], argument0, own, allow, refuse)
    add(_FCNTL[column], argument1, _REFUSED_FCNTL, refuse, allow)
    add(_IOCTL[column], argument1, _REFUSED_IOCTL, refuse, allow)
    code.append((answer, 0, 0, allow))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    return _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0


if __name__ == "__main__":
    main()
