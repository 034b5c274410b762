"""Judge processes: a verdict for each response within a deadline, whatever judges do.

    score() in any thread -> event loop in a thread -> one socket per process, one JSON object a line

A plain judge has `concurrency` processes, one response in each; an asynchronous one has a single process that judges
`concurrency` responses at once. A process that dies or hangs with several responses is given up, and each of them is
judged again in a process that judges nothing else meanwhile, so that only the one to blame is lost.

Why not a library: process pools (concurrent.futures, pebble) unpickle what their workers send, and here workers run
text that a model wrote; none has asynchronous workers with a deadline for each of many responses at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.judges import OWN_DEADLINE, JudgeSpec
from bapo_megatron.runtime.ranks import num_cores

MAX_STARTS = 3
MAX_PROCESSES = 8
ASYNC_CONCURRENCY = 64
START_TIMEOUT_S = 120.0
GRACE_S = 5.0  # for judges that keep the deadline themselves
_WATCH_S = 0.1
_MAX_REPLY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one response. Example: Verdict(0.0, "timeout", "no verdict in 10 s", waited_s=10.1)"""

    reward: float
    problem: Literal["timeout", "error"] | None
    message: str
    waited_s: float  # from the call, so queueing included


class WorkerLost(Exception):  # noqa: N818
    """The process has ended, or was ended because it hung; what it was judging is undecided."""


class Worker:
    """One judge process, on one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.is_async = False
        self._process = process
        self._reader = reader
        self._writer = writer
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._is_killed = False
        self._tasks = [asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, spec: JudgeSpec, scratch: str) -> Worker:
        """A process whose judge is built; its temporary files go below `scratch`.

        Raises:
            UserError: the judge cannot be built from `spec`.
            WorkerLost: the process ended before it was ready, or was not ready in START_TIMEOUT_S.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "bapo_megatron.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what judges print belongs to the log
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the trainer, and a judge's own processes end with it
                env=os.environ | {"TMPDIR": scratch},
            )
        ours.setblocking(False)
        worker = cls(process, *await asyncio.open_connection(sock=ours, limit=_MAX_REPLY_BYTES))
        try:
            hello = await asyncio.wait_for(worker._hello(spec), START_TIMEOUT_S)
        except BaseException as error:
            worker.kill()
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"it was not ready after {START_TIMEOUT_S:g} s") from None
            raise
        worker.is_async = hello["is_async"]
        return worker

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self._process.poll() is None

    async def ask(self, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply. Raises WorkerLost; TimeoutError after `limit_s`, and then the process is ended."""
        self._num_asked += 1
        request = self._num_asked
        future = self._pending[request] = asyncio.get_running_loop().create_future()
        try:
            if not self.is_alive:
                raise WorkerLost("it has ended")
            self._writer.write(json.dumps({"id": request, "fields": fields}).encode() + b"\n")
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            self.kill()
            raise
        finally:
            self._pending.pop(request, None)

    def kill(self) -> None:
        """End the process and all that it started. Safe to call twice."""
        if self._is_killed:  # its number may belong to somebody else by now
            return
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        code = self._process.poll()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerLost("it hung" if code is None else f"it ended with code {code}"))

    async def ended(self) -> None:
        """Kill it and wait for its end."""
        self.kill()
        await asyncio.wait_for(self._tasks[0], GRACE_S)

    async def _hello(self, spec: JudgeSpec) -> dict[str, Any]:
        self._writer.write(json.dumps(dataclasses.asdict(spec)).encode() + b"\n")
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line:
            raise WorkerLost("it ended before its judge was built")
        hello = json.loads(line)
        if "user_error" in hello:
            raise UserError(hello["user_error"])
        self._tasks.append(asyncio.create_task(self._read()))
        return hello

    async def _read(self) -> None:
        """Hand replies to those who wait for them, to the end of the process."""
        try:
            while line := await self._reader.readline():
                reply = json.loads(line)
                future = self._pending.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except (OSError, ValueError):
            pass  # torn by the end of the process, or written by a judge that meddles with our socket
        await asyncio.sleep(_WATCH_S)  # so that the exit code can be told
        self.kill()

    async def _watch(self) -> None:
        """The socket alone does not tell: a process that a judge forked may hold it open."""
        while self._process.poll() is None:
            await asyncio.sleep(_WATCH_S)
        self.kill()


class WorkerPool:
    """Verdicts from judge processes; `judge` may be called from several threads at once."""

    def __init__(self, spec: JudgeSpec, concurrency: int | None) -> None:
        """Starts a first process, so that a judge that cannot work is told now. Raises UserError, RuntimeError."""
        self._spec = spec
        self._scratch = tempfile.TemporaryDirectory(prefix="bapo-rewards-", ignore_cleanup_errors=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._is_closed = False
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._shared: Worker | None = None
        try:
            self._run(self._open(concurrency))
        except BaseException:
            self.close()
            raise

    def judge(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        """One verdict for each, in order.

        Raises:
            UserError: the judge says that the data or the settings are wrong, not the response.
            RuntimeError: no judge process stays alive, or the pool was closed.
        """
        return self._run(self._judge_all(fields))

    def close(self) -> None:
        """End the processes; calls that still wait raise RuntimeError. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._scratch.cleanup()

    def _run(self, coroutine: Any) -> Any:
        if self._is_closed:
            coroutine.close()
            raise RuntimeError("the judge processes were closed")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the judge processes were closed") from None

    async def _open(self, concurrency: int | None) -> None:
        first = await self._start()
        self._is_async = first.is_async
        num_processes = min(MAX_PROCESSES, num_cores())
        if self._is_async:
            self._shared = first
            self._slots = asyncio.Semaphore(concurrency or ASYNC_CONCURRENCY)
        else:
            self._idle.append(first)
            self._slots = asyncio.Semaphore(concurrency or num_processes)
        self._alone = asyncio.Semaphore(min(num_processes, concurrency or num_processes))
        self._shared_start = asyncio.Lock()
        keeps_deadline = self._is_async or self._spec.kind in OWN_DEADLINE
        self._limit_s = self._spec.timeout_s + (GRACE_S if keeps_deadline else 0.0)

    async def _judge_all(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        return list(await asyncio.gather(*(self._judge(f) for f in fields)))

    async def _judge(self, fields: dict[str, Any]) -> Verdict:
        """Ask, and where the process was lost ask once more, alone: one that somebody else killed costs no verdict."""
        began_s = time.monotonic()
        async with self._slots:
            try:
                reply = await (self._ask_shared(fields) if self._is_async else self._ask_alone(fields))
            except WorkerLost:
                reply = await self._ask_again(fields)
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        waited_s = time.monotonic() - began_s
        return Verdict(reply.get("reward", 0.0), reply.get("problem"), reply.get("message", ""), waited_s)

    async def _ask_shared(self, fields: dict[str, Any]) -> dict[str, Any]:
        """In the process that many share. Raises WorkerLost, and then it is not known who is to blame."""
        async with self._shared_start:
            if self._shared is None or not self._shared.is_alive:
                self._shared = await self._start()
            worker = self._shared
        try:
            return await worker.ask(fields, self._limit_s)
        except TimeoutError:
            raise WorkerLost("it hung") from None
        finally:
            if not worker.is_alive:
                self._workers.discard(worker)

    async def _ask_again(self, fields: dict[str, Any]) -> dict[str, Any]:
        async with self._alone:
            try:
                return await self._ask_alone(fields)
            except WorkerLost as loss:
                return {"problem": "error", "message": f"its process died, twice: {loss}"}

    async def _ask_alone(self, fields: dict[str, Any]) -> dict[str, Any]:
        """In a process that judges nothing else meanwhile. Raises WorkerLost."""
        worker = await self._lease()
        try:
            return await worker.ask(fields, self._limit_s)
        except TimeoutError:
            return {"problem": "timeout", "message": f"no verdict in {self._limit_s:g} s"}
        finally:
            if worker.is_alive:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)

    async def _lease(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            self._workers.discard(worker)
        return await self._start()

    async def _start(self) -> Worker:
        reasons = []
        for _ in range(MAX_STARTS):
            if self._is_closed:
                raise RuntimeError("the judge processes were closed")
            try:
                worker = await Worker.start(self._spec, self._scratch.name)
            except WorkerLost as loss:
                reasons.append(str(loss))
                continue
            self._workers.add(worker)
            return worker
        raise RuntimeError(f"no process that judges responses could be started: {'; '.join(reasons)}")

    async def _end_all(self) -> None:
        me = asyncio.current_task()
        await asyncio.gather(*(worker.ended() for worker in self._workers), return_exceptions=True)
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
