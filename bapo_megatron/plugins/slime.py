"""BAPO in slime, through its function paths:

    --loss-type custom_loss
    --custom-loss-function-path bapo_megatron.plugins.slime.bapo_loss
    --custom-megatron-before-train-step-hook-path bapo_megatron.plugins.slime.before_train_step
    --custom-config-path bapo.yaml        # bapo: {rho0: 0.5, scope: lagged}

Scopes: lagged, smoothed and fixed. No hook sees an update's tokens before the update, so exact is not possible.
"""

from argparse import Namespace

from torch import Tensor

from bapo_megatron.plugins.function_paths import FunctionPaths, HostBatch, LossAndMetrics, Reducer
from bapo_megatron.plugins.host import Host
from bapo_megatron.plugins.ranks import has_loss, sum_over_data_ranks

SLIME = Host(
    "slime",
    "slime",
    ("0.3.1",),
    "--loss-type custom_loss with both function paths of bapo_megatron.plugins.slime, "
    "advantages per token, and several updates of each rollout; bapo scope lagged, smoothed or fixed",
)


def _log_probs(args: Namespace, batch: HostBatch, logits: Tensor) -> list[Tensor]:
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs

    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    return found["log_probs"]


def _policy_loss(args: Namespace, batch: HostBatch, logits: Tensor, reducer: Reducer) -> LossAndMetrics:
    from slime.backends.megatron_utils.loss import policy_loss_function

    return policy_loss_function(args, batch, logits, reducer)


PATHS = FunctionPaths(SLIME, _log_probs, _policy_loss, sum_over_data_ranks, has_loss)
bapo_loss, before_train_step = PATHS.bapo_loss, PATHS.before_train_step
