"""The endpoint for Prometheus, stalls, slow ranks, and what is out of memory."""

import asyncio
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.engines.base import EngineState
from bapo_megatron.errors import ConfigError
from bapo_megatron.metrics import METRICS
from bapo_megatron.monitor.oom import is_out_of_memory
from bapo_megatron.monitor.prometheus import PrometheusEndpoint, prometheus_name
from bapo_megatron.monitor.stall import StallWatchdog, _by_place, hanging_ranks
from bapo_megatron.runtime import straggler
from bapo_megatron.runtime.heartbeat import TRAINER, Heartbeat
from bapo_megatron.runtime.stopwatch import Stopwatch
from bapo_megatron.runtime.straggler import LocalTime, StragglerAlarm, straggler_metrics
from tests.distributed import HANG_S


def scrape(url: str) -> dict[str, float]:
    """Samples by name and labels."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=HANG_S) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


# Prometheus


def test_the_endpoint_serves_the_latest_of_each_metric_and_counts() -> None:
    endpoint, began_s = PrometheusEndpoint("demo", 0), time.time()
    try:
        collector = endpoint.collector
        collector.engine_states = lambda: [EngineState("http://a:1", True, False, 7, 3, 2)]
        collector.record({"step": 1, "eval/reward": 0.25, "train/tokens": 100.0, "time/step_s": 2.0})
        collector.record({"step": 2, "train/tokens": 50.0, "rollout/tokens_generated": 30.0, "my/own-metric": 1.5})
        ended_s, found = time.time(), scrape(endpoint.url)
    finally:
        endpoint.close()
    assert found['bapo_step{run="demo"}'] == 2
    assert found['bapo_eval_reward{run="demo"}'] == 0.25, "of the step before"
    assert found['bapo_time_step_seconds{run="demo"}'] == 2
    assert found['bapo_my_own_metric{run="demo"}'] == 1.5
    assert found['bapo_trained_tokens_total{run="demo"}'] == 150
    assert found['bapo_generated_tokens_total{run="demo"}'] == 30
    assert found['bapo_steps_total{run="demo"}'] == 2
    engine = {name: found[f'bapo_engine_{name}{{engine="http://a:1",run="demo"}}'] for name in ("up", "live")}
    assert engine == {"up": 1, "live": 0}
    assert found['bapo_engine_weight_version{engine="http://a:1",run="demo"}'] == 7
    assert found['bapo_engine_running_requests{engine="http://a:1",run="demo"}'] == 3
    assert began_s <= found['bapo_last_step_timestamp_seconds{run="demo"}'] <= ended_s


def test_names_are_valid_and_different() -> None:
    names = {prometheus_name(metric) for metric in METRICS}
    assert len(names) == len(METRICS)
    assert all(name.replace("_", "").isalnum() and name.startswith("bapo_") for name in names)
    assert prometheus_name("train/tokens_per_s") == "bapo_train_tokens_per_second"


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"monitor.prometheus_port={port}: cannot listen on 127.0.0.1"):
            PrometheusEndpoint("demo", port)


# stalls


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Clock:
    """A clock that a test moves on, and a count of the watchdog's looks at it."""

    def __init__(self) -> None:
        self.now_s, self.num_looks = 0.0, 0

    def __call__(self) -> float:
        self.num_looks += threading.current_thread().name == "stall-watchdog"
        return self.now_s


def test_a_stall_is_reported_once_with_stacks_and_tasks(tmp_path: Path) -> None:
    clock, told = Clock(), []
    heartbeat = Heartbeat(clock=clock)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rollout")
    thread.start()
    heartbeat.loops["rollout"] = loop
    has_begun, release = threading.Event(), asyncio.Event()

    async def wait() -> None:
        has_begun.set()
        await release.wait()

    waiting = asyncio.run_coroutine_threadsafe(wait(), loop)
    assert has_begun.wait(HANG_S)
    watch = Stopwatch(heartbeat=heartbeat)
    report = tmp_path / "stall-0.txt"

    def is_reported() -> bool:
        clock.now_s += 1  # here, where the report is to find this thread
        return report.exists()

    try:
        with StallWatchdog(0, tmp_path, timeout_s=0.1, engine_timeout_s=600, tell=told.append, heartbeat=heartbeat):
            watch.begin(4)
            with watch.span("train"):
                heartbeat.beat(TRAINER, "forward step 2 of 3")
                wait_for(is_reported)  # nothing moves
                wait_for(lambda: told)
                first, num_looks = report.read_text(), clock.num_looks
                clock.now_s += 1
                wait_for(lambda: clock.num_looks > num_looks + 3)
                assert report.read_text() == first, "told again although nothing has changed"
    finally:
        loop.call_soon_threadsafe(release.set)
        waiting.result(HANG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert first.splitlines()[0].endswith(f"process {os.getpid()}")
    assert first.splitlines()[1].startswith("step 5, train: ")
    assert "trainer: forward step 2 of 3" in first
    assert "thread MainThread" in first
    assert "wait_for(is_reported)" in first
    assert "of the rollout loop" in first
    assert len(told) == 1
    assert told[0].startswith("no progress: rank 0 in step 5, train: ")


def test_answers_of_engines_are_progress_only_while_they_are_waited_for(tmp_path: Path) -> None:
    now = 1000.0
    heartbeat = Heartbeat(clock=lambda: now)
    watchdog = StallWatchdog(0, tmp_path, timeout_s=10, engine_timeout_s=70, heartbeat=heartbeat)
    heartbeat.enter("rollout")
    now += 50
    heartbeat.beat("engine a", "answered call 3")
    last, limit_s = watchdog._last_beat()
    assert (now - last.at_s, limit_s) == (0, 70)
    heartbeat.enter("train")
    now += 11
    heartbeat.beat("engine a", "answered call 4")
    last, limit_s = watchdog._last_beat()
    assert (now - last.at_s, limit_s) == (11, 10)


def test_ranks_at_the_same_place_share_a_line_and_the_odd_one_comes_first() -> None:
    heads = {0: "a\nstep 1, train: X", 1: "b\nstep 1, train: Y", 2: "c\nstep 1, train: X"}
    assert list(_by_place(heads)) == ["rank 1 in step 1, train: Y", "ranks 0, 2 in step 1, train: X"]


WAITING = "when\nstep 1, train: in all_reduce, called by learner/parallel.py:1 (sum)\n"
HANGING = "when\nstep 1, train: at learner/policy.py:2 (forward)\n"


def test_a_rank_that_hangs_is_named_before_those_that_wait_for_it() -> None:
    waiting, hanging = WAITING.strip(), HANGING.strip()
    assert [line[:6] for line in _by_place({0: waiting, 1: hanging})] == ["rank 1", "rank 0"]


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ({0: WAITING, 1: HANGING, 2: WAITING}, "rank 1 in step 1, train: at learner/policy.py:2 (forward)"),
        ({0: WAITING, 2: WAITING}, "rank 1 without a report: busy, stopped, or blocked outside of Python"),
        ({0: WAITING, 1: WAITING, 2: WAITING}, None),
        ({0: HANGING}, None),
        ({}, None),
    ],
)
def test_after_a_collective_gave_up_the_rank_at_fault_is_named(
    tmp_path: Path, reports: dict[int, str], named: str | None
) -> None:
    for rank, text in reports.items():
        (tmp_path / f"stall-{rank}.txt").write_text(text)
    assert hanging_ranks(tmp_path, 3, max_age_s=HANG_S) == named
    for rank in reports:
        os.utime(tmp_path / f"stall-{rank}.txt", (0, 0))  # of a stall that is over
    assert hanging_ranks(tmp_path, 3, max_age_s=HANG_S) is None


def test_rank_0_names_a_rank_that_cannot_report(tmp_path: Path) -> None:
    """Stopped by a signal, for example: rank 0 alone sees that nothing moves."""
    clock, told = Clock(), []
    heartbeat = Heartbeat(clock=clock)
    options: Any = {"engine_timeout_s": 600, "num_ranks": 2, "tell": told.append, "heartbeat": heartbeat}
    with StallWatchdog(0, tmp_path, timeout_s=0.1, **options):
        clock.now_s += 1
        wait_for(lambda: told)
    assert "; rank 1 without a report: busy, stopped, or blocked outside of Python; see " in told[0]


# slow ranks


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    found = straggler_metrics([1.0, 1.2, 3.0, 1.0])
    assert found == {
        "straggler/ratio": 3.0,
        "straggler/rank": 2.0,
        "straggler/slowest_s": 3.0,
        "straggler/median_s": 1.0,
    }
    assert straggler_metrics([1.0, 2.0])["straggler/ratio"] == 2
    assert straggler_metrics([1.0]) == straggler_metrics([0.0, 0.0]) == {}


def test_only_a_rank_that_stays_slow_is_told_and_once() -> None:
    alarm = StragglerAlarm()
    slow, fast, other = straggler_metrics([1, 1, 2]), straggler_metrics([1, 1, 1.1]), straggler_metrics([2, 1, 1])
    steps = [slow, other, slow, fast, other, slow, slow, slow, fast, fast, fast, fast, fast, slow, slow, slow]
    told = [alarm.observe(step) is not None for step in steps]
    assert [i for i, t in enumerate(told) if t] == [6, 15], "3 of 5 at the seventh; again after five fast ones"
    assert alarm.observe({}) is None
    again = StragglerAlarm()
    warning = [again.observe(slow) for _ in range(3)][-1]
    assert warning is not None
    assert "trainer rank 2 is slow: its own passes take 2.00 s, 2.0 times the median rank's (1.00 s)" in warning


def test_local_time_leaves_out_what_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 13.0, 20.0, 21.5])
    monkeypatch.setattr(straggler, "_now", lambda: next(moments))
    clock = LocalTime()
    for _ in range(2):
        with clock.running():
            pass
    assert clock.take() == 3.0 + 1.5
    assert clock.take() == 0


# out of memory


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
