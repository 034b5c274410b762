"""Hostile programs against the sandbox, as a table: the attack of each, and the verdict it must get.

Every attack runs as root (where the tests do) and as an ordinary user, with the newest Landlock and with one that lacks
signal scopes. After each, a victim process of the same user must live on with its limits and scheduling, a precious
file must be intact, and nothing may be left behind. `python test_sandbox_attacks.py ABI` runs the table as this user.
"""

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
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

pytestmark = pytest.mark.slow

NOBODY = 65534
NEWEST_ABI, ABI_WITHOUT_SCOPES = 6, 5
ANSWER = {"tests": "assert f(1) == 2\nassert f(-1) == 0"}
SOLUTION = "\ndef f(x): return x + 1\n"

# (x86_64, aarch64), written down here so that a wrong number in the sandbox shows
NUMBERS = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "fchmodat2": (452, 452),
    "fcntl": (72, 25),
    "futimesat": (261, None),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "add_key": (248, 217),
    "memfd_create": (319, 279),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "semget": (64, 190),
    "setns": (308, 268),
    "setxattr": (188, 5),
    "shmget": (29, 194),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}

PRELUDE = """
import array, builtins, ctypes, errno, fcntl, gc, mmap, os, resource, signal, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
VICTIM, JUDGE, PORT, PRECIOUS, NR = @
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
    """A program that must get `reward`; None: it must run out of time."""

    kind: str
    name: str
    program: str
    reward: float | None = 1.0
    timeout_s: float = 30.0
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
    refuse("files", "create beside", "open(PRECIOUS + '2', 'x')", "os.mkdir(PRECIOUS + '2')"),
    refuse("files", "link beside", "os.symlink('/', PRECIOUS + '2')", "os.mkfifo(PRECIOUS + '2')"),
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
    fails(
        "output",
        "many large files",
        """
        import itertools, time
        for i in itertools.count():
            open(str(i % 100), 'wb').write(bytes(8 << 20))
            time.sleep(0.02)
        """,
    ),
    fails(
        "output",
        "deleted files",
        """
        import time
        kept = []
        for i in range(40):
            kept.append(open('x', 'wb', 0))
            kept[-1].write(bytes(8 << 20))
            os.remove('x')
            time.sleep(0.02)
        time.sleep(5)
        def f(x): return x + 1
        """,
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
    fails("verdict", "exit at once", "os._exit(0)"),
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
        "verdict", "patch the sandbox", "main = sys.modules['__main__']\nmain._run_tests = main.exec = lambda *a: None"
    ),
    # leftovers
    confined("leftovers", "many folders", "for i in range(500): os.mkdir(str(i))"),
    confined("leftovers", "deep folders", "for i in range(700):\n    os.mkdir('deep')\n    os.chdir('deep')"),
    fails(
        "leftovers",
        "bottomless folders",
        "import time\nfor i in range(3000):\n    os.mkdir('deep')\n    os.chdir('deep')\ntime.sleep(5)" + SOLUTION,
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
    """Return what an attack on a process may change."""
    limits = ("CPU", "NOFILE", "AS", "FSIZE", "NPROC")
    return {
        "limits": [resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}")) for name in limits],
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "policy": os.sched_getscheduler(pid),
        "cores": sorted(os.sched_getaffinity(pid)),
        "state": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RSDI",
    }


def file_state(file: Path) -> tuple[int, ...]:
    """Return a file's metadata, except when it was last read."""
    status = file.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def outcome(attack: Attack, facts: tuple[Any, ...]) -> tuple[str, str]:
    """Return an attack's verdict and the harm done, "" for none."""
    judge = CodeJudge(attack.timeout_s, 1 << 30)
    program = PRELUDE.replace("@", repr(facts), 1) + attack.program
    before, precious = [victim_state(pid) for pid in facts[:2]], Path(facts[3])
    listing, status = sorted(os.listdir(precious.parent)), file_state(precious)
    try:
        verdict = repr(judge.judge(attack.answer or ANSWER, f"```python\n{program}\n```"))
    except TimeoutError:
        verdict = "None"
    harm = []
    with contextlib.suppress(ChildProcessError):
        harm += [f"process {pid} was left"] if (pid := os.waitpid(-1, os.WNOHANG)[0]) else []
    try:
        after = [victim_state(pid) for pid in facts[:2]]
        harm += [] if after == before else [f"another process changed from {before} to {after}"]
    except OSError as error:
        harm.append(f"another process is gone: {error}")
    harm += [] if precious.read_text() == "data" and file_state(precious) == status else ["the precious file changed"]
    now = sorted(os.listdir(precious.parent))
    harm += [] if now == listing else [f"left behind: {now}"]
    return verdict, "; ".join(harm)


def main(abi: int) -> None:
    """Run the table as this user, and print each outcome as a JSON object."""
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: pair[column] for name, pair in NUMBERS.items()}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        tempfile.tempdir = folder
        precious, sandbox = Path(folder) / "precious", Path(folder) / "sandbox.py"
        precious.write_text("data")
        shutil.copy(Path(code_module._SANDBOX).with_name("system_calls.txt"), folder)
        source = Path(code_module._SANDBOX).read_text()
        sandbox.write_text(source.replace(f"MAX_LANDLOCK_ABI = {NEWEST_ABI}", f"MAX_LANDLOCK_ABI = {abi}"))
        code_module._SANDBOX = str(sandbox)
        outcomes = {}
        for attack in ATTACKS:
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
                facts = (victim.pid, os.getpid(), server.getsockname()[1], str(precious), numbers)
                outcomes[f"{attack.kind}: {attack.name}"] = outcome(attack, facts)
                victim.kill()
    print(json.dumps(outcomes))


USERS = ("root", "nobody") if os.geteuid() == 0 else ("this user",)
VARIANTS = [(user, abi) for user in USERS for abi in (NEWEST_ABI, ABI_WITHOUT_SCOPES)]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[str, int], subprocess.Popen[str]]]:
    """The table once per variant, all at the same time."""
    started = {}
    for user, abi in VARIANTS:
        command = [sys.executable, "-B", __file__, str(abi)]
        if user == "nobody":
            command = ["unshare", "--mount", *command, str(NOBODY)]
        started[user, abi] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield started
    for run in started.values():
        run.kill()
        run.communicate()


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: f"{variant[0]}, Landlock {variant[1]}")
def outcomes(request: pytest.FixtureRequest, runs: dict[Any, subprocess.Popen[str]]) -> dict[str, tuple[str, str]]:
    stdout, stderr = runs[request.param].communicate(timeout=600)
    assert stdout, stderr
    return json.loads(stdout.splitlines()[-1])


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.kind}: {attack.name}")
def test_an_attack_fails(attack: Attack, outcomes: dict[str, tuple[str, str]]) -> None:
    verdict, harm = outcomes[f"{attack.kind}: {attack.name}"]
    assert not harm
    assert verdict == repr(attack.reward)


def become(user: int) -> None:
    """Run this program again as another user, for whom the Python installation is made readable in a private mount."""
    root, base = Path("/root"), Path(sys.base_prefix)
    if base.is_relative_to(root):
        with tempfile.TemporaryDirectory() as aside:
            subprocess.run(["mount", "--bind", base, aside], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", root], check=True)
            base.mkdir(parents=True)
            subprocess.run(["mount", "--bind", aside, base], check=True)
            subprocess.run(["umount", aside], check=True)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    os.environ["HOME"] = "/"
    os.execv(sys.executable, [sys.executable, "-B", *sys.argv[:2]])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        become(int(sys.argv[2]))
    main(int(sys.argv[1]))
