"""Waiting for a GPU's memory, which a server gives back some time after it says so."""

import os
import time

import torch

from bapo_megatron.errors import UserError
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.shared_gpu import this_share
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER

_POLL_S = 0.05
_PATIENCE_S = 60.0  # after the supervisor has killed a server that hangs


def wait_for_room(run: Resolved, phase: str) -> None:
    """Wait until this rank's GPU has room for what a phase of `sync/turns.py` brings to it; nothing on a CPU.

    Raises:
        UserError: it has none in time.
    """
    if not torch.cuda.is_available() or (shared := this_share(run)) is None:
        return
    gpu, rank = int(os.environ.get("LOCAL_RANK", "0")), shared.trainer
    needed = {"training": rank.total - rank.context, "pushing": rank.weights + rank.sync}.get(phase, 0)
    timeout_s = run.config.rollout.hang_timeout_s + _PATIENCE_S
    deadline = time.monotonic() + timeout_s
    while (room := torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)) < needed:
        if time.monotonic() > deadline:
            raise UserError(
                f"GPU {gpu} has {room / GIB:.1f} GiB free for {phase} after {timeout_s:g} s, and the plan is "
                f"{needed / GIB:.1f}: does another process use it? `nvidia-smi` shows them; or the servers have not "
                'released enough: set rollout.placement="split"'
            )
        HEARTBEAT.beat(TRAINER, f"waiting for {needed / GIB:.1f} GiB of GPU {gpu}")
        time.sleep(_POLL_S)
