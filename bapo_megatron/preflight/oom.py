"""Explanation of out-of-memory errors: one message with the place, the memory in use, the plan, and helpful changes."""

import contextlib
import resource
import shlex
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from bapo_megatron.errors import OutOfMemoryError, UserError
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import TrainerMemory, trainer_memory
from bapo_megatron.machine.shared_gpu import this_share
from bapo_megatron.preflight.explain import memory_parts
from bapo_megatron.preflight.plan import make_plan
from bapo_megatron.preflight.suggest import lighter, suggest
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime.heartbeat import Heartbeat

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # c10/core/impl/alloc_cpu.cpp: "can't allocate memory", "not enough memory"
_PARTS = {  # function in the traceback -> name; the outermost function counts
    "optimizer_step": "the optimizer step",
    "backward_step": "a backward pass",
    "backward_step_helper": "a backward pass",
    "beating_step": "a forward pass",
    "snapshot": "saving a checkpoint",
    "_restore": "reading a checkpoint",
}
_SPANS = {
    "rollout": "taking a batch",
    "critic": "the critic",
    "score": "scoring",
    "train": "training",
    "sync": "the weight sync",
    "eval": "the evaluation",
}


@contextlib.contextmanager
def explaining_out_of_memory(run: Resolved, rank: int, heartbeat: Heartbeat) -> Iterator[None]:
    """Turn running out of memory into an explained error.

    Raises:
        OutOfMemoryError: the block ran out of GPU or machine memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError, UserError) as raised:
        error = raised.__cause__ if isinstance(raised, UserError) else raised  # see `failing_together`
        if error is None or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(_explain(error, run, rank, heartbeat)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU's allocator, torch's CPU allocator, or Python ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def _explain(error: BaseException, run: Resolved, rank: int, heartbeat: Heartbeat) -> str:
    """Compose the message: place, memory in use, this rank's plan, and changes that save memory, best first."""
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    p = run.config.parallel
    stage = rank // (p.tensor * p.context * p.data)  # ranks are ordered as in learner/parallel.py
    what = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "\n".join(
        [
            f"trainer rank {rank} ran out of memory in {part_of(error, heartbeat)}: {what}",
            f"in use: {memory_in_use()}",
            *_part(run),
            _planned(trainer_memory(run, stage=stage, gpu_bytes=gpu_bytes)),
            *_suggestions(run, gpu_bytes),
        ]
    )


def _part(run: Resolved) -> Iterator[str]:
    """Describe the rank's part of a GPU, if a server has another one."""
    if torch.cuda.is_available() and (shared := this_share(run)) is not None:
        mine, others = _amount(shared.trainer_bytes), _amount(shared.server_bytes)
        parts = f"{mine}, and {others} to the server on the same GPU"
        if shared.takes_turns:
            parts = f"{mine} while it trains, and at most {others} to the server on the same GPU while that samples"
        yield f'rollout.placement="{run.config.rollout.placement}" gives this rank {parts}'


def part_of(error: BaseException, heartbeat: Heartbeat) -> str:
    """Describe where memory ran out. Example: "training (the optimizer step), step 3"."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    detail = next((_PARTS[name] for name in names if name in _PARTS), None)
    if heartbeat.span is None:
        when = f"after step {heartbeat.step}" if heartbeat.step else "before the first step"
        return f"{detail or ('building the model' if not heartbeat.step else 'the end of a step')}, {when}"
    span = _SPANS.get(heartbeat.span, heartbeat.span)
    return f"{span}{f' ({detail})' if detail else ''}, step {heartbeat.step}"


def _planned(memory: TrainerMemory) -> str:
    """Describe the plan. Example: "planned for this rank, GiB: weights 14.2, gradients 28.3, ..., peak 70.1"."""
    parts = ", ".join(
        f"{name.removeprefix('or: ')} {_amount(value)}" for name, value, _ in memory_parts(memory) if value
    )
    return f"planned for this rank: {parts}; peak {_amount(memory.total)} (update and buckets have their own times)"


def _suggestions(run: Resolved, gpu_bytes: int | None) -> Iterator[str]:
    """Suggest single changes and, if the cluster is known, layouts, fastest first."""
    for number, change in enumerate(lighter(run, gpu_bytes), start=1):
        yield f"try {number}: {shlex.join(change.overrides)}, planned peak {_amount(change.total)}"
    if run.config.cluster.gpu is not None:
        for layout in suggest(run, make_plan(run), count=2):
            yield f"or: {shlex.join(layout.overrides)}, planned peak {_amount(layout.plan.trainer.total)}"
    if gpu_bytes is None:
        yield "or: a machine with more memory, or fewer engines next to the trainer (rollout.num_servers)"


def _amount(num_bytes: int) -> str:
    """Format bytes. Example: "1.25 GiB", "3.1 MiB"."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def memory_in_use() -> str:
    """Describe the memory of this rank. Example: "70.1 GiB allocated of 75.3 GiB reserved, 79.1 GiB in all"."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return (
            f"{allocated / GIB:.1f} GiB allocated (at most {torch.cuda.max_memory_allocated() / GIB:.1f}) of "
            f"{reserved / GIB:.1f} GiB reserved; {free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    machine = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f"; its address space is limited to {limit / GIB:.2f} GiB"
    return (
        f"{_gib(status['VmRSS']):.2f} GiB by this process (at most {_gib(status['VmHWM']):.2f}); "
        f"{_gib(machine['MemAvailable']):.1f} of the machine's {_gib(machine['MemTotal']):.1f} GiB are available"
        f"{limited}"
    )


def _gib(kib: str) -> float:
    return int(kib.split()[0]) * 1024 / GIB
