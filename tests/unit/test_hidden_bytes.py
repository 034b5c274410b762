"""Programs that hide bytes from the judge's watch: each must be ended, and its small twin must pass.

python -m tests.unit.test_hidden_bytes [NUMBER [SEED [DEADLINE_S]]]   the whole campaign, of which the test repeats some

2026-11-27, 400 programs of seed 0 as root and 400 of seed 1 as nobody: 0 wrong.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_megatron.rewards.code import MAX_BYTES, Sandbox
from tests.hang import HANG_S
from tests.unit import as_nobody

ROOT = Path(__file__).parents[2]
NUM_PROGRAMS = 24  # the beginning of the campaign
FILE_BYTES = 8 << 20
NUM_TOO_MANY, NUM_ALLOWED = 10, 2  # files of FILE_BYTES
assert NUM_ALLOWED * 16 << 20 < MAX_BYTES < NUM_TOO_MANY * FILE_BYTES

# What holds the bytes: `held` is called once, `move` again and again.
PRELUDE = """
import ctypes, itertools, mmap, os, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
def filled(name, flags=os.O_CREAT | os.O_RDWR):
    fd = os.open(name, flags)
    os.posix_fallocate(fd, 0, FILE_BYTES)
    return fd
def unlinked(i):
    fd = filled(f"x{i}")
    os.unlink(f"x{i}")
    return fd
def nameless(i): return filled(".", 0o20200002)
def linked_twice(i):
    fd = filled(f"x{i}")
    os.link(f"x{i}", f"y{i}")
    os.unlink(f"x{i}")
    os.unlink(f"y{i}")
    return fd
def mapped(fd, flags):
    assert libc.mmap(None, ctypes.c_size_t(4096), 3, flags, fd, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
    if fd >= 0: os.close(fd)
def written(path): os.close(filled(path))
def move(): time.sleep(0.01)
"""
MAKES = ("unlinked(i)", "nameless(i)", "linked_twice(i)")
HOLDS = {
    "open": "fds = [{make} for i in range(NUM)]",
    "mapped": "for i in range(NUM): mapped({make}, {flags})",
    "hopping descriptors": """
fds = [{make} for i in range(NUM)]
def move():
    for i, fd in enumerate(fds):
        fds[i] = os.dup(fd)
        os.close(fd)
""",
    "renamed files": """
for i in range(NUM): written(f"a{i}")
names = [f"a{i}" for i in range(NUM)]
def move():
    for i, name in enumerate(names):
        names[i] = f"{'b' if name[0] == 'a' else 'a'}{i}"
        os.rename(name, names[i])
""",
    "hard links": """
for i in range(NUM): written(f"a{i}")
names = [f"a{i}" for i in range(NUM)]
def move():
    for i, name in enumerate(names):
        names[i] = f"{'b' if name[0] == 'a' else 'a'}{i}"
        os.link(name, names[i])
        os.unlink(name)
""",
    "renamed folder": """
os.makedirs("a" + "/d" * {depth})
for i in range(NUM): written("a" + "/d" * {depth} + f"/{i}")
def move():
    os.rename("a", "b")
    os.rename("b", "a")
""",
    "folder that changes its place": """
os.makedirs("left/a" + "/d" * {depth})
os.mkdir("right")
for i in range(NUM): written("left/a" + "/d" * {depth} + f"/{i}")
def move():
    os.rename("left/a", "right/a")
    os.rename("right/a", "left/a")
""",
    "exchanged folders": """
os.mkdir("empty")
os.mkdir("full")
for i in range(NUM): written(f"full/{i}")
def move(): assert libc.renameat2(-100, b"empty", -100, b"full", 2) == 0
""",
    "folder behind a link": """
os.mkdir("real")
for i in range(NUM): written(f"real/{i}")
os.symlink(".", "link")
def move(): assert libc.renameat2(-100, b"link", -100, b"real", 2) == 0
""",
}
# Who holds them: {work} ends the program if it may end.
THREADS = {
    "main": "while True:\n    move()\n    work()",
    "second": """
def run():
    while True:
        move()
        work()
threading.Thread(target=run, daemon=True).start()
libc.syscall(EXIT, 0)
""",
    "one after the other": """
import _thread
def run():
    move()
    work()
    _thread.start_new_thread(run, ())
_thread.start_new_thread(run, ())
libc.syscall(EXIT, 0)
""",
    "many": """
def run():
    while True: time.sleep(0.01)
for _ in range(20): threading.Thread(target=run, daemon=True).start()
def mover():
    while True:
        move()
        work()
threading.Thread(target=mover, daemon=True).start()
libc.syscall(EXIT, 0)
""",
}
WORK = """
deadline_s = time.monotonic() + 0.3
def work():
    if NUM == NUM_ALLOWED and time.monotonic() > deadline_s:
        os.write(1, b"YES")
        os._exit(0)
"""


def program(rng: random.Random) -> tuple[str, str, bool]:
    """Return what a program does in words, its source, and whether the judge must let it end by itself."""
    hold, threads = rng.choice(sorted(HOLDS)), rng.choice(sorted(THREADS))
    is_allowed = rng.random() < 0.25
    make, flags, depth = rng.choice(MAKES), rng.choice((1, 2)), rng.choice((0, 1, 5, 40))
    constants = {
        "FILE_BYTES": FILE_BYTES,
        "NUM_ALLOWED": NUM_ALLOWED,
        "NUM": NUM_ALLOWED if is_allowed else NUM_TOO_MANY,
        "EXIT": {"x86_64": 60}.get(os.uname().machine, 93),
    }
    held = HOLDS[hold]
    for name, value in {"make": make, "flags": flags, "depth": depth}.items():
        held = held.replace(f"{{{name}}}", str(value))
    source = "\n".join(f"{name} = {value}" for name, value in constants.items()) + PRELUDE + held + WORK
    words = f"{hold}, {threads}, {make}, flags {flags}, depth {depth}, {'allowed' if is_allowed else 'too much'}"
    return words, source + THREADS[threads], is_allowed


def wrong(number: int, seed: int, timeout_s: float = HANG_S) -> list[str]:
    """Return what the judge got wrong among the first programs of a seed."""
    rng = random.Random(seed)
    sandbox = Sandbox("test", timeout_s)
    found = []
    for _ in range(number):
        words, source, is_allowed = program(rng)
        try:
            code, stdout, _ = sandbox.run({"program": source, "stdin": ""}, time.monotonic() + timeout_s)
        except TimeoutError:
            code, stdout = 1, b"not ended"
        if (code, stdout) != ((0, b"YES") if is_allowed else (-signal.SIGKILL, b"")):
            found.append(f"{words}: exit code {code}, {stdout!r}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("user", ("root", "nobody") if os.geteuid() == 0 else ("this user",))
def test_what_a_program_hides_is_seen_and_what_it_may_hold_is_left_alone(user: str) -> None:
    command = [sys.executable, "-B", "-m", "tests.unit.test_hidden_bytes", str(NUM_PROGRAMS)]
    run = subprocess.run(
        [*(as_nobody.COMMAND if user == "nobody" else []), *command],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    assert json.loads(run.stdout) == []


if __name__ == "__main__":
    number, seed, timeout_s = [*sys.argv[1:], *("400", "0", str(HANG_S))[len(sys.argv) - 1 :]]
    print(json.dumps(wrong(int(number), int(seed), float(timeout_s))))
