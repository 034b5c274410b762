"""The learner seam: what the training loop asks of whoever holds the policy. Every rank calls every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bapo_megatron.algorithms.mismatch import Mismatch
from bapo_megatron.buffer.packing import Share
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.types import ClipBounds, MicroBatch, MiniBatch

BoundsOf = Callable[[MicroBatch, Tensor], ClipBounds]
"""Bounds of a micro-batch, from its log_probs_R at the current weights, found when its loss is computed: a last stage's
ranks call it together, tensor copies included."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer update tells."""

    metrics: dict[str, float]  # the same on every rank
    log_probs: list[Tensor] | None  # of the forward pass, before the update; like Learner.log_probs
    mismatch: Mismatch  # between engine and learner, of the trained tokens of age 0; the same on every rank, on the CPU
    bounds: tuple[ClipBounds, ...]  # that the losses used: one, or one for each micro-batch; the same on every rank


class Learner(Protocol):
    """A policy split over processes. Collective: all ranks call each method, in the same order."""

    version: int  # optimizer updates so far = weight version
    share: Share  # how mini-batches are to be packed for this rank

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """Log-probs at the current weights, no gradient: one float32 [R] per micro-batch; None off the last stage."""
        ...

    def score(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """The same as `log_probs`, before the mini-batch's `step`: call it where that comes next.

        It may cost nothing. Log-probs that the mini-batch brings along (`proximal_version`) are handed out; and forward
        passes that can run now are kept, with their activations, for the step to go on from.
        """
        ...

    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor:
        """Sum of a small fp64 table over data x context ranks of the last stage, handed to every rank (one all-reduce).

        `table` is None on ranks that are not on the last pipeline stage.
        """
        ...

    def sum_over_last_stage(self, table: Tensor) -> Tensor:
        """The same sum for the ranks of the last stage alone: what a `BoundsOf` may call.

        All of them are at the micro-batch of one index then, while other stages are at other ones.
        """
        ...

    def step(self, minibatch: MiniBatch, bounds: ClipBounds | BoundsOf) -> StepResult:
        """One optimizer update with the configured loss; raises `version` by one."""
        ...

    def weight_specs(self) -> list[TensorSpec]:
        """What `named_weights` yields on rank 0, in its order. Not collective."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under Hugging Face names, whole, one by one, on global rank 0; elsewhere empty tensors."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What steers the updates beside what a snapshot holds: a JSON value, saved with the run's counters."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def snapshot(self) -> Snapshot:
        """This rank's part of weights, optimizer state and version, to be written before the next update.

        With `Snapshot.detach` it may be written later.
        """
        ...

    def load(self, folder: Path) -> None:
        """Read back what all ranks of any layout wrote.

        Raises:
            CheckpointError: on every rank: the folder is torn, or holds another model.
        """
        ...
