"""However a run ends, it leaves no process behind, and engines that belong to others stay theirs."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.distributed import HANG_S
from tests.engine_processes import EngineProcess, started_engines
from tests.integration.forked import SMALL
from tests.integration.gates import Gates
from tests.integration.test_supervisor import is_alive


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    with started_engines(tmp_path_factory.mktemp("engines"), 1) as started:
        yield started


def descendants(pid: int) -> dict[psutil.Process, str]:
    """Return all processes below this one, and their command lines."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is just ending
            found[child] = " ".join(child.cmdline())
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "engine"),
    [(signal.SIGKILL, -9, "attach"), (signal.SIGTERM, 143, "embedded"), (signal.SIGINT, 130, "embedded")],
)
def test_a_run_that_is_ended_leaves_no_process_behind(
    tmp_path: Path, servers: list[EngineProcess], number: signal.Signals, code: int, engine: str
) -> None:
    """The launcher alone gets kill -9, and its engines live on; Ctrl-C reaches the whole group, as from a terminal."""
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=ended"]
    command += [*SMALL, "parallel.tensor=2", f"rollout.engine={engine}"]
    command += [f'rollout.urls=["{servers[0].url}"]'] if engine == "attach" else []
    gates = Gates(tmp_path / "gates", "import")
    with (tmp_path / "output").open("wb") as output:
        environment = os.environ | gates.environment
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    started: dict[psutil.Process, str] = {}
    try:

        def have_ranks_started() -> bool:
            started.update(descendants(run.pid))
            return run.poll() is not None or sum("bapo_megatron.trainer" in args for args in started.values()) >= 2

        wait_until(have_ranks_started, "the ranks started")
        gates.wait("import", lambda: run.poll() is None, (tmp_path / "output").read_text)
        assert any("engines.embedded" in args for args in started.values()) == (engine == "embedded")
        if number == signal.SIGINT:
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        assert run.wait(HANG_S) == code
        wait_until(lambda: not any(map(is_alive, started)), f"{started} ended")
        text = (tmp_path / "output").read_text()
        assert "Traceback" not in text, text
    finally:
        run.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait()


@dataclass
class Watched:
    """A process of a run: its command line, its environment at the start, the addresses at which it listens."""

    command: str
    environment: dict[str, str]
    addresses: set[str] = field(default_factory=set)


def watch_sockets(pid: int, seen: dict[int, Watched]) -> None:
    """Add what the kernel's table now says of a process and all below it: TCP over IPv4 and IPv6."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                # Exec changes both, they are empty while a process ends, and SGLang's title overwrites them.
                command, environment = " ".join(process.cmdline()), process.environ()
                sockets = process.net_connections(kind="tcp")
                known = seen.setdefault(process.pid, Watched("", {}))
                known.command, known.environment = command or known.command, environment or known.environment
                known.addresses |= {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        pytest.param(["rollout.engine=embedded"], ["engines.embedded"], id="embedded", marks=pytest.mark.slow),
        pytest.param(
            ["rollout.engine=sglang", "rollout.server_tensor_parallel=2"],
            ["engines.sglang_server", "sglang::scheduler_TP0", "sglang::scheduler_TP1"],
            id="sglang",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
            ],
        ),
    ],
)
def test_a_local_run_listens_on_loopback_only(tmp_path: Path, settings: list[str], parts: list[str]) -> None:
    """Anyone who reaches one of torch's stores can change what it holds.

    All processes are checked while the run waits before its second step, and repeatedly before and after.
    The variables are checked too: if the host's name means loopback, gloo listens there without them.
    """
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=quiet"]
    command += [*SMALL, "parallel.tensor=2", "train.num_steps=2"]
    command += ["reward.kind=bapo_megatron.rewards.answers:judge_chain", *settings]  # in judge processes
    gates = Gates(tmp_path / "gates", 2)
    with (tmp_path / "output").open("wb") as output:
        environment = os.environ | gates.environment
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    seen: dict[int, Watched] = {}

    def is_running_and_watched() -> bool:
        watch_sockets(run.pid, seen)
        return run.poll() is None

    try:
        gates.wait(2, is_running_and_watched, (tmp_path / "output").read_text)
        watch_sockets(run.pid, seen)
        gates.open(2)
        wait_until(lambda: not is_running_and_watched(), "the run had ended")
        assert run.wait() == 0, (tmp_path / "output").read_text()
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(HANG_S)
    for part in ("bapo_megatron.trainer", "rewards.worker", *parts):
        assert any(part in each.command for each in seen.values()), f"no {part} in {seen}"
    assert {address for each in seen.values() for address in each.addresses} == {"127.0.0.1"}, seen
    whole = [each for each in seen.values() if each.environment]  # one that was only seen as it ended has none
    ranks = [each for each in whole if "bapo_megatron.trainer" in each.command]
    assert [each.environment.get("BAPO_LAUNCHER") for each in ranks] == [str(run.pid)] * len(ranks), ranks
    in_groups = ranks + [each for each in whole if parts[0] in each.command]
    assert len(in_groups) >= 3
    assert [each.environment.get("GLOO_SOCKET_IFNAME") for each in in_groups] == ["lo"] * len(in_groups), in_groups


KILLED_IN_AN_EVALUATION = """\
import os, signal, sys
from pathlib import Path

def build():
    from bapo_megatron.engines.embedded.engine import BatchingEngine
    submit, killed = BatchingEngine.submit, Path(__file__).with_name("was-killed")

    def submit_and_end(self, sequences):
        submit(self, sequences)
        if any(s.rid.startswith("eval-") for s in sequences) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    BatchingEngine.submit = submit_and_end

if any("engines.embedded" in word for word in sys.orig_argv):
    build()
"""


@pytest.mark.slow
def test_the_only_engine_killed_in_an_evaluation_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """The engine is restarted, pushed to, and asked for the rest. The first thing that it samples is an evaluation."""
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=killed"]
    command += [*SMALL, "parallel.tensor=1", "train.num_steps=1", "eval.interval_steps=1", "eval.num_prompts=40"]
    (tmp_path / "sitecustomize.py").write_text(KILLED_IN_AN_EVALUATION)  # Python runs it when it starts
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        assert run.wait(HANG_S) == 0, (tmp_path / "output").read_text()
        (log,) = (tmp_path / "killed" / "logs").rglob("trainer-0.log")
        fenced = [line for line in log.read_text().splitlines() if "is fenced off" in line]
        assert len(fenced) == 1
        assert "requests from eval-" in fenced[0]
        (row,) = map(json.loads, (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines())
        assert row["eval/num_samples"] == 40
    finally:
        run.kill()  # the others end with it
        run.wait()
