"""The doctor's group of processes: starts the probes of this node, and says what they found."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.engines.processes import LOOPBACK, reserved_ports
from bapo_megatron.preflight.finding import Finding
from bapo_megatron.preflight.group_probe import Task, probe

_MAX_SKEW_S = 1.0
_CPU_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the probes of all nodes meet. Example: Rendezvous("node0", 29500, num_nodes=4, node_rank=1)."""

    host: str
    port: int
    num_nodes: int = 1
    node_rank: int = 0


@dataclass
class Probes:
    """The processes on this node; `results` are there once `wait` has returned."""

    backend: Literal["gloo", "nccl"]
    timeout_s: float
    processes: list[BaseProcess] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def wait(self) -> None:
        """Until all have ended, or their time is over; those that have not are killed."""
        deadline = time.monotonic() + self.timeout_s
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        problems = [self._problem(process) for process in self.processes]
        self.end()
        for path, problem in zip(self.outputs, problems, strict=True):
            result = json.loads(path.read_text()) if path.exists() else {}
            self.results.append(result if "is_right" in result else {"problem": problem} | result)

    def _problem(self, process: BaseProcess) -> str:
        """Why it has no result, where it does not say so itself."""
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
        """About torch, of the first process; a "problem" alone where it could not say."""
        return self.results[0]

    def findings(self, is_across_nodes: bool) -> list[Finding]:
        """The group's bandwidth and clocks, or why there was none."""
        name = f"group ({self.backend})"
        missing = [i for i, result in enumerate(self.results) if "is_right" not in result]
        if missing:
            result = self.results[missing[0]]
            where = "the network between the nodes" if is_across_nodes else "the loopback interface and its firewall"
            advice = f"check {where}" if "torch" in result else "it did not come to messages: see torch"
            return [Finding(name, "error", f"process {missing[0]} of this node: {result['problem']}", advice)]
        if not all(result["is_right"] for result in self.results):
            return [Finding(name, "error", "a broadcast or all-reduce gave wrong values", "do not train here")]
        first = self.results[0]
        rates = (
            f"{len(first['skews_s'])} processes: all-reduce {first['all_reduce_bytes_per_s'] / 1e9:.2f} GB/s, "
            f"broadcast {first['broadcast_bytes_per_s'] / 1e9:.2f} GB/s"
        )
        found = [Finding(name, "ok", rates)]
        if is_across_nodes:
            found.append(clock_finding(first["skews_s"]))
        return found


def clock_finding(skews_s: list[float]) -> Finding:
    """Clocks of the group's processes against that of the first."""
    worst = max(range(len(skews_s)), key=lambda rank: abs(skews_s[rank]))
    what = f"at most {abs(skews_s[worst]):.3f} s apart"
    if abs(skews_s[worst]) > _MAX_SKEW_S:
        advice = "start chrony or systemd-timesyncd on all nodes: times in logs will not match"
        return Finding("clocks", "warning", f"{what} (process {worst})", advice)
    return Finding("clocks", "ok", what)


@contextlib.contextmanager
def started_probes(num_gpus: int, rendezvous: Rendezvous | None, timeout_s: float) -> Iterator[Probes]:
    """One process per GPU over NCCL, or two over gloo; they end with the block.

    Forked, as importing torch takes most of the time; this process must not have used CUDA.
    """
    count = num_gpus or _CPU_PROCESSES
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bapo-doctor-", dir=_scratch())))
        meeting = rendezvous or Rendezvous(LOOPBACK, stack.enter_context(reserved_ports(1))[0])
        probes = Probes("nccl" if num_gpus else "gloo", timeout_s)
        stack.callback(probes.end)
        for local_rank in range(count):
            task = Task(
                rank=meeting.node_rank * count + local_rank,
                local_rank=local_rank,
                world_size=meeting.num_nodes * count,
                host=meeting.host,
                port=meeting.port,
                backend=probes.backend,
                timeout_s=timeout_s,
            )
            probes.outputs.append(folder / f"{local_rank}.json")
            probes.processes.append(context.Process(target=probe, args=(task, probes.outputs[-1]), daemon=True))
            probes.processes[-1].start()
        yield probes


def _scratch() -> str | None:
    """Memory, so that a full disk does not keep the group from being examined."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
