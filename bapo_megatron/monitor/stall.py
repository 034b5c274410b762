"""Stalls: each trainer rank watches itself, and writes a report when it makes no progress.

    <run>/logs/attempt-N/stall-<rank>.txt    last action of each role, stacks of all threads, tasks of the rollout loop

Rank 0 then shows each rank's place on the terminal. A report does not end the run; the deadlines of collectives and
requests do. While the trainer waits for responses, answers from engines also count as progress.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from bapo_megatron.config.schema import Config
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.runtime.heartbeat import TRAINER, Beat, Heartbeat

TIMEOUT_SHARE = 0.5  # share of parallel.timeout_s: report a stall before a collective gives up
_ASKS_ENGINES = ("rollout", "eval")  # spans in which ranks wait for rank 0, which waits for engines
_MAX_POLL_S = 5.0
_LOG = 2  # standard error, which is the rank's log
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class StallWatchdog:
    """A thread that reports each stall once. A context manager around the training loop.

    Args:
        folder: where all ranks write their reports.
        timeout_s: how long this rank may go without a beat.
        engine_timeout_s: the same limit in spans that wait for engines.
        num_ranks: number of trainer ranks, to name those without a report.
        tell: receives lines for the user on rank 0; None on other ranks.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        *,
        timeout_s: float,
        engine_timeout_s: float,
        heartbeat: Heartbeat,
        num_ranks: int = 1,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._rank = rank
        self._folder = folder
        self._timeout_s = timeout_s
        self._engine_timeout_s = engine_timeout_s
        self._num_ranks = num_ranks
        self._tell = tell
        self._heartbeat = heartbeat
        self._poll_s = min(timeout_s / 8, _MAX_POLL_S)
        self._watched = threading.current_thread()
        self._reported: Beat | None = None  # the last beat before the reported stall
        self._found: dict[int, str] = {}  # each rank's report when last checked
        self._told: dict[int, str] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)

    @classmethod
    def of(
        cls, config: Config, rank: int, folder: Path, heartbeat: Heartbeat, tell: Callable[[str], None] | None
    ) -> StallWatchdog:
        """Create the watchdog from the settings, so that it reports before collectives time out."""
        timeout_s = config.parallel.timeout_s * TIMEOUT_SHARE
        patience_s = timeout_s + config.rollout.request_timeout_s
        return cls(
            rank,
            folder,
            timeout_s=timeout_s,
            engine_timeout_s=patience_s,
            heartbeat=heartbeat,
            num_ranks=config.parallel.size,
            tell=tell,
        )

    def __enter__(self) -> StallWatchdog:
        self._heartbeat.beat(TRAINER, "start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._has_ended.wait(self._poll_s):
            # A fallback if another thread holds the interpreter lock, which faulthandler's C code does not need.
            faulthandler.dump_traceback_later(self._engine_timeout_s, file=_LOG)
            last, limit_s = self._last_beat()
            idle_s = self._heartbeat.clock() - last.at_s
            if idle_s > limit_s and last != self._reported:
                self._reported = last
                write_atomically(self._folder / f"stall-{self._rank}.txt", self._report(idle_s))
            if self._tell is not None:
                self._tell_of_ranks(self._tell)

    def _last_beat(self) -> tuple[Beat, float]:
        """Return the beat that shows progress, and the age that it may reach, in seconds."""
        beats = self._heartbeat.beats()
        if self._heartbeat.span not in _ASKS_ENGINES:
            return beats[TRAINER], self._timeout_s
        return max(beats.values(), key=lambda beat: beat.at_s), self._engine_timeout_s

    def _report(self, idle_s: float) -> str:
        """Compose the report. First line: rank and time. Second line: place, the same text for ranks that share it."""
        out, now_s = io.StringIO(), self._heartbeat.clock()
        frames = sys._current_frames()
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{when}: trainer rank {self._rank} on {socket.gethostname()}, process {os.getpid()}", file=out)
        print(f"{self._place(frames[self._watched.ident or 0])}", file=out)
        print(f"no progress for {idle_s:.0f} s; last actions:", file=out)
        for role, beat in sorted(self._heartbeat.beats().items(), key=lambda item: -item[1].at_s):
            print(f"    {now_s - beat.at_s:8.1f} s ago  {role}: {beat.action}", file=out)
        for thread in sorted(threading.enumerate(), key=lambda t: t is not self._watched):
            if thread.ident in frames and thread is not self._thread:
                print(f"\nthread {thread.name}, most recent call last:", file=out)
                print("".join(traceback.format_stack(frames[thread.ident])), end="", file=out)
        for name, loop in list(self._heartbeat.loops.items()):
            for task in asyncio.all_tasks(loop):
                print(f"\ntask {task.get_name()} of the {name} loop:", file=out)
                task.print_stack(file=out)
        return out.getvalue()

    def _place(self, frame: FrameType) -> str:
        """Describe the place: "step 3, train: in all_reduce, called by runtime/together.py:150 (wait_together)"."""
        step = f"step {self._heartbeat.step}" if self._heartbeat.step else "before the first step"
        return f"{step}, {self._heartbeat.span or 'between spans'}: {whereabouts(frame)}"

    def _tell_of_ranks(self, tell: Callable[[str], None]) -> None:
        """Report all newly stalled ranks on one line, once no more of them turn up."""
        found = _heads(self._folder)
        new = {rank: head for rank, head in found.items() if self._told.get(rank) != head}
        if new and found == self._found:
            self._told = found
            lines = [*_by_place(new), *_without_report(found, self._num_ranks)]
            tell(f"no progress: {'; '.join(lines)}; see {self._folder}/stall-<rank>.txt")
        self._found = found


def whereabouts(frame: FrameType | None) -> str:
    """Describe where a thread is: the collective of torch.distributed, if any, and the innermost line of this package.

    Example: "in all_reduce, called by kernels/base.py:30 (combine)"
    """
    collective = line = None
    while frame is not None and line is None:
        code = frame.f_code
        if collective is None and code.co_filename.endswith(_COLLECTIVES) and not code.co_name.startswith("_"):
            collective = code.co_name
        if code.co_filename.startswith(_PACKAGE):
            line = f"{code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return f"in {collective}, called by {line}" if collective else f"at {line or 'a place outside of this package'}"


def hanging_ranks(folder: Path, num_ranks: int, max_age_s: float) -> str | None:
    """Describe the ranks for which others waited in a collective until it gave up, or None if no report tells.

    Args:
        folder: where ranks leave their reports.
        max_age_s: ignore reports older than this: those stalls are over.
    """
    heads = _heads(folder, since=time.time() - max_age_s)
    waiting = {rank for rank, head in heads.items() if _is_waiting(head.splitlines()[1])}
    if not waiting or len(waiting) == num_ranks:
        return None
    busy = {rank: head for rank, head in heads.items() if rank not in waiting}
    return "; ".join([*_by_place(busy), *_without_report(heads, num_ranks)])


_REMARK = re.compile(r"(?<![a-z])(?:INFO|DEBUG)\b")
_MAX_PREFIX = 80  # characters in which a log line has its time, name and level


def last_words(log: Path) -> str:
    """Return the line of a dead rank's log that may say why: the end of its last traceback, or else its last line, but
    no library's remark."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = [line for line in (lines[begins[-1] + 1 :] if begins else []) if not line[0].isspace()]
    others = [line for line in lines if not line[0].isspace() and not _REMARK.search(line[:_MAX_PREFIX])]
    return (after[:1] or (lines if begins else others)[-1:] or [""])[0].strip()


def _heads(folder: Path, since: float = 0.0) -> dict[int, str]:
    """Return the first two lines of each rank's report, if written after `since` (Unix time)."""
    reports = [path for path in folder.glob("stall-*.txt") if path.stat().st_mtime >= since]
    return {int(p.stem.removeprefix("stall-")): "\n".join(p.read_text().splitlines()[:2]) for p in reports}


def _is_waiting(place: str) -> bool:
    """Return whether a place is a collective, in which case another rank may be at fault."""
    return ": in " in place


def _by_place(heads: dict[int, str]) -> Iterator[str]:
    """Group ranks by place, smallest group first, but ranks that wait in a collective last.

    Example: ["rank 1 in step 3, train: at ...", "ranks 0, 2, 3 in step 3, train: in all_reduce, ..."].
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, head in sorted(heads.items()):
        ranks[head.splitlines()[1]].append(rank)
    for place, members in sorted(ranks.items(), key=lambda item: (_is_waiting(item[0]), len(item[1]))):
        yield f"{_named(members)} in {place}"


def _without_report(heads: dict[int, str], num_ranks: int) -> Iterator[str]:
    """Yield a line about the ranks that have not reported, if others have."""
    if silent := [rank for rank in range(num_ranks) if rank not in heads]:
        yield f"{_named(silent)} without a report: busy, stopped, or blocked outside of Python"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
