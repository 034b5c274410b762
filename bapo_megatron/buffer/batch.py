"""From finished groups to one padding-free batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from bapo_megatron.algorithms.advantages import ADVANTAGES
from bapo_megatron.config.schema import Config
from bapo_megatron.rewards.shaping import is_trained, shaped_reward
from bapo_megatron.types import Batch, Group, Trajectory


def batch_builder(config: Config) -> Callable[[Sequence[Group], dict[str, float]], Batch]:
    """`build_batch` with the advantages, reward shaping and masking of a run."""

    def build(groups: Sequence[Group], metrics: dict[str, float]) -> Batch:
        return build_batch(
            groups,
            ADVANTAGES.get(config.advantage.kind, torch.zeros_like),  # a critic's come later, from `rewards_S`
            metrics,
            reward_of=lambda trajectory: shaped_reward(trajectory, config),
            is_trained=lambda trajectory: is_trained(trajectory, config),
        )

    return build


def build_batch(
    groups: Sequence[Group],
    advantages: Callable[[Tensor], Tensor],
    metrics: dict[str, float] | None = None,
    *,
    reward_of: Callable[[Trajectory], float] | None = None,
    is_trained: Callable[[Trajectory], bool] = lambda trajectory: True,
) -> Batch:
    """Pack all responses of all groups, with one advantage per response spread over its tokens.

    A response without a single token carries nothing to learn from and is left out.

    Args:
        advantages: maps the rewards of one group, float64 [G], to advantages [G] (see algorithms.advantages).
        reward_of: what advantages are made of (see rewards.shaping.shaped_reward); the verdict where left out.
        is_trained: False for a response that counts in its group's advantages, but whose tokens are masked.
    """
    per_sequence: list[float] = []
    kept_rewards: list[float] = []
    trajectories = []
    for group in groups:
        rewards = [reward_of(t) for t in group.trajectories] if reward_of else group.rewards
        values = advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
        for trajectory, reward, value in zip(group.trajectories, rewards, values, strict=True):
            if trajectory.num_response_tokens:
                trajectories.append(trajectory)
                kept_rewards.append(reward)
                per_sequence.append(value)
    prompt_lens = torch.tensor([len(t.prompt.token_ids) for t in trajectories], dtype=torch.int64)
    response_lens = torch.tensor([t.num_response_tokens for t in trajectories], dtype=torch.int64)
    is_response_T = torch.repeat_interleave(
        torch.tensor([False, True]).repeat(len(trajectories)), torch.stack([prompt_lens, response_lens], 1).flatten()
    )
    num_tokens = is_response_T.numel()

    def on_responses(values: Sequence[float] | Sequence[int] | Tensor, dtype: torch.dtype, prompt: float) -> Tensor:
        out_T = torch.full((num_tokens,), prompt, dtype=dtype)
        out_T[is_response_T] = torch.as_tensor(values, dtype=dtype)
        return out_T

    is_trained_S = torch.tensor([is_trained(t) for t in trajectories], dtype=torch.bool)
    advantages_S = torch.tensor(per_sequence, dtype=torch.float32)
    return Batch(
        token_ids_T=torch.tensor(
            [i for t in trajectories for i in (*t.prompt.token_ids, *t.response_ids)], dtype=torch.int64
        ),
        seq_lens_S=prompt_lens + response_lens,
        prompt_lens_S=prompt_lens,
        advantages_T=on_responses(advantages_S.repeat_interleave(response_lens), torch.float32, 0.0),
        behaviour_logprobs_T=on_responses(
            list(chain.from_iterable(t.behaviour_logprobs for t in trajectories)), torch.float32, 0.0
        ),
        versions_T=on_responses(list(chain.from_iterable(t.versions for t in trajectories)), torch.int64, -1),
        mask_T=on_responses(is_trained_S.repeat_interleave(response_lens), torch.bool, 0.0),
        rewards_S=torch.tensor(kept_rewards, dtype=torch.float32),
        metrics=metrics or {},
    )
