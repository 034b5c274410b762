"""Value-based advantages in the training loop: an advantage for each token of a batch.

Batch -> critic.values (no gradient, all micro-batches) -> one all-reduce: V of every sampled token, on every rank
      -> algorithms/gae.py -> token advantages, and returns -> the critic's own updates towards the returns
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.algorithms.gae import explained_variance, gae, n_step, td_errors, whitened
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.buffer.packing import Pass
from bapo_megatron.config.base import refuse
from bapo_megatron.config.schema import AdvantageConfig
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.critic import Critic
from bapo_megatron.learner.fit import check_critic_model
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import of_batch, update_pass
from bapo_megatron.metrics import reduce_updates
from bapo_megatron.resolved import Resolved
from bapo_megatron.types import Batch


class ValueAdvantages:
    """The critic, and token advantages, for each `advantage.kind` that needs a critic. Collective.

    The group-relative kinds have no critic and leave batches as they are.

    Args:
        policy: the policy, already constructed; the critic starts from its weights unless critic.path is set.

    Raises:
        ConfigError: critic.path is a model that does not fit the layout, or whose vocabulary is smaller.
        CheckpointError: critic.path cannot be read.
    """

    def __init__(self, run: Resolved, policy: MegatronLearner) -> None:
        self._config = config = run.config
        self.critic: Critic | None = None
        if not config.advantage.compares_responses and not config.train.rollout_only:
            assert run.model is not None, "the policy has been loaded from it"
            start, path = run.model, config.critic.path
            if path is not None:
                start = ModelFacts.of(resolve_model_path(path, setting="critic.path"), run.own)
                refuse(check_critic_model(config, start, run.model))
            self.critic = Critic(config, start, policy.local_time)

    @property
    def parts(self) -> dict[str, Critic]:
        """The models that a checkpoint holds besides the learner, by folder name."""
        return {} if self.critic is None else {"critic": self.critic}

    def on(self, batch: Batch, step: int) -> Batch:
        """Add advantages and critic metrics to the batch, and train the critic on it.

        A batch without trained tokens stays as it is.
        """
        if self.critic is None or not batch.num_trained_tokens:
            return batch
        values_T = of_batch(batch, self.critic.values, self.critic, self._config).cpu()
        advantages_T, returns_T = token_advantages(batch, values_T, self._config.advantage)
        values, returns, advantages = (x_T[batch.mask_T] for x_T in (values_T, returns_T, advantages_T))
        metrics = {  # over the trained tokens, before the critic learns from them
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": float(values.mean()),
            "critic/return_mean": float(returns.mean()),
            "critic/advantage_std": float(advantages.std(correction=0)),
        }
        metrics |= self._fit(self.critic, batch, step, values_T, returns_T)
        if self._config.advantage.whiten_tokens:
            advantages_T = whitened(advantages_T, batch.mask_T)
        return replace(batch, advantages_T=batch.here(advantages_T.float()), metrics=batch.metrics | metrics)

    def passes(self, step: int) -> list[Pass]:
        """Return the passes that `on` makes over a batch."""
        if self.critic is None:
            return []
        return [
            Pass(self.critic.share, self._config.train.max_tokens_per_microbatch),
            self._updates(self.critic, step),
        ]

    def _updates(self, critic: Critic, step: int) -> Pass:
        return update_pass(self._config, step, critic.share, self._config.critic.epochs_per_step)

    def _fit(self, critic: Critic, batch: Batch, step: int, values_T: Tensor, returns_T: Tensor) -> dict[str, float]:
        """Make the critic's updates of one step, and return their metrics."""
        collected: dict[str, list[float]] = defaultdict(list)
        for minibatch in self._updates(critic, step).minibatches(batch):
            for name, value in critic.fit(minibatch, values_T, returns_T).items():
                collected[name].append(value)
        critic.take_times()  # only the policy's times are reported
        return reduce_updates(collected)


def token_advantages(batch: Batch, values_T: Tensor, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compute sampled tokens' unwhitened advantages and returns (advantage + value), float64 [T], 0 on other tokens."""
    assert batch.rewards_S is not None
    values_R = values_T[batch.sampled_T]
    errors_R, num_left_R = td_errors(batch.rewards_S, values_R, batch.num_sampled_S, gamma=config.gamma)
    if config.kind == "gae":
        advantages_R = gae(errors_R, num_left_R, gamma=config.gamma, lam=config.lam)
    else:
        advantages_R = n_step(errors_R, num_left_R, gamma=config.gamma, num_steps=config.n_step)
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages_T[batch.sampled_T], returns_T[batch.sampled_T] = advantages_R, advantages_R + values_R
    return advantages_T, returns_T
