"""The processes of a SLURM job (see job.sbatch.jinja): one for each trainer rank, and one for each engine node.

    srun ... python -m bapo_megatron.slurm.node trainer --config config.toml --meeting FOLDER [KEY=VALUE ...]
    srun ... python -m bapo_megatron.slurm.node engines --config config.toml --meeting FOLDER [KEY=VALUE ...]

srun numbers the processes (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS); they share the rest through small files in a
folder that all nodes share:

    run.json          by trainer rank 0: the run directory, for the engine nodes
    run-<n>.json      by trainer rank 0: the ranks' rendezvous in attempt n of this job, or a note that all is done
    engines-<i>.json  by engine node i: the URLs of its healthy engines; training begins when all are ready
    key               by trainer rank 0: the engines' key, readable only by this user, while ranks may need it
    stop              by the batch script or the user: save and stop at the end of the current step (runtime/ranks.py)
    stopped           by trainer rank 0: the run was saved and stopped
    end               by the batch script: the trainer has ended, so engine nodes must end their engines
    over              by any process: the ranks must not start again (run.max_restarts)

Each file appears complete or not at all. Its key `error`, if present, says why its writer failed. The ranks of every
attempt use the same engines.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.key import KEY_VARIABLE, new_key
from bapo_megatron.engines.processes import loopback_variables, reserved_ports
from bapo_megatron.engines.start import running_engines
from bapo_megatron.errors import UserError, plural
from bapo_megatron.machine.shared_gpu import node_share
from bapo_megatron.monitor.console import Screen, header, outputs
from bapo_megatron.resolved import resolve, resolve_here
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.restarts import Restart, how_often, next_restart, write_restart
from bapo_megatron.runs.resuming import with_pins
from bapo_megatron.runtime import LOOPBACK
from bapo_megatron.runtime.files import explaining_os_errors, write_atomically
from bapo_megatron.runtime.output import ESCAPING, as_output, lasting
from bapo_megatron.sync.folder import kept_weights_folder
from bapo_megatron.trainer import STOPPED, run_rank

RUN = "run"
_SETTING = "slurm.startup_timeout_s"
_POLL_S = 0.2
_END_POLL_S = 1.0
_SIOCGIFADDR = 0x8915  # Linux: get an interface's address


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """One start of the trainer's step, as the batch script describes it."""

    number: int = 1
    failed_at_s: float = 0.0  # Unix time at which the previous start ended; 0 for the first one
    exit_code: int = 0  # the previous start's; 0 for the first one

    @property
    def file(self) -> str:
        """Name of the file in which rank 0 tells the other ranks of this start where to meet."""
        return f"{RUN}-{self.number}"


class Meeting:
    """The folder of one job, on a shared file system."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"no folder {folder} on this node; run.dir must be on a file system that all nodes share")
        self.folder = folder

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    @property
    def stopped_file(self) -> Path:
        return self.folder / "stopped"

    @property
    def end_file(self) -> Path:
        return self.folder / "end"

    @property
    def over_file(self) -> Path:
        return self.folder / "over"

    def share_key(self, key: str) -> None:
        """Give the engines' key to the nodes that start them."""
        with explaining_os_errors(self._key_file):
            self.forget_key()
            descriptor = os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(key)

    def shared_key(self) -> str:
        """Return the engines' key; it is written before the file `run.json`."""
        return self._key_file.read_text()

    def forget_key(self) -> None:
        """Remove the file with the key, once all who need it have read it."""
        self._key_file.unlink(missing_ok=True)

    @property
    def _key_file(self) -> Path:
        return self.folder / "key"

    def tell(self, name: str, facts: dict[str, Any]) -> None:
        write_atomically(self._path(name), json.dumps(facts) + "\n")

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def wait(self, name: str, who: str, timeout_s: float, setting: str) -> dict[str, Any]:
        """Wait for the file `name` and return its contents.

        Args:
            who: the writer, named in errors.
            setting: the setting to raise after a timeout.

        Raises:
            UserError: nothing came in time, or the writer reported an error.
        """
        deadline = time.monotonic() + timeout_s
        while not self.has(name):
            if time.monotonic() > deadline:
                raise UserError(
                    f"waited {timeout_s:g} s for {who}: no {self._path(name)}; read its output in the job's log, or "
                    f"raise {setting}"
                )
            time.sleep(_POLL_S)
        facts = json.loads(self._path(name).read_text(encoding="utf-8"))
        if "error" in facts:
            raise UserError(f"{who}: {facts['error']}")
        return facts

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one process of a job and return its exit code."""
    parser = argparse.ArgumentParser(prog="bapo_megatron.slurm.node")
    parser.add_argument("role", choices=("trainer", "engines"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--meeting", type=Path, required=True)
    parser.add_argument("--attempt", type=int, default=1, metavar="N", help="start of the trainer, in this job")
    parser.add_argument("--failed-at-s", type=float, default=0.0, metavar="UNIX_TIME", help="end of the start before")
    parser.add_argument("--exit-code", type=int, default=0, metavar="N", help="exit code of the start before")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    # A trainer rank sends its own output to its log.
    terminal = lasting(os.fdopen(os.dup(2), "w", buffering=1, errors=ESCAPING))
    rank, meeting = -1, None
    try:
        rank = _from_slurm("SLURM_PROCID")
        config = load_config([options.config], options.settings)
        meeting = Meeting(options.meeting)
        if options.role == "engines":
            return _run_engines(config, meeting, rank)
        return _run_trainer(
            config, meeting, rank, TrainerStart(options.attempt, options.failed_at_s, options.exit_code)
        )
    except UserError as error:
        if meeting is not None:
            meeting.over_file.touch()
        who = "trainer rank" if options.role == "trainer" else "engine node"
        for line in str(error).splitlines():
            print(f"bapo: {who} {rank} on {socket.gethostname()}: {line}", file=terminal)
        return 2


def _run_trainer(config: Config, meeting: Meeting, rank: int, start: TrainerStart) -> int:
    """Run one trainer rank, from rendezvous to the end of the run."""
    if rank > 0:
        code = _run_rank(config, meeting, rank, start)
        return 0 if code == STOPPED else code  # srun kills the other ranks, rank 0 too, after a nonzero exit code
    with _telling_failures(meeting, start.file, RUN):
        restart = _restart_after(config, start)
        if isinstance(restart, list):
            print("\n".join(f"bapo: {line}" for line in restart))
            meeting.over_file.touch()
            meeting.tell(start.file, {"is_over": True})
            return start.exit_code
        config = with_pins(config)  # the machine that submitted the job may lack the model
        with RunDir.open(config, patience_s=config.slurm.startup_timeout_s if restart else 0.0) as run_dir:
            return _run_first_rank(config, meeting, start, run_dir, restart)


def _run_first_rank(
    config: Config, meeting: Meeting, start: TrainerStart, run_dir: RunDir, restart: Restart | None
) -> int:
    """Tell all others where to meet, and run rank 0."""
    if run_dir.is_finished:
        num_steps = config.train.num_steps
        print(f"bapo: {run_dir.path} is finished: {num_steps} of {plural(num_steps, 'step')} done")
        for name in (start.file, RUN):
            meeting.tell(name, {"is_over": True})
        return 0
    if restart:
        write_restart(run_dir, restart)
        print(
            f"bapo: restart {restart.number} of {config.run.max_restarts} in {restart.delay_s:g} s: {restart.problem}"
        )
        time.sleep(restart.delay_s)
    Screen(sys.stdout).facts(header(resolve(config), run_dir) | outputs(config, run_dir))
    host = node_address(config)
    if not meeting.has(RUN):
        meeting.share_key(new_key())
        meeting.tell(RUN, {"run_dir": str(run_dir.path)})
    with reserved_ports(1, host) as ports:  # torch's store sets SO_REUSEADDR: it can still bind
        meeting.tell(start.file, {"run_dir": str(run_dir.path), "host": host, "port": ports[0]})
        with kept_weights_folder(config, run_dir):
            code = _run_rank(config, meeting, 0, start)
    if code == STOPPED:
        meeting.stopped_file.touch()
        return 0
    if code == 0:
        from bapo_megatron.report.page import write_report  # with NumPy

        write_report(run_dir.path)
    return code


def _restart_after(config: Config, start: TrainerStart) -> Restart | list[str] | None:
    """Return the restart that this start is, or lines that say why it must not start; None for the first start."""
    path = Path(config.run.dir) / config.run.name
    if start.number == 1 or not path.is_dir():
        return None
    before = RunDir.attach(path)
    problem = f"the trainer ended with exit code {start.exit_code}"
    restart = next_restart(before, problem, start.failed_at_s, config.run.max_restarts)
    return restart if isinstance(restart, Restart) else [problem, restart, *how_often(before)]


def _run_rank(config: Config, meeting: Meeting, rank: int, start: TrainerStart) -> int:
    """Run a rank once all engines are ready. The first rank takes their key."""
    run = meeting.wait(start.file, "trainer rank 0", config.slurm.startup_timeout_s, _SETTING)
    if "is_over" in run:
        return 0
    urls = _await_engines(config, meeting)
    if rank == 0:
        os.environ[KEY_VARIABLE] = meeting.shared_key()
        if not config.run.max_restarts:
            meeting.forget_key()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(_from_slurm("SLURM_LOCALID")),
        "WORLD_SIZE": str(_from_slurm("SLURM_NTASKS")),
        "MASTER_ADDR": run["host"],
        "MASTER_PORT": str(run["port"]),
    }
    if run["host"] == LOOPBACK:  # a job on one node
        os.environ |= loopback_variables(urls)
    run_dir = RunDir.attach(Path(run["run_dir"]))
    code = run_rank(run_dir, urls, meeting.stop_file)
    if code == 2:
        raise UserError(
            f"{(run_dir.log_dir / f'error-{rank}.txt').read_text()}\nits log: {run_dir.log_path('trainer', rank)}"
        )
    return code


def _await_engines(config: Config, meeting: Meeting) -> list[str]:
    """Wait for all engines of the run, and return their URLs."""
    run = resolve(config)
    if not run.placement.num_servers:
        return list(config.rollout.urls)
    timeout_s = config.slurm.startup_timeout_s + run.engine.startup_limit_s(config.rollout.startup_timeout_s)
    nodes = range(run.placement.server_nodes)
    told = [meeting.wait(_engines(i), f"engine node {i}", timeout_s, _SETTING) for i in nodes]
    return [url for facts in told for url in facts["urls"]]


def _run_engines(config: Config, meeting: Meeting, node: int) -> int:
    """Run the engines of one node until the batch script or SIGTERM ends them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _telling_failures(meeting, _engines(node)):
        told = meeting.wait(RUN, "trainer rank 0", config.slurm.startup_timeout_s, _SETTING)
        if "is_over" in told:
            return 0
        run = resolve_here(config)
        here = node_share(run, run.placement.first_server_node + node, node_address(config))
        run_dir = RunDir.attach(Path(told["run_dir"]))
        with running_engines(run, run_dir.log_dir, here, meeting.shared_key(), run_dir.turn_file) as urls:
            meeting.tell(_engines(node), {"urls": urls})
            while not meeting.end_file.exists():  # no deadline: SLURM ends this process with the job
                time.sleep(_END_POLL_S)
    return 0


@contextlib.contextmanager
def _telling_failures(meeting: Meeting, *names: str) -> Iterator[None]:
    """Report an exception to the processes that wait for one of these files."""
    try:
        yield
    except Exception as error:
        for name in names:
            if not meeting.has(name):
                meeting.tell(name, {"error": str(error) or repr(error)})
        raise


def node_address(config: Config) -> str:
    """Return the IPv4 address at which other nodes of a job reach this one; loopback for a job on one node.

    Raises:
        UserError: slurm.interface has no address, or the host name resolves to loopback.
    """
    if config.slurm.interface is not None:
        return _address_of(config.slurm.interface)
    if config.cluster.nodes == 1:
        return LOOPBACK
    name = socket.gethostname()
    advice = 'set slurm.interface, such as slurm.interface="eth0" (`ip -brief address` lists them)'
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise UserError(f"the host name {name} of this node has no address ({error}); {advice}") from error
    if address.startswith("127."):
        raise UserError(
            f"the host name {name} of this node resolves to {address}, which other nodes cannot reach; {advice}"
        )
    return address


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UserError(
                f"slurm.interface={interface} has no IPv4 address on this node ({error.strerror}), which has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _engines(node: int) -> str:
    return f"engines-{node}"


def _from_slurm(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name} is not set: this is a step of a SLURM job, which `bapo slurm` writes")
    return int(value)


if __name__ == "__main__":
    with contextlib.redirect_stdout(cast(TextIO, as_output(sys.stdout))):
        code = main()
    sys.exit(code)  # after `leave`, srun lost the last lines of a failed rank
