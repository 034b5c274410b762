"""Stalls: when they are reported, what a report holds, and which ranks are named."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.monitor.stall import StallWatchdog, hanging_ranks
from bapo_megatron.runtime.heartbeat import TRAINER, Heartbeat
from bapo_megatron.runtime.stopwatch import Stopwatch
from tests.distributed import HANG_S


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

    def wait_for_looks(self) -> None:
        """Wait until the watchdog has acted on all that happened before this call."""
        num_looks = self.num_looks
        wait_for(lambda: self.num_looks > num_looks + 3)


def told_of(folder: Path, heads: dict[int, str]) -> list[str]:
    """Return what rank 0 says about each place, after ranks have reported with these heads."""
    for rank, head in heads.items():
        (folder / f"stall-{rank}.txt").write_text(head)
    told: list[str] = []
    options: Any = {"engine_timeout_s": 600, "num_ranks": len(heads), "heartbeat": Heartbeat(clock=Clock())}
    with StallWatchdog(0, folder, timeout_s=0.1, tell=told.append, **options):
        wait_for(lambda: told)
    (line,) = told
    places = line.removeprefix("no progress: ").removesuffix(f"; see {folder}/stall-<rank>.txt")
    return places.split("; ")


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
    watch = Stopwatch(heartbeat)
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
                first = report.read_text()
                clock.now_s += 1
                clock.wait_for_looks()
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
    clock = Clock()
    heartbeat = Heartbeat(clock=clock)
    report = tmp_path / "stall-0.txt"
    heartbeat.enter("rollout")
    with StallWatchdog(0, tmp_path, timeout_s=0.1, engine_timeout_s=70, heartbeat=heartbeat):
        clock.now_s += 50
        heartbeat.beat("engine a", "answered call 3")
        clock.wait_for_looks()  # before the clock moves, so that the watchdog has seen the answer
        clock.now_s += 69
        clock.wait_for_looks()
        assert not report.exists(), "the trainer's last action is 119 s old, the engine's 69 s"
        clock.now_s += 2
        wait_for(report.exists)
        assert "no progress for 71 s" in report.read_text()

        heartbeat.beat(TRAINER, "took a batch")
        heartbeat.enter("train")
        clock.wait_for_looks()
        report.unlink()
        clock.now_s += 0.05
        clock.wait_for_looks()
        assert not report.exists(), "the trainer's last action is younger than its limit"
        clock.now_s += 0.06
        heartbeat.beat("engine a", "answered call 4")
        wait_for(report.exists)


def test_ranks_at_the_same_place_share_a_line_and_the_odd_one_comes_first(tmp_path: Path) -> None:
    heads = {0: "a\nstep 1, train: X", 1: "b\nstep 1, train: Y", 2: "c\nstep 1, train: X"}
    assert told_of(tmp_path, heads) == ["rank 1 in step 1, train: Y", "ranks 0, 2 in step 1, train: X"]


WAITING = "when\nstep 1, train: in all_reduce, called by learner/parallel.py:1 (sum)\n"
HANGING = "when\nstep 1, train: at learner/policy.py:2 (forward)\n"


def test_a_rank_that_hangs_is_named_before_those_that_wait_for_it(tmp_path: Path) -> None:
    assert [line[:6] for line in told_of(tmp_path, {0: WAITING, 1: HANGING})] == ["rank 1", "rank 0"]


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
        os.utime(tmp_path / f"stall-{rank}.txt", (0, 0))  # a stall that is over
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
