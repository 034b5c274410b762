"""Hostile programs against the sandbox, as a table: each attack, and the verdict that it must get.

Every attack runs as root (where the tests do) and as an ordinary user, with the newest Landlock, with one that lacks
signal scopes, and with the one of Linux 6.1. After each, a victim process of the same user must live on with its limits
and scheduling, a precious file, queues and shared memory must be intact, no datagram may have arrived, and nothing may
be left behind. `python -m tests.unit.test_sandbox_attacks ABI` runs the table as this user.
"""

import contextlib
import ctypes
import functools
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import bapo_megatron.rewards.code as code_module
from bapo_megatron.rewards.code import CodeJudge
from tests.hang import HANG_S
from tests.unit import as_nobody

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NEWEST_ABI, ABI_WITHOUT_SCOPES, ABI_OF_LINUX_6_1 = 6, 5, 2
ANSWER = {"tests": "assert f(1) == 2\nassert f(-1) == 0"}
SOLUTION = "\ndef f(x): return x + 1\n"

# (x86_64, aarch64), written down here so that a wrong number in the sandbox shows
NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chmod": (90, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close_range": (436, 436),
    "connect": (42, 203),
    "execve": (59, 221),
    "fallocate": (285, 47),
    "fanotify_init": (300, 262),
    "fchmodat2": (452, 452),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "futimesat": (261, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "migrate_pages": (256, 238),
    "mlock": (149, 228),
    "mount": (165, 40),
    "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "setns": (308, 268),
    "setxattr": (188, 5),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
    "splice": (275, 76),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "tgkill": (234, 131),
    "timer_create": (222, 107),
    "tkill": (200, 130),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}

PRELUDE = """
import array, builtins, ctypes, errno, fcntl, gc, mmap, os, resource, signal, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
VICTIM, JUDGE, PORT, PRECIOUS, NR, IDS, SOCKET = @
def call(name, *arguments):
    result = libc.syscall(NR[name], *arguments) if NR[name] is not None else (ctypes.set_errno(errno.EPERM), -1)[1]
    if result < 0: raise OSError(ctypes.get_errno(), name)
    return result
def refused(*attempts):
    for number, attempt in enumerate(attempts):
        try: attempt()
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS): raise
        else: raise SystemExit(f"attempt {number} was allowed")
"""


@dataclass(frozen=True)
class Attack:
    """A program that must get `reward`; None means that it must run out of time."""

    kind: str
    name: str
    program: str
    reward: float | None = 1.0
    timeout_s: float = HANG_S
    answer: Any = None


def refuse(kind: str, name: str, *attempts: str, setup: str = "") -> Attack:
    """Return an attack whose attempts, all expressions, must be refused."""
    return Attack(kind, name, f"{setup}\nrefused({', '.join(f'lambda: {a}' for a in attempts)}){SOLUTION}")


def confined(kind: str, name: str, program: str) -> Attack:
    """Return an attack that raises unless its effect stays inside; the solution after it must pass."""
    return Attack(kind, name, textwrap.dedent(program) + SOLUTION)


def fails(kind: str, name: str, program: str, **more: Any) -> Attack:
    """Return an attack that must get reward 0."""
    return Attack(kind, name, textwrap.dedent(program), 0.0, **more)


def holds(name: str, program: str) -> Attack:
    """Return an attack that the judge must end, though it waits forever."""
    return Attack("holding", name, f"{program}\nwhile True: signal.pause()", 0.0)


def hangs(name: str, program: str) -> Attack:
    return Attack("time", name, program, None, timeout_s=1.0)


FRAMES = """
import sys
def f(x):
    frame = sys._getframe()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, str) and len(value) == 32:
                for fd in range(3, 20):
                    try: os.write(fd, value.encode())
                    except OSError: pass
                os._exit(0)
        frame = frame.f_back
    return 0
"""
UNLINKED = """
libc.mmap.restype = ctypes.c_void_p
def filled(fd):
    os.posix_fallocate(fd, 0, 8 << 20)
    return fd
def unlinked():
    fd = filled(os.open("x", os.O_CREAT | os.O_RDWR))
    os.unlink("x")
    return fd
def mapped(fd, flags, length=4096, protection=3):
    found = libc.mmap(None, ctypes.c_size_t(length), protection, flags, fd, ctypes.c_long(0))
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    if fd >= 0: os.close(fd)
    return found
"""
# Calls past libc, from pages below 4 GiB: int80() makes a 32-bit call from 64-bit code, raw() a 64-bit call by a
# 64-bit number, and kill_by() kills a process from a 32-bit code segment, after which the program crashes.
MACHINE_CODE = """
def low_page():
    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40, prot=7)
    return page, ctypes.addressof(ctypes.c_char.from_buffer(page))
(code, start), (data, place) = low_page(), low_page()
code.write(bytes.fromhex("53 89f8 89f3 87ca cd80 5b c3" "4889f8 4889f7 4889d6 4889ca 0f05 c3"))
int80_code = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint] * 4)(start)
raw_code = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_ulong] * 4)(start + 11)
def checked(number, result):
    if -4096 < result < 0: raise OSError(-result, number)
    return result
def int80(number, *arguments):
    values = [*arguments, 0, 0, 0][:3]
    for i, value in enumerate(values):
        if isinstance(value, bytes):
            data[i * 1024 : i * 1024 + len(value) + 1], values[i] = value + bytes(1), place + i * 1024
    return checked(number, int80_code(number, *values))
def raw(number, *arguments): return checked(number, raw_code(number, *[*arguments, 0, 0, 0][:3]))
def kill_by(way, pid):
    hexed = lambda value: value.to_bytes(4, "little").hex()
    enter = f"6a23 68{hexed(start + 64)} 48cb"  # push the segment and an address, far return
    body = f"b8{hexed(37)} bb{hexed(pid)} b9{hexed(9)} bd{hexed(9 if way == 'syscall' else place)} bc{hexed(place)}"
    code[:128] = bytes.fromhex(enter).ljust(64) + bytes.fromhex(body + WAYS[way]).ljust(64)
    ctypes.CFUNCTYPE(None)(start)()
WAYS = {"int80": "cd80", "sysenter": "0f34", "syscall": "0f05"}
"""
LIBC_CALL = """
def libc_call(number):
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), number)
"""
FAST_WAYS = ("sysenter", "syscall")
PIPE = "reader, writer = os.pipe()"
PAIR = "left, right = socket.socketpair()"

ATTACKS = (
    # files
    refuse("files", "overwrite", "open(PRECIOUS, 'w')", "open(PRECIOUS, 'a')", "open(PRECIOUS, 'r+')"),
    refuse("files", "truncate", "os.truncate(PRECIOUS, 0)"),
    refuse("files", "remove", "os.remove(PRECIOUS)"),
    refuse("files", "rename away", "os.rename(PRECIOUS, 'mine')", setup="errno.EXDEV"),
    refuse("files", "rename over", "os.rename('mine', PRECIOUS)", setup="open('mine', 'w').close()"),
    refuse("files", "chmod", "os.chmod(PRECIOUS, 0o777)", "os.fchmod(os.open(PRECIOUS, 0), 0o777)"),
    refuse("files", "fchmodat2", "call('fchmodat2', -100, PRECIOUS.encode(), 0o777, 0)"),
    refuse("files", "chown", "os.chown(PRECIOUS, os.getuid(), -1)", "os.lchown(PRECIOUS, os.getuid(), -1)"),
    refuse("files", "timestamps", "os.utime(PRECIOUS)", "call('futimesat', -100, PRECIOUS.encode(), None)"),
    refuse("files", "attributes", "call('setxattr', PRECIOUS.encode(), b'user.a', b'x', 1, 0)"),
    refuse("files", "create next to it", "open(PRECIOUS + '2', 'x')", "os.mkdir(PRECIOUS + '2')"),
    refuse("files", "link next to it", "os.symlink('/', PRECIOUS + '2')", "os.mkfifo(PRECIOUS + '2')"),
    refuse("files", "write through a link", "open('link', 'w')", setup="os.symlink(PRECIOUS, 'link')"),
    refuse("files", "reopen standard output of the judge", "open(f'/proc/{JUDGE}/fd/1', 'w')"),
    refuse("files", "shared memory", "open('/dev/shm/bapo-attack', 'w')"),
    refuse("files", "lease", "fcntl.fcntl(os.open(PRECIOUS, 0), 1024, 0)"),
    refuse("files", "lock", "fcntl.flock(os.open(PRECIOUS, 0), fcntl.LOCK_EX)"),
    refuse("files", "write own memory", "open('/proc/self/mem', 'r+b')"),
    refuse("files", "become more killable", "open(f'/proc/{VICTIM}/oom_score_adj', 'w')"),
    # processes
    refuse("processes", "fork", "os.fork()", "os.forkpty()"),
    refuse("processes", "subprocess", "subprocess.run(['true'])"),
    refuse("processes", "posix_spawn", "os.posix_spawn('/bin/true', ['true'], {})"),
    refuse("processes", "exec", "os.execv('/bin/true', ['true'])", "call('execve', b'/bin/true', None, None)"),
    refuse("processes", "clone", "call('clone', 17, 0, 0, 0, 0)"),
    refuse("processes", "clone3", "call('clone3', b'\\0' * 88, 88)"),
    fails("processes", "fork bomb", "while True: os.fork()"),
    # signals
    refuse("signals", "kill", "os.kill(VICTIM, 9)", "os.kill(JUDGE, 9)", "os.kill(VICTIM, 0)"),
    refuse("signals", "kill all", "os.kill(-1, 9)", "os.kill(0, 9)", "os.killpg(os.getpgid(VICTIM), 9)"),
    refuse("signals", "tkill", "call('tkill', VICTIM, 9)", "call('tgkill', VICTIM, VICTIM, 9)"),
    refuse("signals", "queue", "call('rt_sigqueueinfo', VICTIM, 9, b'\\0' * 128)"),
    refuse("signals", "queue to a thread", "call('rt_tgsigqueueinfo', VICTIM, VICTIM, 9, b'\\0' * 128)"),
    refuse("signals", "pidfd", "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9)"),
    refuse("signals", "F_SETOWN", "fcntl.fcntl(reader, 8, VICTIM)", "fcntl.fcntl(reader, 8, -VICTIM)", setup=PIPE),
    refuse("signals", "F_SETSIG", "fcntl.fcntl(reader, 10, 9)", setup=PIPE),
    refuse("signals", "F_SETOWN_EX", "fcntl.fcntl(reader, 15, struct.pack('ii', 1, VICTIM))", setup=PIPE),
    refuse("signals", "F_SETOWN, 64 bits", "call('fcntl', reader, ctypes.c_long(8 | 1 << 32), VICTIM)", setup=PIPE),
    refuse("signals", "FIOSETOWN", "fcntl.ioctl(left, 0x8901, struct.pack('i', VICTIM))", setup=PAIR),
    refuse("signals", "SIOCSPGRP", "fcntl.ioctl(left, 0x8902, struct.pack('i', VICTIM))", setup=PAIR),
    Attack(
        "signals",
        "O_ASYNC on a pipe",
        f"{PIPE}\nfor command, value in ((8, VICTIM), (10, 9), (4, 0o20000 | 0o4000)):\n"
        f"    try: fcntl.fcntl(reader, command, value)\n    except OSError: pass\nos.write(writer, b'x'){SOLUTION}",
    ),
    refuse("signals", "type into a terminal", "fcntl.ioctl(0, 0x5412, b'x')", "fcntl.ioctl(0, 0x540E, 1)"),
    # limits of others
    *(
        refuse("limits", f"{name} of another", f"resource.prlimit(VICTIM, resource.RLIMIT_{name}, {limit})")
        for name, limit in (("CPU", (1, 1)), ("NOFILE", (3, 3)), ("AS", (1, 1)), ("FSIZE", (0, 0)), ("NPROC", (0, 0)))
    ),
    refuse("limits", "of the judge", "resource.prlimit(JUDGE, resource.RLIMIT_NOFILE, (3, 3))"),
    refuse(
        "limits", "64-bit pid", "call('prlimit64', ctypes.c_long(VICTIM | 1 << 32), 0, struct.pack('QQ', 1, 1), None)"
    ),
    confined(
        "limits",
        "raise its own",
        """
        for name in ("AS", "CPU", "FSIZE", "NOFILE", "CORE"):
            limit = getattr(resource, "RLIMIT_" + name)
            for setter in (resource.setrlimit, lambda *a: resource.prlimit(0, *a)):
                try: setter(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                except (ValueError, PermissionError): pass
                else: raise SystemExit(name)
        """,
    ),
    # scheduling
    refuse("scheduling", "nice", "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)", "os.setpriority(os.PRIO_USER, 0, 19)"),
    refuse("scheduling", "affinity", "os.sched_setaffinity(VICTIM, {0})"),
    refuse("scheduling", "idle class", "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))"),
    refuse("scheduling", "batch class", "os.sched_setscheduler(JUDGE, os.SCHED_BATCH, os.sched_param(0))"),
    refuse("scheduling", "parameters", "call('sched_setparam', VICTIM, struct.pack('i', 0))"),
    refuse(
        "scheduling", "attributes", "call('sched_setattr', VICTIM, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)"
    ),
    refuse(
        "scheduling", "disk priority", "call('ioprio_set', 1, VICTIM, 3 << 13)", "call('ioprio_set', 1, JUDGE, 3 << 13)"
    ),
    # network
    refuse("network", "TCP", "socket.create_connection(('127.0.0.1', PORT))"),
    refuse("network", "listen", "socket.create_server(('127.0.0.1', 0))"),
    refuse("network", "UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    refuse("network", "Unix socket", "socket.socket(socket.AF_UNIX)"),
    refuse("network", "netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    refuse("network", "hide files in a socket", "socket.send_fds(left, [b'x'], [0])", setup=PAIR),
    refuse("kernel", "io_uring", "call('io_uring_setup', 8, b'\\0' * 120)"),
    refuse("kernel", "new namespace", "call('unshare', 0x10000000)", "call('setns', 0, 0)"),
    refuse("kernel", "mount", "call('mount', None, b'/', None, 0, None)"),
    refuse("kernel", "bpf", "call('bpf', 0, b'\\0' * 64, 64)"),
    refuse("kernel", "perf", "call('perf_event_open', b'\\0' * 128, 0, -1, -1, 0)"),
    refuse("kernel", "userfaultfd", "call('userfaultfd', 1)"),
    refuse("network", "aim a datagram socket", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    refuse(
        "network",
        "send to a datagram socket",
        "left.sendto(b'secret', SOCKET)",
        "left.connect(SOCKET)",
        "left.bind('mine')",
        "left.listen()",
        "left.sendmsg([b'secret'], [], 0, SOCKET)",
        setup=PAIR,
    ),
    refuse("network", "sequenced packets", "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)"),
    # objects of others
    refuse(
        "objects",
        "shared memory",
        "call('shmat', IDS['shm'], None, 0)",
        "call('shmctl', IDS['shm'], 0, None)",
        "call('shmdt', None)",
    ),
    refuse(
        "objects",
        "semaphores",
        "call('semctl', IDS['sem'], 0, 0)",
        "call('semop', IDS['sem'], struct.pack('hhh', 0, 1, 0), 1)",
        "call('semtimedop', IDS['sem'], struct.pack('hhh', 0, 1, 0), 1, None)",
    ),
    refuse(
        "objects",
        "message queue",
        "call('msgctl', IDS['msg'], 0, None)",
        "call('msgsnd', IDS['msg'], struct.pack('l', 1), 0, 0o4000)",
        "call('msgrcv', IDS['msg'], b'\\0' * 64, 8, 0, 0o4000)",
    ),
    refuse(
        "objects",
        "POSIX queue",
        "call('mq_unlink', IDS['mq'])",
        "call('mq_open', IDS['mq'], 2, 0, None)",
        *(f"call('{name}', 3, b'x', 1, 0, None)" for name in ("mq_timedsend", "mq_timedreceive", "mq_getsetattr")),
    ),
    # attributes that Landlock does not guard
    *(
        refuse("attributes", name, f"fcntl.ioctl(os.open(PRECIOUS, 0), {number}, b'\\x80' * 40)")
        for name, number in (
            ("FS_IOC_SETFLAGS", 0x40086602),
            ("FS_IOC_FSSETXATTR", 0x401C5820),
            ("FS_IOC_SETVERSION", 0x40087602),
            ("EXT4_IOC_SETVERSION", 0x40086604),
            ("EXT4_IOC_MIGRATE", 0x6609),
            ("FS_IOC_ENABLE_VERITY", 0x40806685),
            ("FICLONE", 0x40049409),
        )
    ),
    refuse("attributes", "file_setattr", "call('file_setattr', -100, PRECIOUS.encode(), b'\\0' * 24, 24, 0)"),
    refuse(
        "files",
        "truncate by opening",
        "os.open(PRECIOUS, os.O_RDONLY | os.O_TRUNC)",
        "os.open(PRECIOUS, 3 | os.O_TRUNC)",
        "call('openat2', -100, PRECIOUS.encode(), struct.pack('QQQ', os.O_TRUNC, 0, 0), 24)",
    ),
    # what keeps a program from outliving its judge
    refuse(
        "survival", "no signal when the judge ends", "call('prctl', 1, 0, 0, 0, 0)", "call('prctl', 1, 19, 0, 0, 0)"
    ),
    refuse("survival", "other options", "call('prctl', 4, 0, 0, 0, 0)", "call('prctl', 36, 1, 0, 0, 0)"),
    # limits of the user and of the machine
    refuse("shared limits", "file watches", "call('inotify_init1', 0)", "call('fanotify_init', 0, 0)"),
    refuse("shared limits", "asynchronous operations", "call('io_setup', 100, b'\\0' * 8)"),
    refuse("shared limits", "disks", "call('sync')", "call('syncfs', 0)", "call('quotactl', 0, None, 0, None)"),
    refuse("shared limits", "timers", "call('timer_create', 0, None, b'\\0' * 8)"),
    refuse("shared limits", "locked memory", "call('mlock', None, 0)"),
    confined(
        "shared limits",
        "pending signals",
        """
        import re
        def pending(): return int(re.search("SigQ:\\s*(\\d+)", open("/proc/self/status").read())[1])
        before = pending()
        signal.pthread_sigmask(signal.SIG_BLOCK, {40})
        for i in range(1000): os.kill(os.getpid(), 40)
        assert pending() - before <= 64 or before > 64, pending()
        """,
    ),
    # calls by other names
    refuse(
        "kernel",
        "calls of later kernels",
        *(f"libc_call({number})" for number in (473, 511, 600, 1000, 2**31 - 1)),
        setup=LIBC_CALL,
    ),
    refuse("kernel", "x32 calls", "libc_call(0x40000000 | 39)", "libc_call(0x40000000 | 62)", setup=LIBC_CALL),
    *(
        (
            refuse(
                "32-bit calls",
                "int 0x80",
                "int80(37, VICTIM, 9)",
                "int80(270, VICTIM, VICTIM, 9)",
                "int80(15, PRECIOUS.encode(), 0o777)",
                "int80(10, PRECIOUS.encode())",
                "int80(5, PRECIOUS.encode(), os.O_RDWR | os.O_TRUNC)",
                "int80(359, 2, 2, 0)",
                "int80(102, 1, struct.pack('III', 2, 2, 0))",
                "int80(2)",
                "int80(11, b'/bin/true')",
                "int80(26, 16, VICTIM)",
                "int80(20)",
                setup=MACHINE_CODE,
            ),
            *(
                fails("32-bit calls", f"{way} from a 32-bit segment", f"{MACHINE_CODE}\nkill_by('{way}', VICTIM)")
                for way in ("int80", *FAST_WAYS)
            ),
            refuse(
                "32-bit calls",
                "x32 numbers",
                "raw(0x40000000 | 62, VICTIM, 9)",
                "raw(0x40000000 | 39)",
                "raw(0x40000000 | 520)",
                "raw(0x40000000 | 521)",
                "raw(0xFFFFFFFF40000000 | 62, VICTIM, 9)",
                "raw(1 << 32 | 62, VICTIM, 9)",
                setup=MACHINE_CODE,
            ),
        )
        if platform.machine() == "x86_64"
        else ()
    ),
    # memory of others
    refuse("ptrace", "attach", "call('ptrace', 16, VICTIM, 0, 0)", "call('ptrace', 0x4206, JUDGE, 0, 0)"),
    refuse("ptrace", "read memory", "call('process_vm_readv', VICTIM, None, 0, None, 0, 0)"),
    refuse("ptrace", "write memory", "call('process_vm_writev', VICTIM, None, 0, None, 0, 0)"),
    refuse("ptrace", "open memory", "open(f'/proc/{JUDGE}/mem', 'rb')", "open(f'/proc/{VICTIM}/mem', 'r+b')"),
    refuse("ptrace", "read the environment", "open(f'/proc/{JUDGE}/environ').read()"),
    refuse("ptrace", "take a descriptor", "call('pidfd_getfd', os.pidfd_open(JUDGE), 1, 0)"),
    refuse("ptrace", "reclaim its memory", "call('process_madvise', os.pidfd_open(VICTIM), None, 0, 21, 0)"),
    refuse("ptrace", "move its memory", "call('migrate_pages', VICTIM, 0, None, None)"),
    # resources
    fails("memory", "large array", "x = bytearray(1 << 34)" + SOLUTION),
    fails("memory", "mapping", "x = mmap.mmap(-1, 1 << 34)" + SOLUTION),
    fails("memory", "large integer", "x = 1 << (1 << 40)" + SOLUTION),
    refuse("memory", "memory file", "call('memfd_create', b'x', 0)"),
    fails(
        "memory",
        "many threads",
        "threading.stack_size(1 << 15)\nwhile True: threading.Thread(target=signal.pause).start()",
    ),
    fails("output", "endless", "while True: print('x' * 100000)"),
    confined(
        "output",
        "large file",
        """
        try: open("big", "wb").write(bytes(17 << 20))
        except OSError: pass
        assert os.path.getsize("big") <= 16 << 20
        """,
    ),
    # The watch must end programs that hold more than they may; each of them then waits forever.
    holds("large files", "for i in range(10): open(str(i), 'wb').write(bytes(8 << 20))"),
    holds("deleted files", f"{UNLINKED}kept = [unlinked() for _ in range(10)]"),
    holds("mapped files", f"{UNLINKED}for i in range(10): mapped(unlinked(), 1)"),
    holds("privately mapped files", f"{UNLINKED}for i in range(10): mapped(unlinked(), 2)"),
    holds("mapped files without a name", f"{UNLINKED}for i in range(10): mapped(filled(os.open('.', 0o20200002)), 1)"),
    holds(
        "shared memory",
        f"{UNLINKED}for i in range(10):\n    m = mapped(-1, 0x21, 16 << 20)\n    ctypes.memset(m, 1, 16 << 20)\n"
        "    libc.munmap(ctypes.c_void_p(m + 4096), ctypes.c_size_t((16 << 20) - 4096))",
    ),
    holds(
        "files in folders that cannot be listed",
        "os.mkdir('a', 0o300)\nfor i in range(10): open(f'a/{i}', 'wb').write(bytes(8 << 20))",
    ),
    refuse("holding", "large shared memory", "mmap.mmap(-1, 17 << 20)", "mmap.mmap(-1, 1 << 32)"),
    refuse("holding", "huge pages", "mmap.mmap(-1, 1 << 21, flags=0x40022)", "mmap.mmap(-1, 1 << 12, flags=0x2022)"),
    refuse("holding", "descriptors of a thread's own", "call('close_range', 1000, 1000, 2)"),
    refuse("holding", "threads that share no descriptors", "call('clone', 0x3D0B00, 0, 0, 0, 0)"),
    refuse(
        "holding",
        "blocks beyond the end",
        "call('fallocate', x, 1, ctypes.c_long(0), ctypes.c_long(1 << 30))",
        setup="x = os.open('x', os.O_CREAT | os.O_RDWR)",
    ),
    refuse(
        "holding",
        "pages in a pipe",
        "call('vmsplice', 1, None, 0, 0)",
        "fcntl.fcntl(reader, 1031, 1 << 20)",
        setup=PIPE,
    ),
    fails("output", "many files", "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()"),
    hangs("loop", "while True: pass"),
    hangs("sleep", "import time; time.sleep(1000)"),
    hangs(
        "ignored signals", "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    ),
    hangs("stopped", "os.kill(os.getpid(), signal.SIGSTOP)"),
    hangs("caught exceptions", "while True:\n  try:\n    while True: pass\n  except BaseException: pass"),
    # verdict
    fails("verdict", "exit", "sys.exit(0)"),
    fails("verdict", "exit immediately", "os._exit(0)"),
    fails("verdict", "exit in a test", "def f(x): os._exit(0)"),
    fails("verdict", "exit at the end", "import atexit\natexit.register(os._exit, 0)\n1 / 0"),
    fails(
        "verdict",
        "write to every descriptor",
        "for i in range(3, 64):\n  try: os.write(i, b'passed')\n  except OSError: pass\nos._exit(0)",
    ),
    fails("verdict", "token in frames", FRAMES),
    fails("verdict", "token in frames, before the tests", FRAMES + "f(0)"),
    fails(
        "verdict",
        "token among objects",
        "def f(x): return [o for o in gc.get_objects() if isinstance(o, dict) and 'token' in o][0]",
    ),
    fails(
        "verdict",
        "token in memory",
        """
        def f(x):
            import re
            for line in open("/proc/self/maps"):
                low, high = (int(n, 16) for n in line.split()[0].split("-"))
                if "rw" in line and high - low < 1 << 26:
                    with open("/proc/self/mem", "rb", 0) as memory:
                        memory.seek(low)
                        words = re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", memory.read(high - low))
                        for token in set(words):
                            for fd in (3, 4, 5, 6, 7):
                                try: os.truncate(fd, 0), os.pwrite(fd, token, 0)
                                except OSError: pass
            os._exit(0)
        """,
    ),
    fails("verdict", "builtins.exec", "builtins.exec = lambda *a: None"),
    fails("verdict", "builtins.compile", "real = compile\nbuiltins.compile = lambda *a: real('', '', 'exec')"),
    fails("verdict", "builtins.all", "builtins.all = lambda *a: True", answer={"tests": "assert all([f(1) == 2])\nf"}),
    fails(
        "verdict",
        "own builtins",
        "__builtins__ = {'len': lambda x: 2}\ndef f(x): return x",
        answer={"tests": "assert len('abc') == 2"},
    ),
    fails("verdict", "delete builtins", "vars(builtins).clear()"),
    fails(
        "verdict",
        "jump over asserts",
        """
        def trace(frame, event, argument):
            if frame.f_code.co_filename == "<tests>" and event == "line": frame.f_lineno = 3
            return trace
        sys.settrace(trace)
        def f(x): return 0
        """,
        answer={"tests": "a = 1\nassert f(1) == 2\nb = 1"},
    ),
    fails("verdict", "replace os.write", "os.write = lambda *a: 32\nos._exit = sys.exit"),
    fails(
        "verdict", "patch the sandbox", "main = sys.modules['__main__']\nmain.run_tests = main.exec = lambda *a: None"
    ),
    # leftovers
    confined("leftovers", "many folders", "for i in range(500): os.mkdir(str(i))"),
    confined("leftovers", "deep folders", "for i in range(700):\n    os.mkdir('deep')\n    os.chdir('deep')"),
    fails(
        "leftovers",
        "bottomless folders",
        "for i in range(3000):\n    os.mkdir('deep')\n    os.chdir('deep')\nwhile True: signal.pause()",
    ),
    confined(
        "leftovers",
        "folders without rights",
        "os.makedirs('a/b')\nos.mkdir('c', 0)\nos.umask(0o777)\nos.mkdir('a/b/d')",
    ),
    confined(
        "leftovers", "links in circles", "os.symlink('.', 'here')\nos.symlink('/', 'root')\nos.symlink('loop', 'loop')"
    ),
    confined(
        "leftovers",
        "odd names",
        "for n in (b'\\n', b'\\xff', b'-rf', b' ', b'a' * 255): os.mkdir(n), open(n + b'/x', 'w')",
    ),
    refuse("leftovers", "shared segment", "call('shmget', 0, 4096, 0o1600)", "call('semget', 0, 1, 0o1600)"),
    refuse("leftovers", "message queue", "call('msgget', 0, 0o1600)", "call('mq_open', b'bapo', 0o102, 0o600, None)"),
    refuse("leftovers", "key", "call('add_key', b'user', b'bapo', b'x', 1, -5)", "call('keyctl', 0, -3, 1)"),
)


def victim_state(pid: int) -> dict[str, Any]:
    """Return the parts of a process's state that an attack may change."""
    limits = ("CPU", "NOFILE", "AS", "FSIZE", "NPROC")
    return {
        "limits": [resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}")) for name in limits],
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "policy": os.sched_getscheduler(pid),
        "cores": sorted(os.sched_getaffinity(pid)),
        "state": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSDI",
    }


def file_state(file: Path) -> tuple[int, ...]:
    """Return a file's metadata, except the time of the last read."""
    status = file.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Objects:
    """SysV objects, a POSIX queue and a datagram socket of this process, as a neighbour may have them."""

    def __init__(self, folder: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.shmat.restype = ctypes.c_void_p
        self.ids: dict[str, Any] = {
            "shm": self._libc.shmget(0, 4096, 0o1600),
            "sem": self._libc.semget(0, 1, 0o1600),
            "msg": self._libc.msgget(0, 0o1600),
            "mq": f"bapo-attacks-{os.getpid()}".encode(),
        }
        assert min(self.ids[name] for name in ("shm", "sem", "msg")) >= 0, os.strerror(ctypes.get_errno())
        self._memory = self._libc.shmat(self.ids["shm"], None, 0)
        ctypes.memmove(self._memory, b"precious", 8)
        self._queue = self._libc.mq_open(b"/" + self.ids["mq"], os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600, None)
        self._send()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket_path = f"{folder}/datagrams"
        self._socket.bind(self.socket_path)
        self._socket.setblocking(False)

    def harm(self) -> str:
        """Return what an attack did to the objects, "" for nothing."""
        message, buffer, status = map(ctypes.create_string_buffer, (64, 8192, 256))
        taken = self._libc.msgrcv(self.ids["msg"], message, 16, 0, 0o4000), message.raw[8:16]
        received = self._libc.mq_receive(self._queue, buffer, 8192, None), buffer.raw[:8]
        self._send()
        found = {
            "memory": ctypes.string_at(self._memory, 8) == b"precious",
            "its segment": self._libc.shmctl(self.ids["shm"], 2, status) == 0 and not status.raw[21] & 0o2,  # SHM_DEST
            "semaphore": self._libc.semctl(self.ids["sem"], 0, 12) == 0,  # GETVAL
            "message": taken == (8, b"precious"),
            "message of the POSIX queue": received == (8, b"precious"),
            "POSIX queue": self._libc.mq_close(self._libc.mq_open(b"/" + self.ids["mq"], os.O_RDWR)) == 0,
        }
        changed = [name for name, is_whole in found.items() if not is_whole]
        with contextlib.suppress(BlockingIOError):
            changed.append(f"a datagram came: {self._socket.recv(100)!r}")
        return ", ".join(changed)

    def _send(self) -> None:
        message = struct.pack("=q8s", 1, b"precious")
        assert self._libc.msgsnd(self.ids["msg"], message, 8, 0o4000) == 0
        assert self._libc.mq_send(self._queue, b"precious", 8, 0) == 0

    def close(self) -> None:
        """Remove the objects."""
        self._libc.shmctl(self.ids["shm"], 0, None)
        self._libc.semctl(self.ids["sem"], 0, 0)
        self._libc.msgctl(self.ids["msg"], 0, None)
        self._libc.mq_unlink(b"/" + self.ids["mq"])
        self._socket.close()


def started_victim() -> subprocess.Popen[bytes]:
    """Start a process that echoes lines."""
    code = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    return subprocess.Popen([sys.executable, "-c", code], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answers(victim: subprocess.Popen[bytes]) -> bool:
    """Return whether a victim echoes a line, which shows that no signal is about to end it."""
    assert victim.stdin is not None
    assert victim.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        victim.stdin.write(b"alive\n")
        return bool(select.select([victim.stdout], [], [], HANG_S)[0]) and victim.stdout.readline() == b"alive\n"
    return False


def outcome(
    attack: Attack, facts: tuple[Any, ...], objects: Objects, victim: subprocess.Popen[bytes]
) -> tuple[str, str]:
    """Return an attack's verdict and the harm done, "" for none."""
    judge = CodeJudge(attack.timeout_s)
    program = PRELUDE.replace("@", repr(facts), 1) + attack.program
    before, precious = [victim_state(pid) for pid in facts[:2]], Path(facts[3])
    listing, status = sorted(os.listdir(precious.parent)), file_state(precious)
    try:
        verdict = repr(judge.judge(attack.answer or ANSWER, f"```python\n{program}\n```"))
    except TimeoutError:
        verdict = "None"
    harm = [] if answers(victim) else ["another process is gone"]
    with contextlib.suppress(ChildProcessError):
        harm += [f"process {pid} was left"] if (pid := os.waitpid(-1, os.WNOHANG)[0]) else []
    try:
        after = [victim_state(pid) for pid in facts[:2]]
        harm += [] if after == before else [f"another process changed from {before} to {after}"]
    except OSError as error:
        harm.append(f"another process is gone: {error}")
    harm += [] if precious.read_text() == "data" and file_state(precious) == status else ["the precious file changed"]
    harm += [f"objects of another process: {changed}"] if (changed := objects.harm()) else []
    now = sorted(os.listdir(precious.parent))
    harm += [] if now == listing else [f"left behind: {now}"]
    return verdict, "; ".join(harm)


def main(abi: int) -> None:
    """Run the table as this user, and print each outcome as a JSON object."""
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: pair[column] for name, pair in NUMBERS.items()}
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.closing(Objects(folder)) as objects,
    ):
        tempfile.tempdir = folder
        precious, sandbox = Path(folder) / "precious", Path(folder) / "sandbox.py"
        precious.write_text("data")
        source = Path(code_module.SANDBOX).read_text()
        assert f"MAX_LANDLOCK_ABI = {NEWEST_ABI}" in source
        sandbox.write_text(source.replace(f"MAX_LANDLOCK_ABI = {NEWEST_ABI}", f"MAX_LANDLOCK_ABI = {abi}"))
        code_module.SANDBOX = str(sandbox)
        code_module.MORE_CPU_S = int(HANG_S)  # the judge ends endless programs, however late
        port, outcomes = server.getsockname()[1], {}
        for attack in ATTACKS:
            with started_victim() as victim:
                facts = (victim.pid, os.getpid(), port, str(precious), numbers, objects.ids, objects.socket_path)
                outcomes[f"{attack.kind}: {attack.name}"] = outcome(attack, facts, objects, victim)
                victim.kill()
    print(json.dumps(outcomes))


USERS = ("root", "nobody") if os.geteuid() == 0 else ("this user",)
VARIANTS = [(user, abi) for user in USERS for abi in (NEWEST_ABI, ABI_WITHOUT_SCOPES, ABI_OF_LINUX_6_1)]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, int], subprocess.Popen[str]]]:
    """Run the table once per variant, all at the same time."""
    started = {}
    for user, abi in VARIANTS:
        command = [sys.executable, "-B", "-m", "tests.unit.test_sandbox_attacks", str(abi)]
        if user == "nobody":
            command = [*as_nobody.COMMAND, *command]
        started[user, abi] = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield started
    for run in started.values():
        run.kill()
        run.communicate()


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: f"{variant[0]}, Landlock {variant[1]}")
def outcomes(request: pytest.FixtureRequest, runs: dict[Any, subprocess.Popen[str]]) -> dict[str, tuple[str, str]]:
    stdout, stderr = runs[request.param].communicate(timeout=6 * HANG_S)
    assert stdout, stderr
    return json.loads(stdout.splitlines()[-1])


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.kind}: {attack.name}")
def test_an_attack_fails(attack: Attack, outcomes: dict[str, tuple[str, str]]) -> None:
    if attack.kind == "32-bit calls" and not has_32_bit_calls():
        pytest.skip("this kernel makes no 32-bit calls")
    verdict, harm = outcomes[f"{attack.kind}: {attack.name}"]
    assert not harm
    assert verdict == repr(attack.reward)


@functools.cache
def has_32_bit_calls() -> bool:
    """Return whether this kernel makes 32-bit calls: it may have been built or booted without them."""
    code = f"import ctypes, mmap, os\n{MACHINE_CODE}\nassert int80(20) == os.getpid()"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86-64")
def test_outside_the_sandbox_the_machine_code_kills() -> None:
    if not has_32_bit_calls():
        pytest.skip("this kernel makes no 32-bit calls")
    found = {}
    for attempt in (
        "int80(37, {}, 9)",
        "raw(62, {}, 9)",
        *(f"kill_by('{way}', {{}})" for way in ("int80", *FAST_WAYS)),
    ):
        with started_victim() as victim:
            code = f"import ctypes, mmap\n{MACHINE_CODE}\n{attempt.format(victim.pid)}"
            subprocess.run([sys.executable, "-c", code], check=False)
        found[attempt] = victim.returncode == -signal.SIGKILL
    fast = [found.pop(f"kill_by('{way}', {{}})") for way in FAST_WAYS]
    assert all(found.values()), found
    assert any(fast), "AMD has one of them, Intel the other"


if __name__ == "__main__":
    main(int(sys.argv[1]))
