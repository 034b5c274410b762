"""Runs one untrusted program: `python -I sandbox.py RESULT_FD < job.json`, started by `rewards/code.py`.

The limits, in this order, are never lifted again: resources (rlimits), no capabilities, files may be changed in the
working directory only (Landlock), no network, no other process, no signal to one (seccomp). The last two need Linux
5.13 on x86_64 or aarch64; what is refused is said in the first line of stderr. They keep a careless or ordinarily
clever program from harm. They are no wall against somebody who attacks the kernel.

Standard library only: this is a program of its own, with nothing of the package.
"""

from __future__ import annotations

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

# System calls that are refused, by machine: (x86_64, aarch64), None where there is none. Numbers: asm/unistd.h.
_REFUSED = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # opens sockets without the system call
    "keyctl": (250, 219),
    "shmget": (29, 194),  # outlives the process
    "msgget": (68, 186),
    "semget": (64, 190),
}
_OWN_PROCESS_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CHMOD_FAMILY = {"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None)}
_CHOWN_FAMILY = {"fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utimensat": (280, 88)}
_XATTR_FAMILY = {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "fchmodat2": (452, 452)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def main() -> None:
    job = json.load(sys.stdin.buffer)
    result_fd = int(sys.argv[1])
    os.set_inheritable(result_fd, False)
    _replace_stdin(job["stdin"])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lacking = confine(job["memory_bytes"], job["cpu_s"], job["file_bytes"])
    if lacking:
        os.write(2, f"sandbox lacks: {', '.join(lacking)}\n".encode())
    if "tests" in job:
        _run_tests(job["program"], job["tests"], job.pop("token"), result_fd)
    else:
        os.close(result_fd)
        _execute(job["program"], "__main__")


def confine(memory_bytes: int, cpu_s: int, file_bytes: int) -> list[str]:
    """Give up what a program must not have; returns what could not be given up."""
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
        with contextlib.suppress(OSError, ValueError):  # counts all processes of the user: the second best
            resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))
    return lacking


def _replace_stdin(text: str) -> None:
    """The program reads its own input, and cannot seek back to the job."""
    fd = os.memfd_create("stdin")
    data = memoryview(text.encode())
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _run_tests(program: str, tests: str, token: str, result_fd: int) -> None:
    namespace = _execute(program, "solution")
    exec(compile(tests, "<tests>", "exec"), namespace)
    os.write(result_fd, token.encode())
    os._exit(0)


def _execute(program: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look there
    exec(compile(program, "<program>", "exec"), module.__dict__)
    return module.__dict__


def _drop_capabilities() -> None:
    """Root without capabilities is an ordinary user, but for the files that it owns."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    _LIBC.capset(header, ctypes.create_string_buffer(24))


def _confine_files(folder: str) -> bool:
    """Landlock: anything may be read, and changed below `folder` and in /dev/null only. False where it is missing."""
    create, add, restrict = 444, 445, 446  # the same on every machine
    abi = _LIBC.syscall(create, None, 0, 1)
    if abi < 1:
        return False
    write_file, truncate = 1 << 1, 1 << 14
    changes = write_file | sum(1 << bit for bit in range(4, 13))  # remove_dir ... make_sym
    changes |= (1 << 13 if abi >= 2 else 0) | (truncate if abi >= 3 else 0)  # refer: renames between folders
    attribute = ctypes.create_string_buffer(struct.pack("=Q", changes))
    ruleset = _LIBC.syscall(create, attribute, 8, 0)
    if ruleset < 0:
        return False
    for path, allowed in ((folder, changes), ("/dev/null", changes & (write_file | truncate))):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, fd))
        is_added = _LIBC.syscall(add, ruleset, 1, rule, 0) == 0
        os.close(fd)
        if not is_added:
            return False
    is_confined = _LIBC.syscall(restrict, ruleset, 0) == 0
    os.close(ruleset)
    return is_confined


def _confine_calls() -> bool:
    """seccomp: see _REFUSED; threads are allowed, processes are not. False where it is missing."""
    column, architecture = _ARCHITECTURES.get(platform.machine(), (None, 0))
    if column is None or sys.byteorder != "little":
        return False
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld [k]; jeq; jge; jset; ret
    allow, refuse, missing, kill = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38, 0x80000000  # EPERM, ENOSYS
    nr, arch, argument0 = 0, 4, 16  # offsets in struct seccomp_data; the low halves of arguments
    code = [(load, 0, 0, arch), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, nr)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # x32: the same calls under other numbers
    for table in (_REFUSED, _CHMOD_FAMILY, _CHOWN_FAMILY, _XATTR_FAMILY):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                code += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    code += [(equal, 0, 1, _CLONE3[column]), (answer, 0, 0, missing)]  # its flags are out of sight: use clone
    code += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, argument0), (any_bit, 1, 0, 0x10000)]  # CLONE_THREAD
    code += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    for numbers in _OWN_PROCESS_ONLY.values():
        code += [(equal, 0, 4, numbers[column]), (load, 0, 0, argument0), (equal, 1, 0, os.getpid())]
        code += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code.append((answer, 0, 0, allow))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    return _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0) == 0


if __name__ == "__main__":
    main()
