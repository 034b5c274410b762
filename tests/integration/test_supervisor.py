"""Engines that end or hang are restarted on the same URL, with real processes."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes, sglang, supervisor
from bapo_megatron.engines import start as launch_engines
from bapo_megatron.engines.supervisor import EngineSpec, supervised
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime import turn as turn_module
from bapo_megatron.runtime.turn import Turn
from tests.distributed import HANG_S


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.1)


# All that a supervisor sees of an engine, in a process that starts immediately.
STUB = """
import os, socketserver, sys, threading

class Answer(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(65536)
        self.request.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

threading.Thread(target=lambda: os._exit(bool(sys.stdin.read())), daemon=True).start()
Server(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def stub(port: int, log: Path) -> EngineSpec:
    return EngineSpec(f"http://127.0.0.1:{port}", [sys.executable, "-c", STUB, str(port)], log)


@pytest.mark.parametrize("status", [200, 401, 403, 404, 422, 500])
def test_an_engine_that_samples_without_the_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    asks = processes.asks_for_a_key  # a late answer would count as a refusal
    monkeypatch.setattr(processes, "asks_for_a_key", lambda url: asks(url, HANG_S))
    answer = 'b"HTTP/1.0 %d X" % (int(sys.argv[2]) if sent.startswith(b"POST /generate ") else 200)'
    text = STUB.replace("self.request.recv", "sent = self.request.recv").replace('b"HTTP/1.0 200 OK', f'{answer} + b"')

    def kind(port: int, log: Path) -> EngineSpec:
        command = [sys.executable, "-c", text, str(port), str(status)]
        return EngineSpec(f"http://127.0.0.1:{port}", command, log, key="secret")

    refused = pytest.raises(
        UserError, match=r"engine-0 \(http.*\): it samples without the run's key; make it answer 401"
    )
    with refused if status in (200, 422, 500) else contextlib.nullcontext(), engines(tmp_path, [], kind=kind) as urls:
        assert urls


@pytest.mark.parametrize("key", ["secret", None])
def test_an_embedded_engine_asks_for_a_key_if_it_has_one(tmp_path: Path, key: str | None) -> None:
    with engines(tmp_path, [], kind=lambda port, log: dataclasses.replace(spec(port, log), key=key)) as (url,):
        assert processes.asks_for_a_key(url, HANG_S) == (key is not None)


def spec(port: int, log: Path) -> EngineSpec:
    command = [sys.executable, "-m", "bapo_megatron.engines.embedded", "--model-path", str(demo_model_path())]
    command += ["--max-context", "64", "--port", str(port), "--exit-with-parent"]
    return EngineSpec(f"http://127.0.0.1:{port}", command, log)


@contextlib.contextmanager
def engines(
    folder: Path, told: list[str], count: int = 1, kind: Callable[[int, Path], EngineSpec] = spec, **options: Any
) -> Iterator[list[str]]:
    with processes.reserved_ports(count) as ports:
        specs = [kind(port, folder / f"engine-{i}.log") for i, port in enumerate(ports)]
        options = {"startup_timeout_s": HANG_S, "max_restarts": 3} | options
        with supervised(specs, tell=told.append, **options) as started:
            started.wait()
            yield started.urls


def server_of(url: str) -> psutil.Process:
    """Return the child process that serves on this URL's port; its start identifies it, as its id may be reused."""
    found = find_server(url)
    assert found is not None, f"nothing serves on {url}"
    return found


def find_server(url: str) -> psutil.Process | None:
    port = int(url.rsplit(":", 1)[1])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(c.laddr.port == port for c in child.net_connections("inet") if c.status == psutil.CONN_LISTEN):
                return child
    return None


def version_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/model_info", timeout=HANG_S) as response:
        return json.loads(response.read())["weight_version"]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANG_S:g} s until {what}"
        time.sleep(0.1)


def is_up_again(url: str, old: psutil.Process) -> bool:
    return find_server(url) not in (None, old) and processes.answers(f"{url}/health")


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie has ended, and only waits to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Probes:
    """The supervisor's clock, which ticks a second whenever it is read, and its questions to an engine.

    A working engine has all the time that it needs for an answer, however busy the machine is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_answered = 0
        self.is_hung = False  # the engine cannot answer, so do not wait for it
        self.to_stop: psutil.Process | None = None  # is stopped between two questions: none waits for its answer
        self._now_s, self._answers = time.monotonic(), processes.answers
        monkeypatch.setattr(supervisor, "time", types.SimpleNamespace(monotonic=self._tick, sleep=time.sleep))
        monkeypatch.setattr(processes, "answers", self._ask)

    def _tick(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def _ask(self, url: str, timeout_s: float = 0.0, key: str | None = None) -> bool:
        if self.to_stop:
            self.to_stop.suspend()
            self.to_stop, self.is_hung = None, True
        has_answered = self._answers(url, 0.1 if self.is_hung else HANG_S, key)
        self.num_answered += has_answered
        return has_answered

    def wait_for_more(self, count: int) -> None:
        """Return after `count` more answers, each at least a second after the previous one."""
        first = self.num_answered
        wait_until(lambda: self.num_answered >= first + count, "the engine had answered")


def test_a_killed_engine_comes_back_on_its_url_with_the_weights_of_the_start(tmp_path: Path) -> None:
    told: list[str] = []
    with engines(tmp_path, told, count=2) as (url, other):
        first, untouched = server_of(url), server_of(other)
        first.kill()
        wait_until(lambda: is_up_again(url, first), "the engine was up again")
        assert version_of(url) == "default"
        assert server_of(other) == untouched
        second = server_of(url)
    assert len(told) == 1
    for part in (url, "exit code -9", "restart 1 of 3", "engine-0.log", "engine-0.restart-1.log"):
        assert part in told[0]
    assert (tmp_path / "engine-0.restart-1.log").read_text().startswith("serving on")
    assert not any(process.is_running() for process in (first, second, untouched))


@pytest.mark.slow
def test_a_hung_engine_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    kill, probes = processes.kill, Probes(monkeypatch)

    def has_stacks() -> bool:
        log = (tmp_path / "engine-0.log").read_text()
        of_its_thread = re.search(r"^Thread 0x.*?/embedded/engine\.py.* in _obey\n", log, re.MULTILINE | re.DOTALL)
        return bool(of_its_thread and re.search(r"^Current thread 0x.* \(most recent call first\):", log, re.MULTILINE))

    def kill_after_its_stacks(process: subprocess.Popen[bytes]) -> None:
        wait_until(has_stacks, "the engine had written its stacks")
        probes.is_hung = False
        kill(process)

    with engines(tmp_path, told, hang_timeout_s=3.0, startup_timeout_s=1e9) as (url,):
        first = server_of(url)
        probes.wait_for_more(10)
        assert told == []
        with monkeypatch.context() as held:
            held.setattr(processes, "kill", kill_after_its_stacks)
            probes.to_stop = first
            wait_until(lambda: is_up_again(url, first), "the engine was up again")
        assert not first.is_running()
    assert len(told) == 1
    assert "did not answer for rollout.hang_timeout_s = 3 s, was asked for its stacks and killed" in told[0]
    assert told[0].split("its log: ")[1].split(")")[0] == str(tmp_path / "engine-0.log")


@pytest.mark.slow
def test_a_paused_engine_does_not_count_as_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    probes = Probes(monkeypatch)
    with engines(tmp_path, told, hang_timeout_s=3.0, startup_timeout_s=1e9) as (url,):
        body = json.dumps({"mode": "retract"}).encode()
        request = urllib.request.Request(f"{url}/pause_generation", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=HANG_S).close()
        probes.wait_for_more(10)
    assert told == []


def test_an_engine_without_restarts_left_stays_away_and_is_named(tmp_path: Path) -> None:
    told: list[str] = []

    def run() -> None:
        with engines(tmp_path, told, count=2, kind=stub, max_restarts=1) as (url, other):
            (looking_after,) = [t for t in threading.enumerate() if t.name == "engine-0"]
            first = server_of(url)
            first.kill()
            wait_until(lambda: is_up_again(url, first), "the engine was up again")
            server_of(url).kill()
            looking_after.join(HANG_S)
            assert not looking_after.is_alive(), "nothing is left to restart it"
            assert len(told) == 2
            assert find_server(url) is None
            assert processes.answers(f"{other}/health", HANG_S)
            raise UserError("no engine is left")

    with pytest.raises(UserError) as raised:
        run()
    assert "no restart is left" in told[1]
    lines = str(raised.value).splitlines()
    assert lines[0] == "no engine is left"
    assert len(lines) == 2
    assert "engine-0" in lines[1]
    assert "exit code -9" in lines[1]
    assert str(tmp_path / "engine-0.restart-1.log") in lines[1]


def test_engines_that_are_given_up_are_left_out(tmp_path: Path) -> None:
    with processes.reserved_ports(2) as ports:
        specs = [stub(port, tmp_path / f"engine-{i}.log") for i, port in enumerate(ports)]
        with supervised(specs, startup_timeout_s=HANG_S, tell=[].append) as started:
            started.wait()
            assert started.urls_left() == started.urls
            for url, thread, left in zip(started.urls, started.threads, (started.urls[1:], []), strict=True):
                server_of(url).kill()
                thread.join(HANG_S)
                assert started.urls_left() == left


def test_a_port_that_someone_else_has_taken_uses_up_the_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    start, is_taken = processes.start, threading.Event()

    def start_when_taken(*spec: Any) -> subprocess.Popen[bytes]:
        assert is_taken.wait(HANG_S)
        return start(*spec)

    with engines(tmp_path, told, kind=stub, max_restarts=1) as (url,), socket.socket() as thief:
        monkeypatch.setattr(processes, "start", start_when_taken)
        server_of(url).kill()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take() -> bool:
            with contextlib.suppress(OSError):
                thief.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
                thief.listen()
                return True
            return False

        wait_until(take, "the port was taken")
        is_taken.set()
        wait_until(lambda: len(told) == 2, "the engine was given up")
    assert "ended with exit code" in told[1]
    assert "Address already in use" in (tmp_path / "engine-0.restart-1.log").read_text()


def test_a_restart_that_finds_no_process_left_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with engines(tmp_path, told, kind=stub) as (url,):
        first, start = server_of(url), processes.start
        failures = [BlockingIOError(11, "Resource temporarily unavailable")]
        monkeypatch.setattr(processes, "start", lambda *spec: start(*spec) if not failures else _raise(failures.pop()))
        first.kill()
        wait_until(lambda: is_up_again(url, first), "the engine was up again")
    assert len(told) == 3
    assert "ended with" in told[0]
    assert "could not be started: [Errno 11] Resource temporarily unavailable" in told[1]


class Held:
    """A trainer that holds the turn; `waiting` is set once an engine's supervisor has found that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / ".turn"
        self.trainer = Turn(self.file)
        self.waiting = threading.Event()
        sleep = time.sleep
        clock = types.SimpleNamespace(sleep=lambda seconds: (self.waiting.set(), sleep(seconds)))
        monkeypatch.setattr(turn_module, "time", clock)
        self.take()

    def take(self) -> None:
        assert self.trainer.take(shared=False, is_over=lambda: True)

    def until_an_engine_waits(self) -> None:
        assert self.waiting.wait(HANG_S)


def test_an_engine_starts_again_once_the_trainer_has_left_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer then waits until the engine answers: before that, it is taking its memory."""
    told: list[str] = []
    held, starts = Held(tmp_path, monkeypatch), []
    start, answers, may_answer = processes.start, processes.answers, threading.Event()

    def note_start(*spec: Any) -> subprocess.Popen[bytes]:
        starts.append(held.trainer.is_held)
        return start(*spec)

    with engines(tmp_path, told, kind=stub, turn_file=held.file) as (url,):
        monkeypatch.setattr(processes, "start", note_start)
        monkeypatch.setattr(processes, "answers", lambda *asked: may_answer.is_set() and answers(*asked))
        monkeypatch.setattr(supervisor, "_PROBE_INTERVAL_S", 0.1)
        server_of(url).kill()
        held.until_an_engine_waits()
        assert find_server(url) is None
        held.trainer.give()
        wait_until(lambda: find_server(url), "the engine was started")
        assert starts == [False]
        assert not held.trainer.take(shared=False, is_over=lambda: True), "it starts, and has not answered"
        held.waiting.clear()
        taking = threading.Thread(target=held.trainer.take, kwargs={"shared": False, "is_over": lambda: False})
        taking.start()
        assert held.waiting.wait(HANG_S)
        may_answer.set()
        taking.join(HANG_S)
        assert held.trainer.is_held
        assert answers(f"{url}/health", HANG_S)
    assert len(told) == 1


def test_an_engine_that_ends_while_it_starts_gives_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    held = Held(tmp_path, monkeypatch)
    text = f"import os; from pathlib import Path; log = Path({str(tmp_path)!r}); runs = len([*log.glob('run-*')])\n"
    text += "(log / f'run-{runs}').touch(); runs and os._exit(7)\n" + STUB

    def ends_when_restarted(port: int, log: Path) -> EngineSpec:
        return EngineSpec(f"http://127.0.0.1:{port}", [sys.executable, "-c", text, str(port)], log)

    with engines(tmp_path, told, kind=ends_when_restarted, max_restarts=1, turn_file=held.file) as (url,):
        server_of(url).kill()
        held.until_an_engine_waits()
        held.trainer.give()
        wait_until(lambda: len(told) == 2, "the engine was given up")
        held.take()
    assert "exit code 7" in told[1]


def test_a_run_that_ends_while_an_engine_waits_for_its_turn_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    held = Held(tmp_path, monkeypatch)
    with engines(tmp_path, told, kind=stub, turn_file=held.file) as (url,):
        (looking_after,) = [t for t in threading.enumerate() if t.name == "engine-0"]
        server_of(url).kill()
        held.until_an_engine_waits()
    assert not looking_after.is_alive()
    assert held.trainer.is_held
    assert len(told) == 1
    assert find_server(url) is None


def test_a_turn_that_cannot_be_taken_uses_up_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    folder = tmp_path / "run"
    with engines(tmp_path, told, kind=stub, max_restarts=20, turn_file=folder / ".turn") as (url,):
        first = server_of(url)
        first.kill()
        wait_until(lambda: len(told) == 2, "the supervisor had found no folder")
        folder.mkdir()
        wait_until(lambda: is_up_again(url, first), "the engine was up again")
    assert "could not be started: cannot open" in told[1]


def _raise(problem: Exception) -> NoReturn:
    raise problem


def test_a_full_disk_or_a_closed_terminal_does_not_end_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").touch()
    with (tmp_path / "closed").open() as read_only:  # writing to it raises an OSError
        monkeypatch.setattr(sys, "stderr", read_only)
        launch_engines.tell_user("one line", tmp_path / "no such folder" / "supervisor.log")
        launch_engines.tell_user("one line", tmp_path / "supervisor.log")
    assert "one line" in (tmp_path / "supervisor.log").read_text()


def test_a_failure_at_the_first_start_is_an_error_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    bad = EngineSpec("http://127.0.0.1:9", [sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "engine-0.log")
    with supervised([bad], startup_timeout_s=HANG_S, max_restarts=3, tell=told.append) as started:
        with pytest.raises(EngineError, match=r"exit code 7.*engine-0\.log"):
            started.wait()
        assert not started.threads, "nothing looks after it"
    assert told == []


@pytest.mark.slow
def test_nothing_is_left_behind_by_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """Not even an engine that was restarted stays."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.integration.test_supervisor import engines\n"
        "with engines(Path(sys.argv[1]), []) as (url,): print(url, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        first = server_of(url)
        first.kill()
        wait_until(lambda: is_up_again(url, first), "the engine was up again")
        second = server_of(url)
        owner.kill()
        owner.wait()
        wait_until(lambda: not is_alive(second), "the engine had ended")
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_a_killed_sglang_server_comes_back(tmp_path: Path) -> None:
    told: list[str] = []
    config = Config.model_validate(
        {"data": {"max_prompt_tokens": 32}, "rollout": {"max_response_tokens": 32, "max_concurrent_requests": 8}}
    )
    with processes.reserved_ports(1) as ports:
        logs = [tmp_path / "engine-0.log"]
        engines = sglang.engine_specs(resolve(config, demo_model_path()), logs, ports, Placement(num_servers=1).on())
        with supervised(
            engines, startup_timeout_s=HANG_S, max_restarts=1, hang_timeout_s=math.inf, tell=told.append
        ) as started:
            started.wait()
            urls = started.urls
            first = server_of(urls[0])
            below = first.children(recursive=True)
            first.kill()
            wait_until(lambda: is_up_again(urls[0], first), "the server was up again")
            assert version_of(urls[0]) == "default"
            wait_until(lambda: not any(map(is_alive, (first, *below))), "all of the first server had ended")
    assert len(told) == 1
