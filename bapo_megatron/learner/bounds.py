"""Where the clip bounds of each optimizer step come from: BAPO's search in its three scopes, or fixed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table, empty_table, search_bounds
from bapo_megatron.algorithms.losses import fixed_bounds, ratio_and_weight
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.types import ClipBounds, MiniBatch


class BoundsFinder:
    """Bounds for one optimizer step, the same on every rank.

    exact: the ratios of the whole global mini-batch at the current weights (`Learner.score`).
    lagged: the ratios that the previous optimizer step saw in its own forward pass; no extra pass, one step late.
    fixed, and the losses with fixed bounds: no search.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._searches = config.loss.name == "bapo" and config.bapo.scope != "fixed"
        self._lagged: Tensor | None = None

    def find(self, minibatch: MiniBatch) -> ClipBounds:
        """One all-reduce of a small table in scope exact, none in the others."""
        if self._config.loss.name != "bapo":
            return fixed_bounds(self._config.loss)
        if not self._searches:
            return search_bounds(empty_table(self._config.bapo), self._config.bapo)
        if self._lagged is not None:
            return search_bounds(self._lagged, self._config.bapo)
        return search_bounds(self._global_table(minibatch, self._learner.score(minibatch)), self._config.bapo)

    def observe(self, minibatch: MiniBatch, log_probs: list[Tensor] | None) -> None:
        """After the step, with the log-probs of its forward pass: what `lagged` uses next time."""
        if self._searches and self._config.bapo.scope == "lagged":
            self._lagged = self._global_table(minibatch, log_probs)

    def state_dict(self) -> dict[str, list[float] | None]:
        return {"lagged": None if self._lagged is None else self._lagged.flatten().tolist()}

    def load_state_dict(self, state: dict[str, list[float] | None]) -> None:
        lagged = state["lagged"]
        self._lagged = None if lagged is None else torch.tensor(lagged, dtype=torch.float64)

    def _global_table(self, minibatch: MiniBatch, log_probs: list[Tensor] | None) -> Tensor:
        if log_probs is None:
            return self._learner.sum_over_data_ranks(None)
        table = empty_table(self._config.bapo)
        for mb, log_probs_R in zip(minibatch.micro_batches, log_probs, strict=True):
            log_probs_R = log_probs_R.to(mb.behaviour_logprobs_R.device)
            behaviour_R, cap = mb.behaviour_logprobs_R, self._config.loss.importance_cap
            ratio_R, weight_R = ratio_and_weight(log_probs_R, behaviour_R, mb.proximal_logprobs_R, mb.mask_R, cap)
            table += contribution_table(
                ratio_R, mb.advantages_R, mb.mask_R, behaviour_R, self._config.bapo, weights=weight_R
            )
        return self._learner.sum_over_data_ranks(table)
