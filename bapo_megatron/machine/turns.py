"""A run's turns on its GPUs: the phases of `rollout.placement = "turns"`, by the run's plan."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.errors import UserError
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.shared_gpu import this_share
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.turn import Turn
from bapo_megatron.sync.turns import Phase, ServerTurns, Turns

_POLL_S = 0.05
_PATIENCE_S = 60.0  # after the supervisor has killed a server that hangs


def open_turns(
    run: Resolved, turn_file: Path, engines: ConnectedEngines | None, until_saved: Callable[[], None]
) -> Turns:
    """Return the phases of a run.

    Args:
        turn_file: see runtime/turn.py.
        engines: on rank 0.
        until_saved: see `Turns`.

    Raises:
        UserError: see `ServerTurns`.
    """
    config, servers = run.config, None
    if engines is not None:
        servers = ServerTurns(
            engines.pool,
            engines.loop.submit,
            Turn(turn_file),
            timeout_s=config.sync.timeout_s,
            startup_limit_s=run.engine.startup_limit_s(config.rollout.startup_timeout_s),
        )
    wait, sign_of_life_s = partial(_wait_for_room, run), config.parallel.timeout_s / 4
    return Turns(servers, until_saved=until_saved, until_free=wait, sign_of_life_s=sign_of_life_s)


def _wait_for_room(run: Resolved, phase: Phase) -> None:
    """Wait until this rank's GPU has room for what a phase brings to it; a CPU holds everything.

    A server may answer that it has released memory before this is free.

    Raises:
        UserError: it has none in time.
    """
    if not torch.cuda.is_available() or (shared := this_share(run)) is None:
        return
    gpu, (of_phase, _) = int(os.environ.get("LOCAL_RANK", "0")), shared.phases[phase]
    needed = of_phase - shared.trainer.context
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
