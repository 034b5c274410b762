"""The phases of a training step, for placements that must free in one phase the room that another one needs.

`sync/turns.py` has such a placement.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Phases(Protocol):
    """The phases of a step under one placement of trainer and engines. Every rank enters them in the same order.

    A push may occur within sampling; when it ends, the sampling phase holds again.
    """

    def sampling(self) -> AbstractContextManager[None]:
        """Hold what engines need to sample, for training or evaluation."""
        ...

    def training(self) -> AbstractContextManager[None]:
        """Hold what the trainer needs to score a batch and to update its models."""
        ...

    def pushing(self) -> AbstractContextManager[None]:
        """Hold the weights of the trainer and of the engines."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Hold the weights and the optimizer state that a checkpoint reads."""
        ...

    def take_times(self) -> dict[str, float]:
        """Return the seconds spent on changes of phase since the last call, as metrics."""
        ...


class SeparateDevices:
    """Implements `Phases` for trainer and engines on separate devices: every phase always holds."""

    def sampling(self) -> AbstractContextManager[None]:
        return nullcontext()

    # All four are this one function: there is nothing to free and nothing to bring back.
    training = pushing = saving = sampling

    def take_times(self) -> dict[str, float]:
        return {}
