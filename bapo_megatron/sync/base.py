"""The channel seam: how the training loop hands the policy to the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.engines.wire import TensorSpec

Submit = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
"""Runs a coroutine on the engines' event loop: `lambda c: asyncio.run_coroutine_threadsafe(c, loop)`."""


@dataclass(slots=True)
class SyncStats:
    """What one push did.

    `seconds` per stage: pause (and forming the group), gather (only what the engines waited for), broadcast (disk:
    load), verify, resume.
    """

    num_bytes: int = 0
    num_tensors: int = 0
    num_buckets: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    generation_pause_s: float = 0.0  # from the pause acknowledged by all engines to the last one's continue
    is_whole: bool = True  # every engine of the pool that is still live holds the weights; else push again

    def metrics(self) -> dict[str, float]:
        """Under the names of docs/metrics.md."""
        stages = {f"sync/{stage}_s": seconds for stage, seconds in self.seconds.items()}
        return {
            "sync/bytes": float(self.num_bytes),
            "sync/seconds": sum(self.seconds.values()),
            "sync/generation_pause_s": self.generation_pause_s,
            **stages,
        }

    def after(self, earlier: SyncStats) -> SyncStats:
        """With the time that earlier, incomplete pushes of the same weights took."""
        stages = earlier.seconds.keys() | self.seconds.keys()
        self.seconds = {s: earlier.seconds.get(s, 0.0) + self.seconds.get(s, 0.0) for s in sorted(stages)}
        return self


class WeightSource(Protocol):
    """The owner of the weights that a channel pushes; every rank has one."""

    version: int

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names, whole, one by one, on global rank 0; elsewhere empty tensors."""
        ...


class Channel(Protocol):
    """Collective over the trainer's processes: all ranks call `push`, since producing the weights is collective."""

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        """Check that the engines can take these weights. Raises EngineError naming url and first difference."""
        ...

    def push(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """Send the whole policy, once; `push_until_whole` repeats it where an engine failed on the way.

        Args:
            named_weights: Hugging Face names and whole tensors, as the manifest lists them; always exhausted.
            version: the weight version that the engines report from now on.

        Raises:
            EngineError: all engines refuse, and stay paused; or no engine is left, and none is expected back.
        """
        ...

    def close(self) -> None: ...


class Clock:
    """Adds the time since the last lap to a stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave the time since the last lap to somebody else."""
        self._last = time.monotonic()
