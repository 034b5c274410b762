"""Checks of this machine: disk space, memory and open files for a run, and a port for the doctor."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import ITEM_BYTES, checkpoint_bytes, host_bytes, rows_host_bytes
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.preflight.reads import reads
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime import memory_bytes, num_cores, raise_open_files
from bapo_megatron.sync.folder import MEMORY, free_bytes, weights_parent

Grade = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    ok: fine. absent: missing, but not needed here. warning: works, but badly. error: the run will not work.

    Example: Finding("torch", "error", "2.13.0, built for CPUs", "there are GPUs: install a CUDA build of torch").
    """

    name: str
    verdict: Grade
    what: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok", "absent": "--", "warning": "warn", "error": "FAIL"}[self.verdict]
        return f"{mark:<5}{self.name:<20}{self.what}" + (f"; {self.advice}" if self.advice else "")


_BASE_OPEN_FILES = 160  # measured: at most 156 in rank 0 of a run of 2,000 steps with two engines (docs/resume.md)
_FILES_OF_JUDGE = 4
_FILES_OF_RANK = 2
_NUM_VERSIONS = 2  # the weights that engines have, and those that are being written


def _kept_bytes(run: Resolved) -> int:
    """Return the bytes of all checkpoints that exist together: an old one is deleted once the new one is complete."""
    kept = run.config.checkpoint
    return 0 if kept.interval_steps is None else (kept.keep_last + 1) * checkpoint_bytes(run)


def check_room(run: Resolved) -> Iterator[Violation]:
    """Check that `run.dir` can be written and has space for a checkpoint, and warn if it has too little for all kept.

    A folder for weights outside it must hold two versions.
    """
    yield from _weights_room(run)
    config, needed = run.config, checkpoint_bytes(run)
    folder = Path(config.run.dir)
    place = (folder / str(config.run.name)).absolute()
    nearest = next(path for path in (place, *place.parents) if os.path.exists(path))  # false for too long a name
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        what = "cannot be written to" if nearest.is_dir() else "is a file"
        yield Violation(("run.dir",), f"run.dir={folder}: {nearest} {what}", "set run.dir to another folder")
        return
    try:
        free = shutil.disk_usage(nearest).free
    except OSError:
        return  # the run creates its folder before anything starts, and reports that error
    if free >= _kept_bytes(run):
        return
    problem = f"{free / GIB:.2f} GiB is free for run.dir={folder}, and a checkpoint takes {needed / GIB:.2f}"
    remedy = "free some, or set run.dir to another disk"
    settings = reads(run, _kept_bytes, first=("run.dir",))
    if free < needed:
        yield Violation(settings, problem, remedy)
    elif not any((folder / str(config.run.name) / "checkpoints").glob("step-*")):
        yield warning(settings, f"{problem}, of which there are up to {config.checkpoint.keep_last + 1}", remedy)


def _weights_bytes(run: Resolved) -> int:
    """Return the bytes of both versions of the weights in a folder outside the run's; 0 without one."""
    item = ITEM_BYTES[run.config.model.dtype]
    return 0 if weights_parent(run.config) is None else _NUM_VERSIONS * item * model_parameters(run.shape)


def _weights_room(run: Resolved) -> Iterator[Violation]:
    parent, needed = weights_parent(run.config), _weights_bytes(run)
    if parent is None:
        return
    try:
        free = free_bytes(parent)
    except OSError:
        return  # the run makes its folder before anything starts, and reports that error
    if needed > free:
        container = "; a container has 64 MiB there unless it starts with --shm-size or --ipc=host"
        yield Violation(
            reads(run, _weights_bytes, first=("sync.folder", "rollout.placement", "sync.channel")),
            f"{free / GIB:.2f} GiB is free in {parent}, and two versions of the weights take {needed / GIB:.2f}",
            f"make room, or set sync.folder to another disk{container if parent == MEMORY else ''}",
        )


_MEMORY_OPTION = re.compile(r"--mem[= ](\d+)([KMGT]?)")


def copied_bytes(run: Resolved) -> tuple[int, int, int]:
    """Return the bytes in a node's memory for copies of the trainer's state, rows of tokens, and weights in
    /dev/shm."""
    in_memory = weights_parent(run.config) == MEMORY
    return host_bytes(run), rows_host_bytes(run), _weights_bytes(run) if in_memory else 0


def _asked_memory(run: Resolved) -> re.Match[str] | None:
    """Return the option that asks for a node's memory."""
    options = run.config.slurm.options
    return next((found for option in options if (found := _MEMORY_OPTION.fullmatch(option))), None)


def check_host_memory(run: Resolved, *, starts_here: bool) -> Iterator[Violation]:
    """Check that CPU memory holds rows of tokens, copies of checkpoints, what takes turns on GPUs, and weights in
    /dev/shm: a node's share in a job, or this machine's.

    Args:
        starts_here: whether the run takes place on this machine.
    """
    copies, rows, weights = copied_bytes(run)
    asked = None if starts_here else _asked_memory(run)
    if starts_here:
        have, where = memory_bytes(), "this machine has"
    elif asked and int(asked[1]):
        have = int(asked[1]) * 1024 ** " KMGT".index(asked[2] or "M")
        where = f"{asked[0]} of slurm.options is"
    else:
        return
    if copies + rows + weights <= have:
        return
    if run.config.takes_turns:
        copying, copied = "rollout.placement", 'rollout.placement="turns" moves'
        less = 'set lora.rank to train adapters alone, or rollout.placement="split"'
    else:
        copying, copied = "checkpoint.asynchronous", "checkpoint.asynchronous=true copies"
        less = "set checkpoint.asynchronous=false"
    top_k = run.config.loss.sampler_top_k
    keeping = {"model.replay_routes=true": run.config.model.replay_routes, f"loss.center_top_k={top_k}": top_k}
    keepers = [setting for setting, keeps in keeping.items() if keeps]
    keep = f"{' and '.join(keepers)} keep{'s' * (len(keepers) == 1)}"
    what = {
        f"{copied} {copies / GIB:.2f} GiB to the memory of each node that trains": copies,
        f"{keep} {rows / GIB:.2f} GiB in the memory of trainer rank 0's node": rows,
        f"two versions of the weights take {weights / GIB:.2f} GiB in {MEMORY}": weights,
    }
    remedies = {
        copying: (copies, less),
        "rollout.samples_per_prompt": (rows, "take fewer or shorter samples"),
        "sync.folder": (weights, "set sync.folder to a disk"),
    }
    setting, remedy = next((setting, remedy) for setting, (num, remedy) in remedies.items() if num)
    yield Violation(
        reads(run, lambda run: (copied_bytes(run), starts_here or _asked_memory(run)), first=(setting,)),
        f"{', and '.join(text for text, num in what.items() if num)}, and {where} {have / GIB:.2f} GiB",
        remedy + ("" if starts_here else ", or ask for more"),
    )


def open_files_needed(run: Resolved) -> int:
    """Return how many files and connections a process of a run may have open at a time: rank 0 has the most."""
    config, r = run.config, run.config.rollout
    num_samples = (r.groups_in_flight or r.prompts_per_step) * r.samples_per_prompt
    num_requests = num_samples if config.model.replay_routes else 0  # otherwise rounds send each engine one
    if r.overlap or r.abort_tail:
        num_requests = min(num_samples, r.max_concurrent_requests * max(1, run.placement.num_servers or len(r.urls)))
    num_judges = config.reward.concurrency or num_cores()
    return _BASE_OPEN_FILES + num_requests + _FILES_OF_JUDGE * num_judges + _FILES_OF_RANK * config.parallel.size


def check_open_files(run: Resolved) -> Iterator[Violation]:
    """Compare the most files that a process may open with what the run needs."""
    allowed, needed = raise_open_files(), open_files_needed(run)
    if allowed >= needed:
        return
    how = (
        f"raise that hard limit to {needed}: in /etc/security/limits.conf, with LimitNOFILE= for a service, or with "
        "--ulimit nofile= for a container"
    )
    problem = f"a process may have {allowed} files open here (ulimit -Hn), and trainer rank 0 needs up to {needed}"
    yield Violation(reads(run, open_files_needed, first=("reward.concurrency",)), problem, how)


def check_port(port: int) -> Finding:
    """Check that the other nodes' doctors can meet at this port of this machine."""
    name = f"port {port}"
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
        except OSError as error:
            advice = f"`ss -ltnp 'sport = :{port}'` shows its owner; stop that process, or choose another port"
            return Finding(name, "error", str(error.strerror), advice)
    return Finding(name, "ok", "free")
