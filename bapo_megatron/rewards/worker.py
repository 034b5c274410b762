"""Run a judge or an environment: `python -m bapo_megatron.rewards.worker FD`, started by `rewards/worker_pool.py`.

The socket FD carries one JSON object per line.
    in:   {"judge": JudgeSpec} or {"environment": EnvironmentSpec}, then {"id": n, "fields": {...}} for each request
    out:  {"is_async": b, "place": p}, then for each id {"reward": x, "parts": {...}, "message": m} or {"answer": a} or
          {"problem": "timeout" or "error", "message": m, "traceback": t, "is_misfit": b}; each of these may also have
          "refused_calls": [names] if a program failed. {"user_error": m} may come instead of any line

A built-in judge touches the system only to run programs. If that raises an OSError, something has damaged the process
(a limit was lowered, or descriptors ran out), so it ends, and the pool judges the response again in a fresh process.
"""

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from bapo_megatron.errors import UserError
from bapo_megatron.rewards import environments, judges, replay, verdicts
from bapo_megatron.rewards.environments import EnvironmentSpec, StepFunction, build_environment
from bapo_megatron.rewards.judges import Judge, build_judge
from bapo_megatron.rewards.verdicts import JudgeSpec, Refused

MAX_LINE_BYTES = 256 << 20  # per request: room for a long response and a large answer
_MAX_MESSAGE_CHARS = 500
_MAX_TRACEBACK_CHARS = 4000
_OURS = (
    __file__,
    judges.__file__,
    verdicts.__file__,
    environments.__file__,
    replay.__file__,
    str(Path(__file__).with_name("tools.py")),  # few workers need it
    asyncio.base_events.__file__,
    asyncio.runners.__file__,
    asyncio.tasks.__file__,
    asyncio.timeouts.__file__,
)
_PR_SET_PDEATHSIG = 1

Work = Judge | StepFunction


def main() -> None:
    """Answer requests until the other side closes the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a judge that hangs ends too
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    requests = connection.makefile("rb")

    def send(message: dict[str, Any]) -> None:
        connection.sendall(_line(message))

    ((role, facts),) = json.loads(requests.readline()).items()
    spec = JudgeSpec(**facts) if role == JudgeSpec.role else EnvironmentSpec(**facts)
    _limit_memory(spec.process_memory_bytes)
    try:
        work: Work = build_judge(spec) if isinstance(spec, JudgeSpec) else build_environment(spec)
    except UserError as error:
        send({"user_error": str(error)})
        return
    send({"is_async": work.is_async, "place": work.place})
    if work.is_async:
        asyncio.run(_serve_async(work, spec.timeout_s, connection))
        return
    is_built_in = isinstance(spec, JudgeSpec) and spec.is_built_in
    for line in requests:
        request = json.loads(line)
        reply = _reply(work, request["fields"], is_built_in=is_built_in)
        send({"id": request["id"], **reply})


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _reply(work: Work, fields: dict[str, Any], *, is_built_in: bool) -> dict[str, Any]:
    try:
        value = work(fields)
        return {**_fitting(value, work), **_refused_calls(value)}
    except (Exception, SystemExit) as error:  # arbitrary text can make a judge raise anything
        if is_built_in and isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise
        return _failure(error, work) | _refused_calls(error)


def _refused_calls(outcome: object) -> dict[str, Any]:
    """Return what the judge of programs reports about refused system calls, as part of a reply."""
    names = outcome.refused_calls if isinstance(outcome, Refused) else ()
    return {"refused_calls": names} if names else {}


async def _reply_async(work: Work, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        value = await asyncio.wait_for(work(fields), timeout_s)
        return {**_fitting(value, work), **_refused_calls(value)}
    except (Exception, SystemExit) as error:
        return _failure(error, work) | _refused_calls(error)


def _fitting(value: Any, work: Work) -> dict[str, Any]:
    """Return the reply that carries the function's result, or says that the result does not fit."""
    try:
        return work.reply(value)
    except (TypeError, ValueError) as error:
        return {**_failure(error, work), "is_misfit": True}


def _failure(error: BaseException, work: Work) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"user_error": str(error)}
    problem = "timeout" if isinstance(error, TimeoutError) else "error"
    text, place = _explained(error, work)
    return {"problem": problem, "message": f"{error!r:.{_MAX_MESSAGE_CHARS}}{place}", "traceback": text}


def _explained(error: BaseException, work: Work) -> tuple[str, str]:
    """Return the traceback without this package's frames around the function, and its last place: " (my.py, line 3)".

    If a result does not fit, no frame belongs to the function, so its first line is named instead.
    """
    summary = traceback.TracebackException.from_exception(error)
    for part in (summary, summary.__cause__):
        if part is not None:
            part.stack = traceback.StackSummary.from_list([f for f in part.stack if f.filename not in _OURS])
    frames = [*summary.stack, *(summary.__cause__.stack if summary.__cause__ else [])]
    if not frames and work.place is not None:
        frames = [traceback.FrameSummary(*work.place)]
        summary.stack.extend(frames)
    text = "".join(summary.format())
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return text[-_MAX_TRACEBACK_CHARS:], place


async def _serve_async(work: Work, timeout_s: float, connection: socket.socket) -> None:
    """Answer all requests concurrently; the other side limits their number."""
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
    running: set[asyncio.Task[None]] = set()

    async def serve(request: dict[str, Any]) -> None:
        writer.write(_line({"id": request["id"], **await _reply_async(work, request["fields"], timeout_s)}))

    while line := await reader.readline():
        task = asyncio.create_task(serve(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


def _limit_memory(num_bytes: int) -> None:
    """Limit the heap: 10**10**10 in an answer must cause an error instead of using up the machine's memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that a judge left behind
