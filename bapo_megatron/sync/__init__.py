"""Weight sync: the trainer's weights go to the engines as a new version, verified before anything is sampled.

Start at `open_channel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the checks of a configuration import sync.folder, and no torch
    from bapo_megatron.config.schema import SyncConfig
    from bapo_megatron.engines.base import PauseMode
    from bapo_megatron.engines.pool import EnginePool
    from bapo_megatron.sync.base import Channel, Sender, Submit


def open_channel(
    config: SyncConfig,
    engines: tuple[EnginePool, Submit] | None,
    *,
    channel: Literal["broadcast", "disk"],
    folder: Path,
    hf_path: Path,
    pause_mode: PauseMode = "retract",
) -> Channel:
    """Return this rank's end of a channel, not connected yet.

    Args:
        engines: on the trainer's first rank, the engines and a function that runs a coroutine on their event loop.
        channel: its kind, see `Config.sync_channel`.
        folder: for the disk channel: where to write each version's weights.
        hf_path: for the disk channel: the policy's checkpoint folder, with config and tokenizer.
        pause_mode: see `Channel.pause_mode`.
    """
    from bapo_megatron.engines.processes import own_address
    from bapo_megatron.sync.base import RankZeroChannel
    from bapo_megatron.sync.broadcast import BroadcastChannel
    from bapo_megatron.sync.disk import DiskChannel

    sender: Sender | None = None
    if engines is not None:
        pool, submit = engines
        if channel == "disk":
            sender = DiskChannel(pool, config, submit, folder=folder, hf_path=hf_path, pause_mode=pause_mode)
        else:
            host = own_address([engine.url for engine in pool.engines])
            sender = BroadcastChannel(pool, config, submit, host=host, pause_mode=pause_mode)
    return RankZeroChannel(sender, pause_mode)
