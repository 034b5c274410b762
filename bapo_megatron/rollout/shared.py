"""The rollouts of trainer rank 0, shared with every rank: a share of the batch, the evaluation, or the same error.

Rank 0 makes a batch in a thread and meanwhile broadcasts a sign of life; a JSON header and the shares follow.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import EngineState
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.shares import BatchShares, SharePlan, header_of
from bapo_megatron.runtime.together import share_json
from bapo_megatron.types import Batch, Group

NEEDS_WEIGHTS: Final = None
"""The result of a call that needs a push first: the last engine has failed, and one is back without the weights. The
same call resumes after the push."""


class Rollouts(Protocol):
    """The maker of batches, on trainer rank 0. The methods implemented here suit rollouts without engines."""

    @property
    def engines(self) -> ConnectedEngines | None:
        """The engines it samples with."""
        return None

    @property
    def prompt_digests(self) -> dict[str, str]:
        """The SHA-256 of the prompts of training and evaluation, by where they come from."""
        return {}

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]] | None:
        """Return one step's batch, blocking, or NEEDS_WEIGHTS."""
        ...

    def pause(self) -> None:
        """End all requests for samples until the next batch."""
        return

    def evaluate(self, version: int) -> dict[str, float] | None:
        """Return metrics of the weights that were just pushed, on evaluation prompts, or NEEDS_WEIGHTS."""
        return {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        ...

    def engine_states(self) -> list[EngineState]:
        """Return states that are at most a few seconds old, for `monitor.prometheus_port`."""
        return []

    def judge_failure(self) -> Verdict | None:
        """Return the first failure of the judge or the environment on responses for the latest batch."""
        return None

    def close(self) -> None:
        """Close connections and judges, if any."""
        return

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SharedRollouts:
    """Rank 0's rollouts for all ranks, which call `next_batch` and `evaluate` in the same order."""

    def __init__(
        self,
        config: Config,
        first: Rollouts | None,
        keep: Callable[[int, Sequence[Group], Batch], None],
        shares: BatchShares,
    ) -> None:
        """`first` makes the batches on rank 0, None elsewhere; `keep` gets a step's number, from 1, groups, batch."""
        self._config = config
        self._first = first
        self._keep = keep
        self._shares = shares
        self._sign_of_life_s = config.parallel.timeout_s / 4

    def next_batch(self, step: int, version: int, plan: SharePlan) -> Batch | None:
        """Return this rank's share of one step's batch, sampled with weights of `version` or older, or NEEDS_WEIGHTS.

        Args:
            plan: what each data rank needs.
        """
        made: Batch | None = None

        def make() -> dict[str, Any] | None:
            nonlocal made
            assert self._first is not None
            made = self._make(self._first, step, version)
            return None if made is None else header_of(made)

        header = share_json(make if self._first else None, sign_of_life_s=self._sign_of_life_s)
        return NEEDS_WEIGHTS if header is NEEDS_WEIGHTS else self._shares.deal(made, header, plan)

    def before_push(self) -> None:
        """End requests whose recorded experts the engine would choose again with the new weights."""
        if self._config.model.replay_routes and self._config.rollout.overlap:
            share_json(self._first.pause if self._first else None, sign_of_life_s=self._sign_of_life_s)

    def evaluate(self, num_done: int, version: int) -> dict[str, float] | None:
        """Return metrics of the weights that were just pushed, or NEEDS_WEIGHTS.

        They are empty if no evaluation is due after `num_done` steps.
        """
        interval = self._config.eval.interval_steps
        if interval is None or (num_done % interval and num_done != self._config.train.num_steps):
            return {}
        ask = partial(self._first.evaluate, version) if self._first else None
        return share_json(ask, sign_of_life_s=self._sign_of_life_s)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the rollouts on rank 0, or None elsewhere."""
        return self._first.state_dict() if self._first else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._first:
            self._first.load_state_dict(state)

    def close(self) -> None:
        if self._first:
            self._first.close()

    def _make(self, first: Rollouts, step: int, version: int) -> Batch | None:
        if (made := first.next_batch(step, version)) is NEEDS_WEIGHTS:
            return NEEDS_WEIGHTS
        batch, groups = made
        self._keep(step + 1, groups, batch)
        return batch
