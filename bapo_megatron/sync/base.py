"""The interface of a channel: how the training loop sends the policy's weights to the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.engines.base import PauseMode
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.runtime.ranks import share_flag
from bapo_megatron.runtime.together import failing_together

Submit = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
"""Runs a coroutine on the engines' event loop: `lambda c: asyncio.run_coroutine_threadsafe(c, loop)`."""


@dataclass(slots=True)
class SyncStats:
    """Sizes and times of one push.

    `seconds` by stage: pause (and forming the group), gather (only while the engines wait for it), broadcast (disk:
    load), verify, resume.
    """

    num_bytes: int = 0
    num_tensors: int = 0
    num_buckets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    generation_pause_s: float = 0.0  # from the last engine's pause until the last one continues
    is_whole: bool = True  # every live engine holds the weights; otherwise push again
    _last_lap_s: float = field(default_factory=time.monotonic)

    def lap(self, stage: str | None) -> None:
        """Add the time since the last lap to a stage; None discards it."""
        last, self._last_lap_s = self._last_lap_s, time.monotonic()
        if stage is not None:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._last_lap_s - last

    def metrics(self) -> dict[str, float]:
        """Return the stats under the names of `bapo help metrics`."""
        stages = {f"sync/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        return {
            "sync/bytes": float(self.num_bytes),
            "sync/seconds": sum(self.seconds.values()),
            "sync/generation_pause_s": self.generation_pause_s,
            **stages,
        }

    def after(self, earlier: SyncStats) -> SyncStats:
        """Add the time of earlier, incomplete pushes of the same weights."""
        stages = earlier.seconds.keys() | self.seconds.keys()
        self.seconds = {s: earlier.seconds.get(s, 0.0) + self.seconds.get(s, 0.0) for s in sorted(stages)}
        return self


class WeightSource(Protocol):
    """The weights of one version, to be read before the next one is made. Every rank has one; it may wrap another."""

    @property
    def version(self) -> int: ...

    def manifest(self) -> Sequence[TensorSpec]:
        """Return names, types and shapes of the weights, in order: the same on every rank. Not collective."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's own boxes, mostly views of live weights; all ranks' boxes make up each weight once.

        Collective: every rank reads to the end, and uses nothing before.

        Raises:
            UserError: at the end, on every rank, if any rank failed; see `failing_together`.
        """
        ...

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, in manifest order, on global rank 0; elsewhere empty tensors.

        Collective; raises as `pieces` does.
        """
        ...


class Channel(Protocol):
    """A way from the trainer to the engines. Every rank has one, and calls every method.

    A method ends on all ranks with the same result, or raises an error of the same class and text.
    """

    pause_mode: PauseMode
    """What happens to requests during a push. retract: they wait, and are recomputed with the new weights. abort: they
    end with the tokens so far. in_place: they wait, then continue with what older weights have computed; SGLang also
    uses that for new requests with the same prefix."""

    def connect(self, source: WeightSource) -> None:
        """Check that the engines can take these weights. Raises EngineError naming the URL and first difference."""
        ...

    def send(self, source: WeightSource) -> SyncStats:
        """Send the whole policy until every live engine holds it, or none is left and one is expected back.

        The engines stay paused until `resume`.

        Raises:
            EngineError: all engines refuse; or no engine is left, and none is expected back.
            UserError: a rank failed (the message names it); the engines sample nothing from what they have received.
        """
        ...

    def resume(self, stats: SyncStats) -> SyncStats:
        """Let the engines sample with the weights sent; return the completed stats of `send`. Raises as `send` does."""
        ...

    def push(self, source: WeightSource) -> SyncStats:
        """Send the whole policy, and let the engines sample with it."""
        return self.resume(self.send(source))

    def close(self) -> None:
        """Leave the engines."""
        ...


class Sender(Protocol):
    """A way to the engines for whole weights, in the trainer's first process and its main thread."""

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        """See `Channel.connect`."""
        ...

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """Send the whole policy once; the engines stay paused.

        Args:
            weights: Hugging Face names and whole tensors, in the order of the manifest.
            version: the weight version that the engines report from then on.

        Returns the stats. If they are not `is_whole`, an engine failed midway and is fenced, and `send` must be
        repeated.

        Raises:
            EngineError: see `Channel.send`.
            UserError: from `weights`.
        """
        ...

    def resume(self, stats: SyncStats) -> None:
        """Let the engines sample with the weights sent, and complete the stats; see `Channel.resume`."""
        ...

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """Send the whole policy once; if that is whole, let the engines sample with it."""
        stats = self.send(weights, version)
        if stats.is_whole:
            self.resume(stats)
        return stats

    def close(self) -> None: ...


class RankZeroChannel(Channel):
    """Implements `Channel`: all ranks gather whole weights on rank 0, which sends them."""

    def __init__(self, sender: Sender | None, pause_mode: PauseMode = "retract") -> None:
        """`sender` pauses engines in this mode; it is None on every rank but the first."""
        self.pause_mode = pause_mode
        self._sender = sender

    def connect(self, source: WeightSource) -> None:
        """See `Channel.connect`."""
        with failing_together():
            if self._sender is not None:
                self._sender.connect(source.manifest())

    def send(self, source: WeightSource) -> SyncStats:
        """See `Channel.send`. An incomplete one fences an engine and a repeated one admits none, so the loop ends."""
        stats = SyncStats()
        while True:
            with failing_together():
                weights = source.whole()
                try:
                    if self._sender is not None:
                        stats = self._sender.send(weights, source.version).after(stats)
                finally:
                    for _ in weights:  # no other rank may wait for this one
                        pass
            if share_flag(None if self._sender is None else stats.is_whole):
                return stats

    def resume(self, stats: SyncStats) -> SyncStats:
        """See `Channel.resume`."""
        with failing_together():
            if self._sender is not None:
                self._sender.resume(stats)
        return stats

    def close(self) -> None:
        """See `Channel.close`."""
        with failing_together():
            if self._sender is not None:
                self._sender.close()
