"""Weight sync: the trainer's weights go to the engines as a new version, verified before anything is sampled."""

from pathlib import Path

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.processes import own_address
from bapo_megatron.sync.base import Channel, Submit
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.disk import DiskChannel


def open_channel(config: SyncConfig, pool: EnginePool, submit: Submit, *, folder: Path, hf_path: Path) -> Channel:
    """Return the channel that `sync.channel` names, not connected yet. For the trainer's first process.

    Args:
        submit: runs a coroutine on the engines' event loop.
        folder: disk channel: place for the weights of each version.
        hf_path: disk channel: the policy's checkpoint folder, for config and tokenizer.
    """
    if config.channel == "disk":
        return DiskChannel(pool, config, submit, folder=folder, hf_path=hf_path)
    return BroadcastChannel(pool, config, submit, host=own_address([engine.url for engine in pool.engines]))
