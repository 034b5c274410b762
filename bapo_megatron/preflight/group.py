"""The doctor's small process group: measures a real all-reduce and broadcast."""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist

from bapo_megatron.engines.processes import loopback_variables, reserved_ports
from bapo_megatron.engines.update_group import connect_store, host_store
from bapo_megatron.errors import plural
from bapo_megatron.preflight.machine_checks import Finding
from bapo_megatron.runtime import LOOPBACK
from bapo_megatron.runtime.environment import nccl_variables
from bapo_megatron.runtime.nccl import loaded_version

_REPEATS = 4
_BYTES = {"gloo": 4 * 2**20, "nccl": 256 * 2**20}
_CPU_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of all nodes' probes. Example: Rendezvous("node0", 29500, num_nodes=4, node_rank=1)."""

    host: str
    port: int
    num_nodes: int = 1
    node_rank: int = 0


@dataclass(frozen=True, slots=True)
class _Task:
    """The work of one probe process."""

    meeting: Rendezvous
    local_rank: int
    num_local: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


def _probe(task: _Task, pipe: Connection) -> None:
    """Send facts about torch immediately, and then the group's measurements, or the "problem"."""
    try:
        pipe.send(torch_facts())
        pipe.send(_measure(task))
    except (RuntimeError, OSError, ValueError) as error:  # torch.distributed's errors are RuntimeErrors
        pipe.send({"problem": (str(error).strip() or type(error).__name__).splitlines()[0]})


def torch_facts() -> dict[str, Any]:
    """Return, as JSON, the versions of torch, its CUDA and NCCL, and facts about the first GPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "num_gpus": num_gpus}
    if num_gpus:
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = torch.cuda.get_device_capability()
        if dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, loaded_version() or torch.cuda.nccl.version()))
    return facts


def _measure(task: _Task) -> dict[str, Any]:
    use_nccl, timeout_s, at = task.backend == "nccl", task.timeout_s, task.meeting
    if use_nccl:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        torch.cuda.set_device(task.local_rank)
        os.environ |= nccl_variables({})
    if at.host == LOOPBACK:
        os.environ |= loopback_variables()
    rank, size = at.node_rank * task.num_local + task.local_rank, at.num_nodes * task.num_local
    if rank == 0:
        store = host_store(at.host, size, timeout_s, at.port)
    else:
        store = connect_store(at.host, at.port, size, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(task.backend, store=store, rank=rank, world_size=size, timeout=timeout)
    num_bytes = _BYTES[task.backend]
    data = torch.full((num_bytes // 4,), float(rank), device="cuda" if use_nccl else "cpu")
    broadcast_s = _seconds(lambda: dist.broadcast(data, src=0), use_nccl)
    is_right = bool((data == 0).all())
    reduce_s = _seconds(lambda: dist.all_reduce(data.fill_(rank)), use_nccl)
    is_right = is_right and bool((data == size * (size - 1) / 2).all())
    dist.destroy_process_group()
    return {
        "is_right": is_right,
        "broadcast_bytes_per_s": num_bytes / broadcast_s,
        "all_reduce_bytes_per_s": 2 * (size - 1) / size * num_bytes / reduce_s,  # what each process sends
        "world_size": size,
    }


def _seconds(collective: Callable[[], object], use_nccl: bool) -> float:
    """Return the median time over repeats, after a first one that sets up connections."""
    times = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        start_s = time.monotonic()
        collective()
        if use_nccl:
            torch.cuda.synchronize()
        times.append(time.monotonic() - start_s)
    return statistics.median(times[1:])


@dataclass
class Probes:
    """The processes on this node; `wait` fills in `results`."""

    backend: Literal["gloo", "nccl"]
    timeout_s: float
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)  # what each process sends
    results: list[dict[str, Any]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for all processes until the timeout, then kill the rest."""
        deadline = time.monotonic() + self.timeout_s
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        problems = [self._problem(process) for process in self.processes]
        self.end()
        self.results = [_received(pipe, problem) for pipe, problem in zip(self.pipes, problems, strict=True)]

    def _problem(self, process: BaseProcess) -> str:
        """Describe why a process that sent no reason itself has no result."""
        if process.is_alive():
            return f"not done after {self.timeout_s:.0f} s"
        return f"ended with exit code {process.exitcode}"

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about torch from the first process; only a "problem" if it failed."""
        return self.results[0]

    def findings(self, is_across_nodes: bool) -> list[Finding]:
        """Report the group's bandwidth, or why the group failed."""
        name = f"group ({self.backend})"
        missing = [i for i, result in enumerate(self.results) if "is_right" not in result]
        if missing:
            result = self.results[missing[0]]
            where = "the network between the nodes" if is_across_nodes else "the loopback interface and its firewall"
            advice = f"check {where}" if "torch" in result else "no messages were sent: see torch"
            return [Finding(name, "error", f"process {missing[0]} of this node: {result['problem']}", advice)]
        if not all(result["is_right"] for result in self.results):
            return [Finding(name, "error", "a broadcast or all-reduce gave wrong values", "do not train here")]
        first = self.results[0]
        if first["world_size"] == 1:
            return [Finding(name, "ok", "1 process, which sends to itself")]
        rates = (
            f"{plural(first['world_size'], 'process')}: all-reduce {first['all_reduce_bytes_per_s'] / 1e9:.2f} GB/s, "
            f"broadcast {first['broadcast_bytes_per_s'] / 1e9:.2f} GB/s"
        )
        return [Finding(name, "ok", rates)]


def _received(pipe: Connection, problem: str) -> dict[str, Any]:
    """Return all that an ended process has sent, and the problem unless it sent its own or a result."""
    found: dict[str, Any] = {}
    with pipe, contextlib.suppress(EOFError, OSError):  # OSError: it was killed while it sent
        while True:
            found |= pipe.recv()
    return found if "is_right" in found else {"problem": problem} | found


@contextlib.contextmanager
def started_probes(num_gpus: int, rendezvous: Rendezvous | None, timeout_s: float) -> Iterator[Probes]:
    """Start one process per GPU over NCCL, or two over gloo; they end with the block.

    They are forked, because importing torch takes most of the time; this process must not have a CUDA context, process
    group or torch threads yet.
    """
    count = num_gpus or _CPU_PROCESSES
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        meeting = rendezvous or Rendezvous(LOOPBACK, stack.enter_context(reserved_ports(1))[0])
        probes = Probes("nccl" if num_gpus else "gloo", timeout_s)
        stack.callback(probes.end)
        for local_rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            task = _Task(meeting, local_rank, count, probes.backend, timeout_s)
            probes.processes.append(context.Process(target=_probe, args=(task, sender), daemon=True))
            probes.pipes.append(receiver)
            probes.processes[-1].start()
            sender.close()  # so that the pipe ends with its process
        yield probes
