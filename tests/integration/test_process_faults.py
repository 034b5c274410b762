"""However a run is ended, no process of it stays behind, and its engines' owner keeps what is theirs."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.integration.engines import EngineProcess, start_engines


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    started = start_engines(tmp_path_factory.mktemp("engines"), 1)
    yield started
    for server in started:
        server.end()


def descendants(pid: int) -> dict[int, str]:
    """Process ids and command lines of all processes below one."""
    return {child.pid: " ".join(child.cmdline()) for child in psutil.Process(pid).children(recursive=True)}


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s until {what}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "engine"),
    [(signal.SIGKILL, -9, "attach"), (signal.SIGTERM, 143, "embedded"), (signal.SIGINT, 130, "embedded")],
)
def test_a_run_that_is_ended_leaves_no_process_behind(
    tmp_path: Path, servers: list[EngineProcess], number: signal.Signals, code: int, engine: str
) -> None:
    """kill -9 of the launcher alone, with engines that live on; Ctrl-C as a terminal sends it, to the whole group."""
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=ended"]
    command += ["monitor.progress=lines", "parallel.tensor=2", f"rollout.engine={engine}"]
    command += [f'rollout.urls=["{servers[0].url}"]'] if engine == "attach" else []
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    started: dict[int, str] = {}
    try:
        logs = tmp_path / "ended" / "logs"
        ranks = ["trainer-0.log", "trainer-1.log"]
        wait_until(
            lambda: run.poll() is not None or all(list(logs.rglob(name)) for name in ranks), 60, "the ranks started"
        )
        assert run.poll() is None, (tmp_path / "output").read_text()
        started = descendants(run.pid)
        assert sum("bapo_megatron.worker" in args for args in started.values()) >= 2
        assert any("engines.embedded" in args for args in started.values()) == (engine == "embedded")
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        assert run.wait(20) == code
        wait_until(lambda: not any(map(is_running, started)), 10, f"{started} ended")
        text = (tmp_path / "output").read_text()
        assert "Traceback" not in text, text
    finally:
        for pid in (run.pid, *started):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        run.wait(10)


@dataclass
class Watched:
    """A process of a run: its command line, its environment when it started, the addresses at which it listens."""

    command: str
    environment: dict[str, str]
    addresses: set[str] = field(default_factory=set)


def watch_sockets(pid: int, seen: dict[int, Watched]) -> None:
    """Add what the kernel's table says now of a process and all below it: TCP over IPv4 and IPv6."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                known = seen.setdefault(process.pid, Watched("", {}))
                # Both become others by exec (the command also by SGLang's title), and are empty while a process ends.
                known.command = " ".join(process.cmdline()) or known.command
                known.environment = process.environ() or known.environment
                sockets = process.net_connections(kind="tcp")
                known.addresses |= {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("settings", "parts", "limit_s"),
    [
        pytest.param(["rollout.engine=embedded"], ["engines.embedded"], 600, id="embedded", marks=pytest.mark.slow),
        pytest.param(
            ["rollout.engine=sglang", "rollout.server_tensor_parallel=2", "rollout.startup_timeout_s=900"],
            ["engines.sglang_server", "sglang::scheduler_TP0", "sglang::scheduler_TP1"],
            1200,
            id="sglang",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
            ],
        ),
    ],
)
def test_a_local_run_listens_on_loopback_only(
    tmp_path: Path, settings: list[str], parts: list[str], limit_s: float
) -> None:
    """Whoever reaches one of torch's stores can change what it holds.

    The variables are looked at too: where the host's name means loopback, gloo listens there without them.
    """
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=quiet"]
    command += ["monitor.progress=lines", "parallel.tensor=2", "train.num_steps=1", "rollout.prompts_per_step=4"]
    command += ["reward.kind=bapo_megatron.rewards.answers:judge_chain", *settings]  # in judge processes
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    seen: dict[int, Watched] = {}
    try:
        deadline = time.monotonic() + limit_s
        while run.poll() is None and time.monotonic() < deadline:
            watch_sockets(run.pid, seen)
            time.sleep(0.2)
        assert run.poll() == 0, (tmp_path / "output").read_text()
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(30)
    for part in ("bapo_megatron.worker", "rewards.worker", *parts):
        assert any(part in each.command for each in seen.values()), f"no {part} in {seen}"
    assert {address for each in seen.values() for address in each.addresses} == {"127.0.0.1"}, seen
    in_groups = [each for each in seen.values() if "bapo_megatron.worker" in each.command or parts[0] in each.command]
    assert [each.environment.get("GLOO_SOCKET_IFNAME") for each in in_groups] == ["lo"] * len(in_groups), in_groups


def is_sampling(engine: str) -> bool:
    """Whether the engine with this command line has requests under way."""
    port = engine.split("--port ")[1].split()[0]
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads", timeout=5) as reply:
        return any(part["num_running_reqs"] for part in json.load(reply)["loads"])
    return False


@pytest.mark.slow
def test_the_only_engine_killed_in_an_evaluation_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """It is started again, pushed to, and asked for the rest. The first thing that it samples is an evaluation."""
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=killed"]
    command += ["monitor.progress=lines", "parallel.tensor=2", "train.num_steps=1"]
    command += ["eval.interval_steps=1", "eval.num_prompts=400"]
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    started: dict[int, str] = {}
    try:

        def is_evaluating() -> bool:
            with contextlib.suppress(psutil.Error):  # one that ends just now
                started.update(descendants(run.pid))
            engines = [args for args in started.values() if "engines.embedded" in args]
            return run.poll() is not None or any(map(is_sampling, engines))

        wait_until(is_evaluating, 120, "the evaluation before training began")
        assert run.poll() is None, (tmp_path / "output").read_text()
        for pid, args in started.items():
            if "engines.embedded" in args:
                os.kill(pid, signal.SIGKILL)
        assert run.wait(180) == 0, (tmp_path / "output").read_text()
        (log,) = (tmp_path / "killed" / "logs").rglob("trainer-0.log")
        fenced = [line for line in log.read_text().splitlines() if "is fenced off" in line]
        assert len(fenced) == 1
        assert "requests from eval-" in fenced[0]
        (row,) = map(json.loads, (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines())
        assert row["eval/num_samples"] == 400
    finally:
        for pid in (run.pid, *started):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        run.wait(10)
