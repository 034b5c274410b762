"""Worker processes for judges and environments: a reply within a deadline, whatever the user's function does.

    judge() in any thread, ask() in any loop -> event loop in a thread -> one socket per process, one JSON object a line

A plain function gets `concurrency` processes with one request in each; an asynchronous one gets a single process with
up to `concurrency` requests. When a process dies or hangs, each of its requests (a response to judge, a turn to answer)
is repeated alone in a process, so that only the one to blame is lost.

No library does this: process pools (concurrent.futures, pebble) unpickle what their workers send, but these workers run
text that a model wrote, and no pool gives each of many concurrent requests its own deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from bapo_megatron.errors import UserError
from bapo_megatron.rewards.environments import EnvironmentSpec, Failed, StepAnswer, TurnJson, read_answer
from bapo_megatron.rewards.scratch import delete_abandoned, scratch_folder
from bapo_megatron.rewards.verdicts import JudgeSpec, Verdict
from bapo_megatron.runtime import num_cores, python_module
from bapo_megatron.runtime.subreaper import below_subreaper

MAX_STARTS = 3
MAX_PROCESSES = 8
ASYNC_CONCURRENCY = 64
START_TIMEOUT_S = 600.0  # long, because a judge may load a model
GRACE_S = 5.0  # added to the deadline if the judge enforces it itself; how long a process may outlive its socket
END_TIMEOUT_S = 60.0  # how long to wait for a killed process
_PREFIXES = ("bapo-rewards-", "bapo-program-")  # names of temporary folders: a pool's, a program's
_WATCH_S = 0.1
_MAX_REPLY_BYTES = 1 << 20


Spec = JudgeSpec | EnvironmentSpec


class WorkersError(RuntimeError):
    """No process that stays alive, or a pool that was closed."""


class WorkerLost(Exception):  # noqa: N818
    """End of a worker process before its reply."""


class Worker:
    """One worker process, on one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.is_async = False
        self.place = ""  # where the function is: " in judge (/home/me/rewards.py, line 3)"
        self._process = process
        self._reader = reader
        self._writer = writer
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._is_killed = False
        self._tasks = [asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, spec: Spec, scratch: str, output: int) -> Worker:
        """Start a process that prints to `output`, and build its function; temporary files are kept below `scratch`.

        Raises:
            UserError: the function cannot be built from `spec`.
            WorkerLost: the process ended before it was ready, or was not ready after START_TIMEOUT_S.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            streams = await asyncio.open_connection(sock=ours, limit=_MAX_REPLY_BYTES)
            process = subprocess.Popen(
                [*below_subreaper(), *python_module("bapo_megatron.rewards.worker"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # keeps Ctrl-C away
                env=os.environ | {"TMPDIR": scratch},
            )
        worker = cls(process, *streams)
        try:
            hello = await asyncio.wait_for(worker._hello(spec), START_TIMEOUT_S)
        except BaseException as error:
            await worker.ended()
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"it was not ready after {START_TIMEOUT_S:g} s") from None
            raise
        worker.is_async = hello["is_async"]
        if hello["place"] is not None:
            file, line, name = hello["place"]
            worker.place = f" in {name} ({file}, line {line})"
        return worker

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and not self.has_exited

    @property
    def has_exited(self) -> bool:
        """Whether the process is gone; a killed process may take a moment."""
        return self._process.poll() is not None

    async def ask(self, fields: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the reply. Raises WorkerLost; after `limit_s`, ends the process and raises TimeoutError."""
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
        """End the process and its children. Safe to call twice."""
        if self._is_killed:  # another process may have its id by now
            return
        self._is_killed = True
        self._process.terminate()  # the subreaper ends them all
        self._writer.close()
        code = self._process.poll()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerLost("it hung" if code is None else f"it ended with code {code}"))

    async def ended(self) -> None:
        """Kill the process and wait for its end; give up on one that is stuck in the kernel."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit(), END_TIMEOUT_S)

    async def _hello(self, spec: Spec) -> dict[str, Any]:
        self._writer.write(json.dumps({spec.role: dataclasses.asdict(spec)}).encode() + b"\n")
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line:
            raise WorkerLost(f"it ended before its {spec.role} was built")
        hello = json.loads(line)
        if "user_error" in hello:
            raise UserError(hello["user_error"])
        self._tasks.append(asyncio.create_task(self._read()))
        return hello

    async def _read(self) -> None:
        """Hand replies to their callers until the process ends."""
        try:
            while line := await self._reader.readline():
                reply = json.loads(line)
                future = self._pending.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except (OSError, ValueError, RecursionError):
            pass  # the process ended within a line, or a judge meddled with the socket
        with contextlib.suppress(TimeoutError):  # otherwise its exit code is known
            await asyncio.wait_for(self._exit(), GRACE_S)
        self.kill()

    async def _watch(self) -> None:
        """Watch the process itself: a child that the judge forked may hold the socket open."""
        await self._exit()
        self.kill()

    async def _exit(self) -> None:
        while not self.has_exited:
            await asyncio.sleep(_WATCH_S)


class WorkerPool:
    """Pool of worker processes; `judge` and `ask` are thread-safe."""

    def __init__(self, spec: Spec, concurrency: int | None, output: int = 2) -> None:
        """Start a first process, so that a broken judge fails now. Raises UserError, WorkersError.

        Args:
            output: the descriptor that gets what the function prints; by default the log of a rank.
        """
        self._spec = spec
        self._output = output
        delete_abandoned(tempfile.gettempdir(), *_PREFIXES)
        self._resources = contextlib.ExitStack()
        self._scratch = self._resources.enter_context(scratch_folder(_PREFIXES[0]))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._is_closed = False
        self.gate = threading.Lock()  # no call may arrive while the loop ends
        self._workers: set[Worker] = set()  # kept until their processes are gone: close() waits for them
        self._idle: list[Worker] = []
        self._shared: Worker | None = None
        try:
            self._run(self._open(concurrency))
        except BaseException:
            self.close()
            raise

    def judge(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Judge responses, given as their fields, and return verdicts in the same order.

        Raises:
            UserError: the judge blames the data or the settings rather than the response.
            WorkersError: no judge process stays alive, or the pool was closed.
        """
        return self._run(self._judge_all(fields))

    async def verdicts(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Judge like `judge`; may be awaited in any event loop."""
        return await asyncio.wrap_future(self._submitted(self._judge_all(fields)))

    async def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request; may be awaited in any event loop. Raises like `judge`."""
        reply, _ = await asyncio.wrap_future(self._submitted(self._reply(fields)))
        return reply

    def close(self) -> None:
        """End the processes; pending calls raise WorkersError. Safe to call twice."""
        with self.gate:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._resources.close()

    def _submitted(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        with self.gate:
            if self._is_closed:
                coroutine.close()
                raise WorkersError("the judge processes were closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Any) -> Any:
        future = self._submitted(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise WorkersError("the judge processes were closed") from None

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
        keeps_deadline = self._is_async or self._spec.keeps_deadline
        self._limit_s = self._spec.timeout_s + (GRACE_S if keeps_deadline else 0.0)

    async def _judge_all(self, fields: Sequence[dict[str, Any]]) -> list[Verdict]:
        return list(await asyncio.gather(*(self._judge(f) for f in fields)))

    async def _judge(self, fields: dict[str, Any]) -> Verdict:
        reply, waited_s = await self._reply(fields)
        return Verdict.of(reply, waited_s)

    async def _reply(self, fields: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Ask, and if the process is lost, ask again alone in a process: another request may have killed the first.

        Returns the reply and the seconds that it took, including the queue.
        """
        began_s = time.monotonic()
        async with self._slots:
            try:
                if self._is_async:
                    reply = await self._ask_shared(fields)
                else:
                    reply = await self._ask_alone(fields, await self._lease())
            except WorkerLost:
                reply = await self._ask_again(fields)
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        return reply, time.monotonic() - began_s

    async def _ask_shared(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask the process that many requests share. One bad request makes all of them raise WorkerLost."""
        async with self._shared_start:
            if self._shared is None or not self._shared.is_alive:
                self._shared = await self._start()
            worker = self._shared
        try:
            return await worker.ask(fields, self._limit_s)
        except TimeoutError:
            raise WorkerLost("it hung") from None

    async def _ask_again(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask a process that serves only this request, so that a second loss is the request's own fault.

        A plain function gets a fresh process: an idle one may have died for another reason. An asynchronous one may
        reuse the few processes that other requests of the lost process have started.
        """
        async with self._alone:
            try:
                return await self._ask_alone(fields, await (self._lease() if self._is_async else self._start()))
            except WorkerLost as loss:
                return {"problem": "error", "message": f"its process died, twice: {loss}"}

    async def _ask_alone(self, fields: dict[str, Any], worker: Worker) -> dict[str, Any]:
        """Ask a process that does nothing else, and keep it if it survives. Raises WorkerLost."""
        try:
            return await worker.ask(fields, self._limit_s)
        except TimeoutError:
            return {"problem": "timeout", "message": f"no {self._spec.gives} in {self._limit_s:g} s{worker.place}"}
        except asyncio.CancelledError:
            worker.kill()  # it is still working on this request
            raise
        finally:
            if worker.is_alive:
                self._idle.append(worker)

    async def _lease(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
        return await self._start()

    async def _start(self) -> Worker:
        reasons = []
        delete_abandoned(self._scratch, *_PREFIXES)  # left by judges that were killed
        for _ in range(MAX_STARTS):
            if self._is_closed:
                raise WorkersError("the judge processes were closed")
            try:
                worker = await Worker.start(self._spec, self._scratch, self._output)
            except WorkerLost as loss:
                reasons.append(str(loss))
                continue
            self._workers = {w for w in self._workers if not w.has_exited} | {worker}
            return worker
        what, why = f"{self._spec.does} ({self._spec.kind})", "; ".join(dict.fromkeys(reasons))
        raise WorkersError(f"no process that {what} could be started: {why}")

    async def _end_all(self) -> None:
        me = asyncio.current_task()
        await asyncio.gather(*(worker.ended() for worker in self._workers), return_exceptions=True)
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class EnvironmentProcesses:
    """An environment whose step function runs in worker processes."""

    def __init__(self, spec: EnvironmentSpec, concurrency: int | None = None, output: int = 2) -> None:
        """Start a first process, which prints to `output`. Raises UserError, WorkersError."""
        # From when a process takes the question, which may be asked twice. In any such time, some answer comes.
        self.deadline_s = 2 * (spec.timeout_s + GRACE_S)
        self._pool = WorkerPool(spec, concurrency, output)

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        """Answer a turn. A step that raises, hangs or returns nonsense counts as `Failed`."""
        reply = await self._pool.ask({"turn": turn, "state": state})
        if "answer" in reply:
            return read_answer(reply["answer"])
        return Failed(reply["message"], reply["problem"])

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._pool.close()
