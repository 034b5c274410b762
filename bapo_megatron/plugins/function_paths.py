"""BAPO in a host that calls functions by path: a custom loss, and a hook before each update (slime, miles).

The loss counts its tokens and calls the host's own policy loss at the bounds in force, so KL, entropy and metrics are
still the host's. The hook sums the previous update's counts over the ranks, in one all-reduce, and searches.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.algorithms.losses import importance_ratio
from bapo_megatron.plugins.host import Host, num_missing, reducer_weights

Reducer = Callable[[Tensor], Tensor]
HostBatch = dict[str, Any]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

_FITTING = {
    "loss_type": ("custom_loss",),
    "advantage_estimator": ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    "recompute_loss_function": (False,),  # it would count each token twice
    "use_opsm": (False,),
    "use_tis": (False,),
    "custom_pg_loss_reducer_function_path": (None,),
    "train_backend": ("megatron",),  # the hook's only caller
}


@dataclass
class FunctionPaths:
    """The two functions that a host calls, and the search that they share.

    Args:
        log_probs: returns the log-probs at the current weights from (args, batch, logits), one tensor per sample.
        policy_loss: the host's own policy loss.
        sum_over_ranks: sums a table over the ranks that hold other tokens of the same pipeline stage.
        has_loss: whether this rank computes the loss.
    """

    host: Host
    log_probs: Callable[[Namespace, HostBatch, Tensor], list[Tensor]]
    policy_loss: Callable[[Namespace, HostBatch, Tensor, Reducer], LossAndMetrics]
    sum_over_ranks: Callable[[Tensor], Tensor]
    has_loss: Callable[[], bool]
    search: BoundSearch | None = None

    def before_train_step(self, args: Namespace, *_: Any) -> None:
        """Set the bounds of the coming update from the tokens of earlier ones: --custom-...-hook-path."""
        search = self._search_of(args)
        if search.config.looks_back and self.has_loss():
            search.finish_update()
            search.search_past()

    def bapo_loss(
        self, args: Namespace, batch: HostBatch, logits: Tensor, sum_of_sample_mean: Reducer
    ) -> LossAndMetrics:
        """Return the host's policy loss of one micro-batch at BAPO's bounds: --custom-loss-function-path.

        Args:
            logits: float32, [1, T, V / tensor ranks].
            sum_of_sample_mean: the host's reducer of one value per response token.
        """
        search = self._search_of(args)
        bounds = search.bounds
        advantages = torch.cat(batch["advantages"])
        if search.config.looks_back:
            search.add(self._table(search, args, batch, logits.detach(), sum_of_sample_mean))
        clipped = Namespace(**{**vars(args), "eps_clip": 1 - bounds.low, "eps_clip_high": bounds.high - 1})
        loss, metrics = self.policy_loss(clipped, batch, logits, sum_of_sample_mean)
        # The host sums metrics and divides by the size of the batch, so each metric is a reduced constant.
        known = {name: value for name, value in search.metrics().items() if value == value}
        return loss, metrics | {
            name.replace("/", "_"): sum_of_sample_mean(torch.full_like(advantages, value, dtype=torch.float32))
            for name, value in known.items()
            if name in ("bapo/low", "bapo/high")
        }

    @torch.no_grad()
    def _table(
        self, search: BoundSearch, args: Namespace, batch: HostBatch, logits: Tensor, reducer: Reducer
    ) -> Tensor:
        log_probs = torch.cat(self.log_probs(args, batch, logits))
        sampled = batch.get("rollout_log_probs")
        old = sampled if args.use_rollout_logprobs else batch.get("log_probs")
        old_log_probs = torch.cat(old) if old else log_probs
        weights = reducer_weights(reducer, log_probs)
        mask = weights > 0
        if args.use_rollout_logprobs:
            self.host.require_logprobs("rollout_log_probs", float(num_missing(old_log_probs, mask)))
        ratio = importance_ratio(log_probs, old_log_probs, mask)
        return search.tabulate(
            ratio, torch.cat(batch["advantages"]), mask, torch.cat(sampled) if sampled else old_log_probs, weights
        )

    def _search_of(self, args: Namespace) -> BoundSearch:
        if self.search is None:
            config = self.host.settings(getattr(args, "bapo", None) or {}, "lagged", "smoothed", "fixed")
            if problems := self.host.untried() + self._unfit(args):
                raise self.host.refusal(problems)
            self.search = BoundSearch(config, self.sum_over_ranks)
        return self.search

    def _unfit(self, args: Namespace) -> list[str]:
        problems = [
            f"--{name.replace('_', '-')} {value} does not fit, choose from {', '.join(map(str, allowed))}"
            for name, allowed in _FITTING.items()
            if (value := getattr(args, name, allowed[0])) not in allowed
        ]
        if getattr(args, "custom_megatron_before_train_step_hook_path", None) is None:
            problems.append(
                "--custom-megatron-before-train-step-hook-path is not set, so the bounds would never change"
            )
        rollout: list[Any] = [getattr(args, name, None) for name in ("rollout_batch_size", "n_samples_per_prompt")]
        update = getattr(args, "global_batch_size", None)
        if None not in (*rollout, update) and rollout[0] * rollout[1] <= update and not args.use_rollout_logprobs:
            problems.append(
                "each rollout is trained in one update, right after its log-probs were computed, so every ratio is "
                f"1 and no bound acts; set --num-steps-per-rollout above 1, a --global-batch-size below {update}, or "
                "--use-rollout-logprobs with asynchronous rollouts"
            )
        return problems
