"""BAPO in verl: a registered policy loss.

verl loads this module by itself, through the entry point `verl.plugins`. These settings enable it:

    actor_rollout_ref.actor.policy_loss._target_=bapo_megatron.plugins.verl.BAPOLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo
    '+actor_rollout_ref.actor.policy_loss.bapo={rho0: 0.5, scope: lagged}'
    '+actor_rollout_ref.actor.policy_loss.train_batch_size=${data.train_batch_size}'

The loss finds the bounds and calls verl's own clipped loss ("vanilla") with them, so dual clipping, importance weights,
aggregation and metrics are verl's. Scopes:

    lagged      the ratios of the previous mini-batch
    smoothed    the ratios of several earlier mini-batches
    microbatch  the ratios of each micro-batch by itself, as in the authors' recipe
    fixed       no search

A registered loss sees one micro-batch at a time, so scope exact is not possible. A table and a token count are summed
in one all-reduce per micro-batch; the count shows when a mini-batch ends.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.algorithms.losses import importance_ratio
from bapo_megatron.plugins.host import Host, num_missing
from bapo_megatron.plugins.ranks import sum_over_data_ranks

VERL = Host(
    "verl",
    "verl",
    ("0.9.1",),
    "loss_agg_mode token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm or seq-mean-token-mean, and "
    "several updates of each batch; bapo scope lagged, smoothed, microbatch or fixed",
)
_SCOPES = ("lagged", "smoothed", "microbatch", "fixed")
_PER_SEQUENCE = "seq-mean-token-mean"
_PER_TOKEN = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass
class BAPOLossConfig(PolicyLossConfig):
    """[actor.policy_loss] with the settings of the search."""

    loss_mode: str = "bapo"
    bapo: dict[str, Any] = field(default_factory=dict)
    """Keys of [bapo] (`bapo help settings`). The default scope is lagged."""
    train_batch_size: int | None = None
    """data.train_batch_size, to check whether batches are used for several updates. If unset, this is not checked."""

    def __post_init__(self) -> None:
        VERL.settings(self.bapo, *_SCOPES)


class _WorkerSearch:
    """One worker's search; its tables are already summed over the ranks."""

    def __init__(self, config: Any) -> None:
        own = config.policy_loss
        search = VERL.settings(getattr(own, "bapo", {}), *_SCOPES)
        problems = VERL.untried()
        if config.loss_agg_mode not in (*_PER_TOKEN, _PER_SEQUENCE):
            problems.append(f"loss_agg_mode={config.loss_agg_mode!r} does not fit, as a token's weight is not known")
        total = getattr(own, "train_batch_size", None)
        if total is not None and total <= config.ppo_mini_batch_size and config.ppo_epochs == 1:
            problems.append(
                "each batch is trained once, right after it was sampled, so every ratio is 1 and no bound acts; "
                f"set ppo_mini_batch_size (now {config.ppo_mini_batch_size}) below data.train_batch_size ({total}), or "
                "ppo_epochs above 1"
            )
        if problems:
            raise VERL.refusal(problems)
        self.search = BoundSearch(search, lambda table: table)
        self.num_tokens = 0.0  # tokens of the current mini-batch so far, over all ranks

    def observe(self, table: Tensor, num_tokens: float, batch_num_tokens: float) -> None:
        """Add a micro-batch of all ranks. The last one of a mini-batch sets the bounds of the next mini-batch."""
        self.search.add(table)
        self.num_tokens += num_tokens
        if self.num_tokens >= batch_num_tokens:
            self.search.finish_update()
            self.search.search_past()
            self.num_tokens = 0.0


@register_policy_loss("bapo")
def bapo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's clipped loss of one micro-batch at BAPO's bounds.

    Args:
        old_log_prob: nats, [B, T] like all tensors here.
        log_prob: nats, at the current weights, with gradient.
        response_mask: 1 for trained tokens.
        config: verl's ActorConfig, which also keeps the search from call to call.
        rollout_is_weights: importance weights of the tokens, which the search uses too.

    Returns:
        The loss and metrics, like verl's other losses.

    Raises:
        UserError: verl's version, or a setting, does not fit.
    """
    if not hasattr(config.policy_loss, "_bapo_worker"):  # verl's configurations freeze only their fields
        config.policy_loss._bapo_worker = _WorkerSearch(config)
    worker: _WorkerSearch = config.policy_loss._bapo_worker
    search, mask = worker.search, response_mask.bool()
    missing = num_missing(old_log_prob, mask).cpu().double()
    if search.config.scope != "fixed":
        with torch.no_grad():
            weights = torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights
            if loss_agg_mode == _PER_SEQUENCE:
                weights = weights / mask.sum(-1, keepdim=True).clamp(min=1)
            ratio = importance_ratio(log_prob, old_log_prob, mask)
            own = search.tabulate(ratio, advantages, mask, old_log_prob, weights)
            counts = torch.stack([mask.sum().cpu().double(), missing])
            table, (num_tokens, missing) = sum_over_data_ranks(torch.cat([own, counts])).split([own.numel(), 2])
        if search.config.scope == "microbatch":
            search.search(table)
    VERL.require_logprobs("old_log_prob", float(missing))
    bounds = search.bounds
    vanilla = copy.copy(config)
    object.__setattr__(vanilla, "clip_ratio_low", 1 - bounds.low)  # the class is frozen, but this is a copy
    object.__setattr__(vanilla, "clip_ratio_high", bounds.high - 1)
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, vanilla, rollout_is_weights
    )
    metrics |= {f"actor/{name}": value for name, value in search.metrics().items()}
    if search.config.looks_back:
        batch_num_tokens = config.global_batch_info.get("batch_num_tokens")
        worker.observe(table, float(num_tokens), float(num_tokens if batch_num_tokens is None else batch_num_tokens))
    return loss, metrics
