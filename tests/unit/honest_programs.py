"""Honest programs that the sandbox must run, by what they use, and which calls it refuses them without harm.

`python -m tests.unit.honest_programs` runs them as this user and prints {name: [passes, refused calls]}.
"""

import json
import textwrap

from bapo_megatron.rewards.code import CodeJudge
from tests.hang import HANG_S

TESTS = "assert f(1) == 2\nassert f(-1) == 0"

HONEST = {
    "basics": """
        import bisect, calendar, collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json
        import math, random, re, secrets, statistics, string, textwrap, time, uuid, zoneinfo
        assert json.loads("[1]") == [1] and re.findall("a+", "baac") == ["aa"]
        secrets.token_hex(4), uuid.uuid4(), hashlib.sha256(b"x").hexdigest(), random.random(), time.sleep(0.001)
        decimal.Decimal("1.1"), fractions.Fraction(1, 3), datetime.datetime.now(), time.process_time()
        def f(x): return int(statistics.mean([x, x]) + math.floor(1.5))
    """,
    "numpy": """
        import numpy as np
        a = np.random.default_rng(0).normal(size=(300, 300))
        np.linalg.svd(a), np.linalg.solve(a, a[0]), np.linalg.eigvals(a[:50, :50]), np.fft.fft(a[0]), a @ a
        def f(x): return int(np.array([x, 1]).sum())
    """,
    "numpy files": """
        import numpy as np
        np.save("a.npy", np.arange(10)), np.savez("b.npz", a=np.ones(3)), np.savetxt("c.txt", np.ones(3))
        m = np.memmap("m", dtype="f4", mode="w+", shape=(100,))
        m[:] = 1
        m.flush()
        assert np.load("a.npy", mmap_mode="r")[3] == np.load("b.npz")["a"].sum() == np.loadtxt("c.txt").sum() == 3
        def f(x): return x + 1
    """,
    "threads": """
        import queue, threading
        asked, found = queue.Queue(), queue.Queue()
        def work():
            while True: found.put(asked.get() + 1)
        for _ in range(8): threading.Thread(target=work, daemon=True).start()
        timer = threading.Timer(0.001, lambda: None)
        timer.start(), timer.join()
        threading.Lock().acquire(timeout=0.001), threading.Event().wait(0.001), threading.Barrier(1).wait()
        def f(x):
            asked.put(x)
            return found.get()
    """,
    "thread pool": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(4)
        def f(x): return sum(pool.map(lambda y: y, [x, 1]))
    """,
    "asyncio": """
        import asyncio
        async def g(x):
            q = asyncio.Queue()
            await q.put(x)
            async with asyncio.timeout(600): y = await q.get()
            return sum(await asyncio.gather(asyncio.to_thread(lambda: y), asyncio.sleep(0.001, 1)))
        def f(x): return asyncio.run(g(x))
    """,
    "files": """
        import glob, os, pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory() as d:
            p = pathlib.Path(d, "a", "b")
            p.mkdir(parents=True)
            (p / "c").write_text("x")
            shutil.copyfile(p / "c", p / "d"), shutil.move(p / "d", d), os.replace(p / "c", p / "e")
            os.symlink("e", p / "l"), os.link(p / "e", p / "h")
            assert len(list(pathlib.Path(d).rglob("*"))) == 6 and glob.glob(d + "/*") and os.path.getsize(p / "e") == 1
            os.access(d, os.W_OK), os.getcwd(), shutil.disk_usage("."), list(os.walk(d)), shutil.rmtree(p)
        with tempfile.TemporaryFile() as t: t.write(b"x"), t.flush(), os.fsync(t.fileno()), t.truncate(0)
        with tempfile.NamedTemporaryFile("w+") as t, tempfile.SpooledTemporaryFile() as s: t.write("x"), s.rollover()
        def f(x): return x + 1
    """,
    "archives": """
        import base64, bz2, csv, gzip, io, lzma, pickle, struct, tarfile, xml.etree.ElementTree, zipfile, zlib
        with open("a.csv", "w", newline="") as o: csv.writer(o).writerow([1, 2])
        with zipfile.ZipFile("a.zip", "w") as z: z.write("a.csv")
        with zipfile.ZipFile("a.zip") as z: z.extractall("out")
        with gzip.open("a.gz", "wb") as g: g.write(b"x" * 1000)
        with tarfile.open("a.tar.gz", "w:gz") as t: t.add("a.csv")
        pickle.loads(pickle.dumps([1])), xml.etree.ElementTree.fromstring("<a/>")
        def f(x): return x + 1
    """,
    "sqlite3": """
        import sqlite3
        def f(x):
            with sqlite3.connect("db") as c:
                c.execute("pragma journal_mode=wal")
                c.execute("create table if not exists t(x)")
                c.execute("delete from t")
                c.executemany("insert into t values (?)", [(x,), (1,)])
                c.commit()
                return c.execute("select sum(x) from t").fetchone()[0]
    """,
    "signals": """
        import os, signal
        hits = []
        for s in (signal.SIGALRM, signal.SIGUSR1): signal.signal(s, lambda *a: hits.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while not hits: signal.sigtimedwait([], 0.001)
        os.kill(os.getpid(), signal.SIGUSR1), signal.raise_signal(signal.SIGUSR1)
        def f(x): return x + len(hits) - 2
    """,
    "pipes and mappings": """
        import mmap, os, select, selectors
        m = mmap.mmap(-1, 4096)
        m[:1] = b"x"
        with open("a", "w+b") as a:
            a.write(b"x" * 4096), a.flush()
            with mmap.mmap(a.fileno(), 0) as n: n[:1] = b"y"
        reader, writer = os.pipe()
        os.write(writer, b"x"), select.select([reader], [], []), selectors.DefaultSelector().register(reader, 1)
        os.read(reader, 1), os.dup2(reader, 40), os.set_blocking(reader, False), os.fdopen(writer, "w").close()
        def f(x): return x + 1
    """,
    "the system": """
        import ast, ctypes, gc, inspect, locale, os, resource, sys, tracemalloc
        ctypes.CDLL(None).getpid(), resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_AS)
        os.cpu_count(), os.getloadavg(), os.uname(), os.sched_getaffinity(0), os.times(), os.urandom(4), os.isatty(0)
        locale.setlocale(locale.LC_ALL, ""), tracemalloc.start(), gc.collect()
        def f(x): return x + 1
    """,
    "unittest and logging": """
        import io, logging, unittest
        logging.basicConfig(filename="log"), logging.warning("x")
        class T(unittest.TestCase):
            def test(self): self.assertEqual(1, 1)
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(T)
        assert unittest.TextTestRunner(stream=io.StringIO()).run(tests).wasSuccessful()
        def f(x): return x + 1
    """,
    "pytest": """
        import pytest
        test = "def test_a(tmp_path, capsys): print(1); assert capsys.readouterr().out and tmp_path.exists()"
        open("test_a.py", "w").write(test)
        assert pytest.main(["-q", "test_a.py"]) == 0
        def f(x): return x + 1
    """,
    "deep recursion": """
        import sys, threading
        sys.setrecursionlimit(10**6), threading.stack_size(1 << 28)
        found = []
        def g(n): return 0 if n == 0 else 1 + g(n - 1)
        thread = threading.Thread(target=lambda: found.append(g(20000)))
        thread.start(), thread.join()
        def f(x): return x + found[0] - 19999
    """,
    "much memory": """
        x = bytearray(200 << 20)
        try: y = bytearray(1 << 40)
        except MemoryError: z = {i: str(i) for i in range(10000)}
        def f(x): return x + 1
    """,
    "streams": """
        import sys
        print("x" * 10000), sys.stdout.flush(), sys.stderr.write("x")
        try: input()
        except EOFError: pass
        def f(x): return x + 1
    """,
    "competition": """
        import fileinput, gc, io, os, resource, sys, threading
        sys.setrecursionlimit(1 << 20), gc.disable(), gc.freeze()
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        io.BytesIO(os.read(0, os.fstat(0).st_size)), sys.stdin.readline(), list(fileinput.input("-"))
        with open("/dev/stdin") as stdin: assert not stdin.read()
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), write_through=True)
        print("x", flush=True), os.write(1, b"x"), os.write(2, b"x")
        def f(x): return x + 1
    """,
    "rarer modules": """
        import argparse, array, configparser, contextvars, ctypes.util, curses, dbm.dumb, difflib, email.message, enum
        import getpass, gettext, graphlib, html.parser, http.client, importlib, ipaddress, multiprocessing, netrc
        import os, pathlib, platform, pprint, pwd, sched, shelve, ssl, stat, sysconfig, termios, tomllib, typing
        import urllib.parse, urllib.request, uuid, warnings, weakref, webbrowser, xmlrpc.client, zipapp
        with open("module.py", "w") as file: file.write("a = 1")
        import sys
        sys.path.insert(0, os.getcwd())
        assert importlib.import_module("module").a == 1
        platform.platform(), platform.machine(), platform.python_version(), os.cpu_count(), ssl.create_default_context()
        pwd.getpwuid(os.getuid()), getpass.getuser(), os.path.expanduser("~"), pathlib.Path.home()
        multiprocessing.cpu_count(), list(graphlib.TopologicalSorter({1: [2]}).static_order()), sched.scheduler().run()
        def f(x): return x + 1
    """,
    "profiling and debugging": """
        import cProfile, doctest, dis, faulthandler, io, pdb, pstats, sys, timeit, trace, traceback, tracemalloc
        faulthandler.enable(), faulthandler.dump_traceback_later(600), faulthandler.cancel_dump_traceback_later()
        with cProfile.Profile() as profile: timeit.timeit("1 + 1", number=10)
        pstats.Stats(profile, stream=io.StringIO()).print_stats()
        def f(x):
            '''
            >>> f(1)
            2
            '''
            return x + 1
        assert doctest.testmod(sys.modules[__name__]).attempted == 1
    """,
    "low-level files": """
        import os, time
        with open("a", "w+b", buffering=0) as a, open("b", "w+b") as b:
            a.write(b"x" * 4096)
            os.posix_fallocate(b.fileno(), 0, 4096), os.posix_fadvise(a.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.copy_file_range(a.fileno(), b.fileno(), 100, 0, 0), os.sendfile(b.fileno(), a.fileno(), 0, 100)
            os.preadv(a.fileno(), [bytearray(4)], 0), os.pwritev(a.fileno(), [b"y"], 0), os.fdatasync(a.fileno())
            os.lseek(a.fileno(), 0, os.SEEK_DATA), os.lockf(a.fileno(), os.F_LOCK, 0), os.ftruncate(a.fileno(), 10)
        os.statvfs("."), os.stat("a"), list(os.fwalk(".")), os.getpriority(os.PRIO_PROCESS, 0), os.sched_yield()
        os.eventfd(1), os.getgroups(), os.getsid(0), os.getpgrp(), os.waitstatus_to_exitcode(0), os.umask(0o22)
        for name in ("a", "."): os.listxattr(name), os.access(name, os.R_OK, effective_ids=True)
        def f(x): return x + 1
    """,
    "functions of os": """
        import contextlib, os, select, socket, time
        reader, writer = os.pipe()
        os.writev(writer, [b"x", b"y"]), os.readv(reader, [bytearray(1)]), os.dup(reader), os.dup2(reader, 41, False)
        poll = select.poll()
        poll.register(reader), poll.poll(0)
        folder = os.open(".", os.O_RDONLY)
        at, from_to = {"dir_fd": folder}, {"src_dir_fd": folder, "dst_dir_fd": folder}
        os.mkdir("a", **at), os.rename("a", "b", **from_to), os.symlink("b", "c", **at), os.readlink("c", **at)
        os.close(os.open("d", os.O_CREAT | os.O_WRONLY, **at)), os.link("d", "e", **from_to), os.access("e", 4, **at)
        os.stat("c", follow_symlinks=False, **at), os.rmdir("b", **at), os.unlink("e", **at)
        os.fchdir(folder), os.fstatvfs(folder), os.listxattr("c", follow_symlinks=False), os.listxattr(folder)
        for name in ("d", folder):
            with contextlib.suppress(OSError): os.getxattr(name, "user.a")
        for wait in (lambda: os.waitid(os.P_ALL, 0, os.WEXITED), lambda: os.waitpid(-1, 0)):
            with contextlib.suppress(ChildProcessError): wait()
        os.getppid(), os.getpgid(0), os.getresuid(), os.getresgid(), os.getloadavg(), os.get_blocking(0)
        os.sched_getscheduler(0), os.sched_getparam(0), os.sched_rr_get_interval(0)
        os.sched_get_priority_max(os.SCHED_RR), os.sched_get_priority_min(os.SCHED_RR)
        for clock in ("monotonic", "perf_counter", "process_time", "thread_time", "time"): time.get_clock_info(clock)
        left, right = socket.socketpair()
        left.sendall(b"x"), right.recvmsg(1), left.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE), left.shutdown(2)
        if hasattr(os, "timerfd_create"):
            timer = os.timerfd_create(time.CLOCK_MONOTONIC)
            os.timerfd_settime(timer, initial=0.001), os.timerfd_gettime(timer), os.read(timer, 8)
        def f(x): return x + 1
    """,
    "many threads": """
        import threading, time
        condition, semaphore, event = threading.Condition(), threading.Semaphore(), threading.Event()
        with condition, semaphore: condition.notify_all(), condition.wait(0.001)
        local = threading.local()
        threads = [threading.Thread(target=event.wait) for _ in range(8)]
        for thread in threads: thread.start()
        event.set()
        for thread in threads: thread.join()
        def f(x): return x + 1
    """,
    "asyncio with streams and signals": """
        import asyncio, os, signal, socket
        async def main(x):
            loop, event = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, event.set)
            os.kill(os.getpid(), signal.SIGUSR1)
            await event.wait()
            left, right = socket.socketpair()
            reader, other = await asyncio.open_connection(sock=left)
            _, writer = await asyncio.open_connection(sock=right)
            writer.write(b"x\\n")
            await writer.drain()
            assert await reader.readline() == b"x\\n"
            writer.close(), other.close()
            async with asyncio.TaskGroup() as group: task = group.create_task(asyncio.sleep(0, x + 1))
            return task.result()
        def f(x): return asyncio.run(main(x))
    """,
    "signals of threads": """
        import faulthandler, os, signal, threading, time
        hits = []
        for s in (signal.SIGALRM, signal.SIGUSR1, signal.SIGVTALRM): signal.signal(s, lambda *a: hits.append(1))
        signal.alarm(600), signal.alarm(0), signal.getitimer(signal.ITIMER_REAL)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}), os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.sigpending() == {signal.SIGUSR1} and signal.sigwait({signal.SIGUSR1})
        signal.siginterrupt(signal.SIGUSR1, False), signal.set_wakeup_fd(-1)
        def f(x): return x + len(hits)
    """,
    "unpacking": """
        import os, pathlib, shutil, tarfile, zipfile
        os.mkdir("in"), open("in/a", "w").close()
        for kind in ("tar", "gztar", "zip"): shutil.unpack_archive(shutil.make_archive("a", kind, "in"), kind)
        with tarfile.open("a.tar") as t: t.extractall("out")
        pathlib.Path("in/a").touch(), pathlib.Path("in/c").touch(), shutil.copyfile("in/a", "in/b"), shutil.rmtree("in")
        def f(x): return x + 1
    """,
    "sympy and networkx": """
        import networkx, sympy
        def f(x):
            y = sympy.symbols("y")
            assert sympy.integrate(sympy.sin(y), y) == -sympy.cos(y)
            return x + networkx.shortest_path_length(networkx.path_graph(2), 0, 1)
    """,
}

TOLERATED = {
    "archives": {"socket"},
    "pytest": {"socket", "chmod", "fchmodat"},
    "rarer modules": {"socket", "vfork", "clone"},
    "sqlite3": {"fchown"},
    "unpacking": {"socket", "chmod", "fchmodat", "chown", "fchownat", "utimensat"},
}
"""Refused without harm: glibc asks nscd about users, `platform` starts uname, others copy rights, owners and times."""


def judged(program: str) -> tuple[bool, list[str]]:
    """Return whether a program passes, and which calls it was refused."""
    refused: dict[str, None] = {}
    passes = CodeJudge(HANG_S).passes(textwrap.dedent(program), TESTS, [], refused)
    return passes, sorted(refused)


if __name__ == "__main__":
    print(json.dumps({name: judged(program) for name, program in HONEST.items()}))
