"""The rollouts of trainer rank 0, as every rank sees them: the same batch, the same evaluation, or the same error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bapo_megatron.buffer.share import share_batch, share_metrics
from bapo_megatron.config.schema import Config
from bapo_megatron.rollout.base import Rollouts
from bapo_megatron.types import Batch, Group

Push = Callable[[], Mapping[str, float]]
"""Hands the learner's weights to every engine that is there. Collective."""


class SharedRollouts:
    """Collective: every rank calls `next_batch` and `evaluate`, in the same order."""

    def __init__(self, config: Config, first: Rollouts | None, keep: Callable[[int, Sequence[Group]], None]) -> None:
        """`first` makes the batches, on rank 0 (None elsewhere); `keep` gets each step's number, from 1, and groups."""
        self._config = config
        self._first = first
        self._keep = keep
        self._sign_of_life_s = config.parallel.timeout_s / 4

    def next_batch(self, step: int, version: int, push: Push) -> Batch:
        """The batch of one step, sampled with weights of `version` or older.

        `push`, here and below, is called when the last engine has failed and one came back, without these weights.
        """
        make = partial(self._make, self._first, step, version) if self._first else None
        while (batch := share_batch(make, sign_of_life_s=self._sign_of_life_s)) is None:
            push()
        return batch

    def evaluate(self, num_done: int, version: int, push: Push) -> dict[str, float]:
        """Metrics of the weights that were just pushed; nothing where no evaluation is due after `num_done` steps."""
        interval = self._config.eval.interval_steps
        if interval is None or (num_done % interval and num_done != self._config.train.num_steps):
            return {}
        ask = partial(self._first.evaluate, version) if self._first else None
        while (metrics := share_metrics(ask, sign_of_life_s=self._sign_of_life_s)) is None:
            push()
        return metrics

    def expect(self, version: int) -> None:
        """Weights of this version are about to be pushed."""
        if self._first:
            self._first.expect(version)

    def state_dict(self) -> dict[str, Any] | None:
        """What a resumed run needs, on rank 0."""
        return self._first.state_dict() if self._first else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._first:
            self._first.load_state_dict(state)

    def close(self) -> None:
        if self._first:
            self._first.close()

    def _make(self, first: Rollouts, step: int, version: int) -> Batch | None:
        if (made := first.next_batch(step, version)) is None:
            return None
        batch, groups = made
        self._keep(step + 1, groups)
        return batch
