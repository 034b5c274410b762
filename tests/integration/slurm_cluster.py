"""A real SLURM on this machine: munged, slurmctld and three slurmds on loopback, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from bapo_megatron.engines.processes import reserved_ports
from tests.debian import which
from tests.distributed import HANG_S

PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_SBIN = "/usr/sbin:/usr/local/sbin:/sbin"

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
EnforcePartLimits=ALL
ReturnToService=2
KillWait=5
MessageTimeout=100
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=16 Gres=gpu:8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=16 Gres=gpu:8 State=UNKNOWN
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={n3} CPUs=16 Gres=gpu:8 State=UNKNOWN
PartitionName=debug Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=n[1-3] AllowAccounts=owners State=UP
"""
_NODES = ("n1", "n2", "n3")
_GPUS = "NodeName=n[1-3] Name=gpu File={folder}/gpu[0-7]\n"


class Cluster:
    """Three nodes, n1 to n3, which claim 16 CPUs and 8 GPUs each.

    A context manager that ends its daemons by their process ids.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:{_SBIN}",
        }
        self._stack = contextlib.ExitStack()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_jobs()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(HANG_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._stack.close()

    def run(self, *command: str, timeout_s: float = HANG_S) -> str:
        """Run a SLURM command and return its output; fail with its output if it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return what the controller says about a job, such as {"JobState": "RUNNING", "Restarts": "1"}."""
        words = self.run("scontrol", "show", "job", "--oneliner", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def processes(self, job_id: str, node: str, *words: str) -> list[psutil.Process]:
        """Return the processes that a job runs in its steps on a node, with these words in their command lines.

        Its batch script starts a new `sleep` each second: such a process may end before a caller looks at it.
        """
        found = []
        psutil.process_iter.cache_clear()  # it would return an earlier process that had the same id
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # a process that has just ended
                variables, command = process.environ(), process.cmdline()
                is_there = variables.get("SLURM_JOB_ID") == job_id and variables.get("SLURMD_NODENAME") == node
                if is_there and all(word in command for word in words) and "srun" not in process.name():
                    found.append(process)
        return found

    @contextlib.contextmanager
    def failing(self, node: str, job_id: str) -> Iterator[None]:
        """Let a node fail with everything that a job runs there; put it back into service at the end."""
        tasks = self.processes(job_id, node)
        step_daemons = [parent for task in tasks if (parent := task.parent()) and "slurmstepd" in parent.name()]
        for process in (self._slurmds[node], *step_daemons, *tasks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._slurmds[node].wait()
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=failed")
        try:
            yield
        finally:
            self._start_node(node)  # ReturnToService=2 takes it back as soon as it answers
            _wait(lambda: self._idle() == len(_NODES), "idle nodes", self.logs)

    def _start_node(self, node: str) -> None:
        self._slurmds[node] = self._daemon("slurmd", "-D", "-f", f"{self.folder}/slurm.conf", "-N", node)

    def _cancel_jobs(self) -> None:
        """Cancel the jobs that a failed test leaves: their processes would outlive the daemons."""
        deadline = time.monotonic() + HANG_S
        with contextlib.suppress(subprocess.SubprocessError):  # a cluster that did not start has none
            while time.monotonic() < deadline and self._ask("squeue", "--noheader").strip():
                self._ask("scancel", "--user=root")
                time.sleep(0.5)

    def _ask(self, *command: str) -> str:
        """Return the output of a SLURM command. Raises subprocess.SubprocessError if it fails or takes too long."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=HANG_S, check=True
        ).stdout

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in _NODES)):
            (folder / name).mkdir(parents=True)
        controller, *ports = self._stack.enter_context(reserved_ports(4, "0.0.0.0"))  # the daemons can listen there
        nodes = dict(zip(_NODES, ports, strict=True))
        text = _CONF.format(host=socket.gethostname(), folder=folder, controller=controller, **nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(_GPUS.format(folder=folder))
        for index in range(8):
            (folder / f"gpu{index}").symlink_to("/dev/null")  # only to be asked for
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        sock = folder / "munge.socket"
        self._daemon(
            *("munged", "--foreground", "--force", f"--socket={sock}", f"--key-file={key}", "--num-threads=2"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munged.log"),
        )
        _wait(sock.exists, "munged")
        self._daemon("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in _NODES:
            self._start_node(node)
        _wait(lambda: self._idle() == len(_NODES), "idle nodes", self.logs)

    def _idle(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):  # the controller does not answer yet
            return self._ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%t").split().count("idle")
        return 0

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"output-{command[0]}-{len(self._daemons)}.log").open("wb") as output:
            program = which(command[0])
            assert program is not None
            self._daemons.append(
                subprocess.Popen([program, *command[1:]], env=self.environment, stdout=output, stderr=output)
            )
            return self._daemons[-1]


def _wait(condition: Callable[[], bool], what: str, logs: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}\n{logs()}"
        time.sleep(0.1)
