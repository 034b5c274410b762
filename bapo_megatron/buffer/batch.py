"""Judged groups become one padding-free batch."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.advantages import advantages_of, whiten
from bapo_megatron.config.schema import Config, MixedSource
from bapo_megatron.rewards.shaping import MomentsState, RewardScaler, is_trained, shaped_reward
from bapo_megatron.types import Batch, Group


class BuilderState(TypedDict):
    """A `BatchBuilder` in a checkpoint."""

    rewards: MomentsState


class BatchBuilder:
    """Builder of a run's batches, with its advantages, rewards and masking."""

    def __init__(self, config: Config) -> None:
        self._config = config
        a = config.advantage
        self._advantages = advantages_of(a.kind) if a.compares_responses else torch.zeros_like  # a critic's come later
        self._scaler = RewardScaler(config.reward)

    def build(self, groups: Sequence[Group], metrics: dict[str, float]) -> Batch:
        """Return the next step's batch, with `batch_metrics`; its rewards enter running statistics: build it once.

        Each response has one advantage, spread over its tokens. A response without a token is left out, and the tokens
        of one that is not trained (see `is_trained`) are masked; both still count in their group's advantages.
        """
        config = self._config
        shaped = [[shaped_reward(t, config) for t in group.trajectories] for group in groups]
        rewards, reward_metrics = self._scaler.scaled(shaped)
        rewards_of = [torch.tensor(values, dtype=torch.float64) for values in rewards]
        rewards_S = torch.cat(rewards_of)
        advantages_S = torch.cat([self._advantages(rewards_G) for rewards_G in rewards_of])
        if config.advantage.whiten_batch:
            advantages_S = whiten(advantages_S)
        trajectories = [t for group in groups for t in group.trajectories]
        has_tokens_S = torch.tensor([t.num_response_tokens > 0 for t in trajectories], dtype=torch.bool)
        advantages_S = advantages_S[has_tokens_S].float()
        trajectories = [t for t in trajectories if t.num_response_tokens]
        prompt_lens = torch.tensor([len(t.prompt.token_ids) for t in trajectories], dtype=torch.int64)
        response_lens = torch.tensor([t.num_response_tokens for t in trajectories], dtype=torch.int64)
        part_lens = torch.stack([prompt_lens, response_lens], 1).flatten()
        is_response_T = torch.tensor([False, True]).repeat(len(trajectories)).repeat_interleave(part_lens)
        num_tokens = is_response_T.numel()

        def on_responses(values_R: Tensor, dtype: torch.dtype, prompt: float) -> Tensor:
            out_T = torch.full((num_tokens,), prompt, dtype=dtype)
            out_T[is_response_T] = values_R.to(dtype)
            return out_T

        segments = [s for t in trajectories for s in t.segments]
        segment_lens = torch.tensor([len(s.token_ids) for s in segments], dtype=torch.int64)
        versions_R = torch.tensor([s.version for s in segments], dtype=torch.int64).repeat_interleave(segment_lens)
        is_trained_S = torch.tensor([is_trained(t, config) for t in trajectories], dtype=torch.bool)
        return Batch(
            token_ids_T=_joined(
                (ids for t in trajectories for ids in (t.prompt.token_ids, *(s.token_ids for s in t.segments))),
                np.int64,
            ),
            seq_lens_S=prompt_lens + response_lens,
            prompt_lens_S=prompt_lens,
            advantages_T=on_responses(advantages_S.repeat_interleave(response_lens), torch.float32, 0.0),
            behaviour_logprobs_T=on_responses(
                _joined((s.behaviour_logprobs for s in segments), np.float64), torch.float32, 0.0
            ),
            versions_T=on_responses(versions_R, torch.int64, -1),
            mask_T=on_responses(is_trained_S.repeat_interleave(response_lens), torch.bool, 0.0),
            rewards_S=rewards_S[has_tokens_S].float(),
            metrics=batch_metrics(groups) | source_metrics(groups, config.data.sources) | metrics | reward_metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics, as a JSON value."""
        return {"rewards": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state["rewards"])


def _joined(parts: Iterable[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype))


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards, lengths and shares of one step's judged groups, under the names of docs/metrics.md."""
    samples = [t for g in groups for t in g.trajectories]
    lengths = [t.num_response_tokens for t in samples]
    rewards = [r for g in groups for r in g.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_samples": float(len(samples)),
        "rollout/response_tokens_mean": statistics.fmean(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(t.finish_reason == "length" for t in samples) / len(samples),
        "rollout/resumed_token_share": sum(t.num_resumed_tokens for t in samples) / max(sum(lengths), 1),
        "rollout/zero_variance_share": sum(len(set(g.rewards)) == 1 < len(g.rewards) for g in groups) / len(groups),
    }


def source_metrics(groups: Sequence[Group], sources: Sequence[MixedSource]) -> dict[str, float]:
    """Return the share of each of [[data.sources]] in one step's prompts, and its mean reward, nan without a prompt."""
    metrics: dict[str, float] = {}
    for one in sources:
        rewards = [group.rewards for group in groups if group.prompt.source == one.name]
        metrics[f"data/{one.name}/prompt_share"] = len(rewards) / len(groups)
        metrics[f"data/{one.name}/reward"] = statistics.fmean(chain(*rewards)) if rewards else math.nan
    return metrics
