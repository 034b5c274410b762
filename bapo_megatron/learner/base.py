"""The learner seam: the training loop's view of the policy. Every rank calls every method."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.kl import KLState
from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.mismatch import Mismatch
from bapo_megatron.buffer.packing import Share
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.learner.gradient_guard import GuardState
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.sync.base import WeightSource
from bapo_megatron.types import ClipBounds, MiniBatch

FoundOf = Callable[[ScoredTokens], ClipBounds]
"""Makes the decision for a micro-batch from its tokens at the current weights, while its loss is computed. All ranks of
the last stage call it together, including all tensor ranks."""

Scored = tuple[Tensor, Tensor | None]
"""A micro-batch's log-probs, and its entropies if they were asked for: float32 [R], nats, without gradient."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one optimizer update."""

    metrics: dict[str, float]  # the same on every rank
    log_probs: list[Tensor]  # before the update, in the form of Learner.log_probs
    mismatch: Mismatch  # engine against learner, on trained tokens of age 0; the same on every rank, on the CPU
    found: tuple[Any, ...]  # decisions that the losses used: one, or one per micro-batch; the same on every rank


class UpdatesState(TypedDict):
    """The state of a learner's updates in a checkpoint, apart from its snapshot."""

    kl: KLState
    gradients: GuardState


class Learner(Protocol):
    """A policy split over processes. Collective: all ranks call each method, in the same order."""

    version: int  # optimizer updates so far = weight version
    share: Share  # this rank's part of a mini-batch
    local_time: LocalTime  # time of this rank's own passes, including the passes of models other than the policy

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """Return log-probs without gradient: one float32 [R] per micro-batch; empty off the last stage."""
        ...

    def score(self, minibatch: MiniBatch, *, with_entropy: bool = False) -> list[Scored]:
        """Return the same log-probs as `log_probs`, with entropies on request; the mini-batch's `step` must come next.

        It may cost nothing extra: it returns log-probs that the mini-batch already has (`proximal_version`), and it
        keeps forward passes that can run now, with their activations, for the step.
        """
        ...

    def sum_over_data_ranks(self, table: Tensor) -> Tensor:
        """Return the sum of a small fp64 table over data x context ranks of the last stage, on every rank.

        Other stages pass any table of the same shape. Makes one all-reduce.
        """
        ...

    def sum_over_last_stage(self, table: Tensor) -> Tensor:
        """Return the same sum, on the ranks of the last stage alone; a `FoundOf` may call it.

        The last stage's ranks are then all at the same micro-batch, while other stages are at other micro-batches.
        """
        ...

    def sum_over_context(self, table: Tensor) -> Tensor:
        """Return the sum of a small fp64 table over the ranks that hold other tokens of the same sequences.

        They call it together, at the same micro-batch.
        """
        ...

    def step(self, minibatch: MiniBatch, found: Any) -> StepResult:
        """Make one optimizer update with the configured loss; raise `version` by one.

        Args:
            found: the decision of the loss's update rule, or a `FoundOf`.
        """
        ...

    def take_times(self) -> dict[str, float]:
        """Return this rank's seconds in each part of `step` since the last call, as metrics. Not collective."""
        ...

    def weights(self) -> WeightSource:
        """Return the weights of the current version, to be read before the next update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the updates that no snapshot holds: a JSON value, saved with the run's counters."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def snapshot(self) -> Snapshot:
        """Return this rank's part of weights, optimizer state and version, to be written before the next update.

        With `Snapshot.detach` it may be written later.
        """
        ...

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any layout.

        Raises:
            CheckpointError: the folder is torn, or holds another model; raised on every rank.
        """
        ...
