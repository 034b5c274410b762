"""Value-based advantages in the training loop: an advantage for each token of a batch.

Batch -> critic.values (no gradient, all micro-batches) -> one all-reduce: V of every response token, on every rank
      -> algorithms/gae.py -> token advantages, and returns -> the critic's own updates towards the returns
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from bapo_megatron.algorithms.gae import explained_variance, gae, n_step, td_errors, whitened
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.buffer.packing import minibatches
from bapo_megatron.config.schema import AdvantageConfig, Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.learner.critic import Critic
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import of_batch
from bapo_megatron.metrics import reduce_updates
from bapo_megatron.types import Batch


class ValueAdvantages:
    """Token advantages for the kinds of `advantage.kind` that need a critic, and that critic. Collective.

    The group-relative kinds have no critic and leave batches as they are.

    Args:
        policy: already constructed; the critic starts from its weights unless critic.path is set.

    Raises:
        ConfigError: critic.path is a model that the layout does not fit, or whose vocabulary is smaller.
        CheckpointError: critic.path cannot be read.
    """

    def __init__(self, config: Config, policy: MegatronLearner) -> None:
        self._config = config
        self.critic: Critic | None = None
        if not config.advantage.compares_responses and not config.train.rollout_only:
            path = config.critic.path
            self.critic = Critic(config, resolve_model_path(path, setting="critic.path") if path else policy.hf_path)
            num_critic, num_policy = self.critic.shape.vocab_size, policy.shape.vocab_size
            if num_critic < num_policy:
                raise ConfigError(
                    f"critic.path={str(self.critic.hf_path)!r} has a vocabulary of {num_critic} tokens, the policy one "
                    f"of {num_policy}: set it to a model of the policy's family, or leave it out"
                )

    @property
    def parts(self) -> dict[str, Critic]:
        """Models that a checkpoint holds beside the learner, by folder name."""
        return {} if self.critic is None else {"critic": self.critic}

    def on(self, batch: Batch, step: int) -> Batch:
        """Return the batch with its tokens' advantages and the critic's metrics, and let the critic learn from it.

        A batch without any trained token stays as it is.
        """
        if self.critic is None or not batch.num_trained_tokens:
            return batch
        values_T = of_batch(batch, self.critic.values, self.critic, self._config).cpu()
        advantages_T, returns_T = token_advantages(batch, values_T, self._config.advantage)
        values, returns, advantages = (x_T[batch.mask_T] for x_T in (values_T, returns_T, advantages_T))
        metrics = {  # of the trained tokens, before the critic learns from them
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": float(values.mean()),
            "critic/return_mean": float(returns.mean()),
            "critic/advantage_std": float(advantages.std(correction=0)),
        }
        metrics |= self._fit(self.critic, batch, step, values_T, returns_T)
        if self._config.advantage.whiten_tokens:
            advantages_T = whitened(advantages_T, batch.mask_T)
        return replace(batch, advantages_T=advantages_T.float(), metrics=batch.metrics | metrics)

    def _fit(self, critic: Critic, batch: Batch, step: int, values_T: Tensor, returns_T: Tensor) -> dict[str, float]:
        """Make the critic's updates of one step, and return their metrics."""
        collected: dict[str, list[float]] = defaultdict(list)
        for minibatch in minibatches(
            batch,
            num_minibatches=self._config.train.minibatches_per_step,
            num_epochs=self._config.critic.epochs_per_step,
            seed=self._config.run.seed * 1_000_003 + step,
            max_tokens=self._config.train.max_tokens_per_microbatch,
            share=critic.share,
        ):
            for name, value in critic.fit(minibatch, values_T, returns_T).items():
                collected[name].append(value)
        critic.take_times()  # only the policy's are reported
        return reduce_updates(collected)


def token_advantages(batch: Batch, values_T: Tensor, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compute unwhitened advantages and returns (advantage + value) of response tokens; float64 [T], 0 on prompts."""
    assert batch.rewards_S is not None
    errors_T, num_left_T = td_errors(
        batch.rewards_S, values_T, batch.seq_lens_S, batch.prompt_lens_S, gamma=config.gamma
    )
    if config.kind == "gae":
        advantages_T = gae(errors_T, num_left_T, gamma=config.gamma, lam=config.lam)
    else:
        advantages_T = n_step(errors_T, num_left_T, gamma=config.gamma, num_steps=config.n_step)
    return advantages_T, torch.where(num_left_T > 0, advantages_T + values_T, 0.0)
