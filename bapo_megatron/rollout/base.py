"""The rollout seam: what the training loop asks of the maker of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bapo_megatron.engines.base import EngineState
from bapo_megatron.types import Batch, Group


class Rollouts(Protocol):
    """What the training loop, on trainer rank 0, asks of whoever makes its batches."""

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]] | None:
        """One step's batch, blocking. None asks for a push of the current weights, and to be asked again."""
        ...

    def expect(self, version: int) -> None:
        """Weights of this version are about to be pushed."""
        ...

    def evaluate(self, version: int) -> dict[str, float] | None:
        """Metrics of the weights that were just pushed, on prompts of their own; None as `next_batch`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens, special ones included."""
        ...

    def engine_states(self) -> list[EngineState]:
        """For `monitor.prometheus_port`; of a few seconds ago."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...
