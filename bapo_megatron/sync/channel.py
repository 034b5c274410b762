"""Which channel a run uses, and the push as the training loop calls it, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.processes import own_address
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.runtime.ranks import share_flag
from bapo_megatron.sync.base import Channel, Submit, SyncStats, WeightSource
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.disk import DiskChannel


class FollowerChannel:
    """The channel of every rank but the first: takes part in gathering the weights, and sends nothing."""

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        pass

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        for _ in named_weights:
            pass
        return SyncStats()

    def close(self) -> None:
        pass


def open_channel(config: SyncConfig, pool: EnginePool, submit: Submit, *, folder: Path, hf_path: Path) -> Channel:
    """The channel of the trainer's first process, as `sync.channel` says; not connected yet.

    Args:
        submit: runs a coroutine on the engines' event loop.
        folder: disk channel: for the weights of each version.
        hf_path: disk channel: the policy's checkpoint folder, for config and tokenizer.
    """
    if config.channel == "disk":
        return DiskChannel(pool, config, submit, folder=folder, hf_path=hf_path)
    return BroadcastChannel(pool, config, submit, host=own_address([engine.url for engine in pool.engines]))


def push_until_whole(channel: Channel, source: WeightSource) -> SyncStats:
    """Push the source's weights until all engines that are still in the pool hold them. Every rank calls it.

    An incomplete push fences at least one engine, and none joins in before it is repeated: this comes to an end.

    Raises:
        EngineError: on the first rank; see `Channel.push`.
    """
    earlier = SyncStats()
    while True:
        stats = channel.push(source.named_weights(), source.version).after(earlier)
        if share_flag(None if isinstance(channel, FollowerChannel) else stats.is_whole):
            return stats
        earlier = stats
