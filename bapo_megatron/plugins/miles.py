"""BAPO in miles, through its function paths (Megatron backend):

    --loss-type custom_loss
    --custom-loss-function-path bapo_megatron.plugins.miles.bapo_loss
    --custom-megatron-before-train-step-hook-path bapo_megatron.plugins.miles.before_train_step
    --custom-config-path bapo.yaml        # bapo: {rho0: 0.5, scope: lagged}

Scopes: lagged, smoothed and fixed. Tables add up over all replicas, including those outside Megatron's groups.
"""

from argparse import Namespace

from torch import Tensor

from bapo_megatron.plugins.function_paths import FunctionPaths, HostBatch, LossAndMetrics, Reducer
from bapo_megatron.plugins.host import Host
from bapo_megatron.plugins.ranks import sum_over_group

MILES = Host(
    "miles",
    "miles",
    ("0.1.0",),
    "--loss-type custom_loss with both function paths of bapo_megatron.plugins.miles on the Megatron backend, "
    "advantages per token, and several updates of each rollout; bapo scope lagged, smoothed or fixed",
)


def _log_probs(args: Namespace, batch: HostBatch, logits: Tensor) -> list[Tensor]:
    from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy

    found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return found["log_probs"]


def _policy_loss(args: Namespace, batch: HostBatch, logits: Tensor, reducer: Reducer) -> LossAndMetrics:
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function

    return policy_loss_function(args, batch, logits, reducer)


def _sum_over_ranks(table: Tensor) -> Tensor:
    from miles.backends.training_utils.parallel import get_parallel_state

    return sum_over_group(table, *get_parallel_state().effective_dp_cp.groups_inner_to_outer)


def _has_loss() -> bool:
    from miles.backends.training_utils.parallel import get_parallel_state

    return get_parallel_state().is_pp_last_stage


PATHS = FunctionPaths(MILES, _log_probs, _policy_loss, _sum_over_ranks, _has_loss)
bapo_loss, before_train_step = PATHS.bapo_loss, PATHS.before_train_step
