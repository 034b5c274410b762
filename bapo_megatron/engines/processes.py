"""Engine processes: started with a log file, ended with their parent."""

import contextlib
import http.client
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from bapo_megatron.engines.key import handed_over
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.runtime import LOOPBACK

_ANY_PORT = 9  # nothing is sent
END_TIMEOUT_S = 15.0
_POLL_S = 0.1
_STACKS_TIMEOUT_S = 1.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, key: str | None = None
) -> subprocess.Popen[bytes]:
    """Start an engine that ends when its standard input closes, so that even kill -9 of this process leaves none.

    It leads its own session: Ctrl-C reaches only this process, which ends the trainer ranks first.

    Args:
        key: what it finds with `take_key`.
    """
    with log.open("wb") as output, handed_over(key) as (secret, descriptors):
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}) | secret,
            pass_fds=descriptors,
            start_new_session=True,
        )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close their standard inputs and wait; kill those that do not end."""
    for process in processes:
        if process.stdin:
            process.stdin.close()
    for process in processes:
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill an engine and its children (it leads its own session). Call it even after `has_ended`: children may survive.

    A process stuck in the kernel, such as in a GPU driver, is reported and left alone.
    """
    if process.returncode is None:  # not reaped, so its process id still belongs to it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(
            f"bapo: engine process {process.pid} has not ended {END_TIMEOUT_S:g} s after SIGKILL and may still hold "
            "its port and its GPU: look at it with ps",
            file=sys.stderr,
            flush=True,
        )
    if process.stdin:
        process.stdin.close()


def ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Make a hung engine and its children write the Python stacks of all threads to its log, before a `kill`.

    Our engines answer SIGUSR1 even while a library holds the interpreter. A process without a handler ends.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGUSR1)
        os.killpg(process.pid, signal.SIGCONT)  # it may hang because it was stopped
    deadline = time.monotonic() + _STACKS_TIMEOUT_S
    while time.monotonic() < deadline and not has_ended(process):
        time.sleep(_POLL_S)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether an engine has ended. Does not reap it, so that `kill` can still find its children."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has just reaped it
        return True


@contextlib.contextmanager
def reserved_ports(count: int, host: str = LOOPBACK) -> Iterator[list[int]]:
    """Reserve free ports of an address. A process that is told to use one can still listen on it."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
        yield [holder.getsockname()[1] for holder in holders]


def own_address(urls: Sequence[str]) -> str:
    """Return the address from which this machine reaches the first of these servers that is on another machine.

    It is 127.0.0.1 if all are on loopback or cannot be found.
    """
    for url in urls:
        try:
            found = socket.getaddrinfo(urlsplit(url).hostname, _ANY_PORT, type=socket.SOCK_DGRAM)
            for family, kind, *_, address in found:
                if not ipaddress.ip_address(address[0]).is_loopback:
                    with socket.socket(family, kind) as probe:
                        probe.connect(address)  # on a datagram socket: only chooses a route
                        return probe.getsockname()[0]
        except OSError:  # reported as unreachable at its first request
            continue
    return LOOPBACK


def loopback_variables(urls: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on loopback; none if one of these servers is on another machine.

    Without them, gloo listens at the host name's address and NCCL on any other interface. The user's values win.
    """
    if own_address(urls) != LOOPBACK:
        return {}
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return {name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def answers(url: str, timeout_s: float = 5.0, key: str | None = None) -> bool:
    """Return whether GET answers 200 in time."""
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):  # refused, reset, late, not HTTP, or another status
        return False


def asks_for_a_key(url: str, timeout_s: float = 5.0) -> bool:
    """Return whether a server refuses to sample without a key; also True if it has no such route or does not answer."""
    request = urllib.request.Request(f"{url}/generate", b"{}", {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s):
            return False
    except urllib.error.HTTPError as refusal:  # 400, 415, 422 and 500 come from a server that has read the request
        return refusal.code in (401, 403, 404, 405)
    except (OSError, http.client.HTTPException):
        return True


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Return when the engine is ready.

    Raises:
        UserError: it refused its arguments (exit code 2).
        EngineError: it ended, or was not ready in time; names its log.
    """
    began_s = time.monotonic()
    while not is_ready():
        check_start(process, log, began_s, timeout_s)
        time.sleep(_POLL_S)


def check_start(process: subprocess.Popen[bytes], log: Path, began_s: float, timeout_s: float) -> None:
    """Check an engine that is not ready yet.

    Args:
        began_s: when it started, on the monotonic clock.

    Raises:
        UserError, EngineError: see `wait_until`.
    """
    code = process.poll()
    if code == 2:
        raise UserError(f"the rollout engine refused to start: {_last_line(log)} (log: {log})")
    if code is not None:
        raise EngineError(f"the rollout engine ended with exit code {code}: {_last_line(log)} (log: {log})")
    if time.monotonic() > began_s + timeout_s:
        raise EngineError(
            f"the rollout engine was not healthy after rollout.startup_timeout_s = {timeout_s:g} s; its log: {log}"
        )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
