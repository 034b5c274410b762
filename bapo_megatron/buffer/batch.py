"""Turns judged groups into one batch without padding."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from bapo_megatron.algorithms.advantages import GroupView, SampleView, has_spread, whiten
from bapo_megatron.algorithms.gae import whitened
from bapo_megatron.config.advantages import advantage_function
from bapo_megatron.config.schema import AdvantageConfig, Config, MixedSource, TeacherConfig
from bapo_megatron.errors import UserError
from bapo_megatron.rewards.shaping import MomentsState, RewardScaler, is_trained, shaped_reward
from bapo_megatron.tokens import BEHAVIOUR_LOGPROBS, CORE_STREAMS, TOKEN_IDS, VERSIONS, TokenStream
from bapo_megatron.types import Batch, Ended, Group, Sample, Sampled, Segment, total


class BuilderState(TypedDict):
    """The state of a `BatchBuilder` in a checkpoint."""

    rewards: MomentsState


class BatchBuilder:
    """Builder of a run's batches, with the run's advantages, rewards and masking."""

    def __init__(self, config: Config) -> None:
        self._config = config
        a = config.advantage
        # a critic's and a teacher's advantages come later
        self._advantages = advantage_function(a.kind) if a.compares_responses and a.reads_rewards else _zeros
        self._scaler = RewardScaler(config.reward)

    def build(self, groups: Sequence[Group], metrics: dict[str, float]) -> Batch:
        """Return the next step's batch, with `batch_metrics`. Build it once: its rewards enter running statistics.

        Each turn of a sample has one advantage, spread over its tokens. Each trajectory becomes a sequence; one without
        a sampled token is left out. Tokens of a sample that is not trained (see `is_trained`) are masked. Both still
        count in their group's advantages. An invalid sample does not count in them either.

        Raises UserError for a verdict that advantage.kind cannot use, and for a source without a teacher.
        """
        config, method = self._config, self._config.advantage
        _check_verdicts(groups, method, config.reward.weights)
        shaped = [[shaped_reward(s, config) for s in group.valid] for group in groups]
        rewards, reward_metrics = self._scaler.scaled(shaped)
        factor = self._scaler.factor
        views = [group_view(group, values, config, factor) for group, values in zip(groups, rewards, strict=True)]
        turn_lens = torch.tensor([n for view in views for sample in view.samples for n in sample.turn_lengths])
        of_turns = [x for view in views for values in self._advantages(view) for x in values]
        advantages = torch.tensor(of_turns, dtype=torch.float64)
        if method.whitens == "responses":
            advantages = whiten(advantages, is_centred=method.is_centred)
        samples = [sample for group in groups for sample in group.valid]
        places = [i for i, sample in enumerate(samples) for t in sample.trajectories if t.num_sampled_tokens]
        trajectories = [t for sample in samples for t in sample.trajectories if t.num_sampled_tokens]
        segments = [s for t in trajectories for s in t.segments]
        origins = [s.origin for s in segments]
        num_tokens = torch.tensor([s.num_tokens for s in segments], dtype=torch.int64)
        is_sampled = torch.tensor([isinstance(origin, Sampled) for origin in origins], dtype=torch.bool)
        versions = [o.version if isinstance(o, Sampled) else VERSIONS.filler for o in origins]
        versions_T = torch.tensor(versions, dtype=torch.int64).repeat_interleave(num_tokens)
        seq_lens_S = torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64)
        sampled_T = is_sampled.repeat_interleave(num_tokens)
        is_trained_S = torch.tensor([is_trained(samples[i], config) for i in places], dtype=torch.bool)
        of_samples = [reward for values in rewards for reward in values]
        rewards_S = torch.tensor([of_samples[i] for i in places], dtype=torch.float64)
        mask_T = sampled_T & is_trained_S.repeat_interleave(seq_lens_S)
        advantages_R = advantages.repeat_interleave(turn_lens)
        if method.is_per_token:  # the reward comes with the last token
            num_later = [torch.arange(t.num_sampled_tokens).flip(0) for t in trajectories]
            advantages_R = advantages_R * method.gamma ** torch.cat([turn_lens[:0], *num_later]).double()
        advantages_T = torch.zeros(sampled_T.numel(), dtype=torch.float64).masked_scatter(sampled_T, advantages_R)
        if method.whitens == "tokens":
            advantages_T = whitened(advantages_T, mask_T)
        core: dict[TokenStream, Tensor] = {}
        extra: dict[TokenStream, Tensor] = {}
        for stream in dict.fromkeys([TOKEN_IDS, BEHAVIOUR_LOGPROBS, *(stream for s in segments for stream in s.rows)]):
            (extra if stream not in CORE_STREAMS else core)[stream] = _on_tokens(stream, segments)
        teacher_S = _teachers(samples, config.teacher)
        prompt_S, shared_lens_S = _prompts(groups, has_fed_rows=any(stream.on == "fed" for stream in extra))
        metrics = (
            batch_metrics(groups)
            | (turn_metrics(groups) if config.environment.is_used else {})
            | source_metrics(groups, config.data.sources)
            | metrics
            | reward_metrics
        )
        return Batch(
            token_ids_T=core[TOKEN_IDS],
            seq_lens_S=seq_lens_S,
            sampled_T=sampled_T,
            advantages_T=advantages_T.float(),
            behaviour_logprobs_T=core[BEHAVIOUR_LOGPROBS],
            versions_T=versions_T,
            mask_T=mask_T,
            rewards_S=rewards_S.float(),
            prompt_S=prompt_S,
            shared_lens_S=shared_lens_S,
            teacher_S=None if teacher_S is None else teacher_S[places],
            extra=extra,
            metrics=metrics if config.reward.is_given else _without_rewards(metrics),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics as a JSON value."""
        return {"rewards": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state["rewards"])


def _prompts(groups: Sequence[Group], *, has_fed_rows: bool) -> tuple[Tensor, Tensor]:
    """Return the prompt of each sequence by number, and how many of its tokens all sequences of the prompt share.

    Args:
        has_fed_rows: a prompt's last token has a row that lies with the next token, which each sample has sampled
            itself; its version or server may be another one's.
    """
    numbers, lengths = [], []
    for number, group in enumerate(groups):
        for sample in group.valid:
            for trajectory in sample.trajectories:
                if trajectory.num_sampled_tokens:
                    first = trajectory.segments[0]
                    is_shared = first is group.prompt_segment or first == group.prompt_segment
                    numbers.append(number)
                    lengths.append(max(first.num_tokens - has_fed_rows, 0) if is_shared else 0)
    return torch.tensor(numbers, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)


def _teachers(samples: Sequence[Sample], teacher: TeacherConfig) -> Tensor | None:
    """Return which teacher in the trainer scores each sample, by its place in `TeacherConfig.paths`; None if all have
    the same. Raises UserError for a source without one."""
    paths, by_source = [*teacher.paths.values()], teacher.path_by_source
    if len(paths) < 2:
        return None
    if unknown := sorted({sample.prompt.source for sample in samples} - by_source.keys()):
        raise UserError(
            f"teacher.path_by_source has no model for {unknown[0]}, the source of some prompts; name one: "
            f"teacher.path_by_source.{unknown[0]}"
        )
    numbers = (paths.index(by_source[sample.prompt.source]) for sample in samples)
    return torch.tensor([*numbers], dtype=torch.int64)


def _check_verdicts(groups: Sequence[Group], method: AdvantageConfig, weights: Mapping[str, float]) -> None:
    """Raise UserError for a verdict that advantage.kind cannot use, whatever the others of its group are."""
    if not (method.needs_binary or method.reads_parts):
        return
    for sample in chain(*(group.valid for group in groups)):
        reward, parts = float(sample.reward or 0.0), sample.need.parts if isinstance(sample.need, Ended) else {}
        where = f'advantage.kind="{method.kind}", prompt {sample.prompt.prompt_id}'
        if method.needs_binary and has_spread(reward, 0.0) and has_spread(reward, 1.0):
            raise UserError(
                f"{where}: a response has the reward {reward:g}, and must have 0 or 1; let the judge return these, or "
                'set advantage.kind="grpo"'
            )
        summed = math.fsum(weights.get(name, 1.0) * part for name, part in parts.items())
        if method.reads_parts and has_spread(reward, summed):
            raise UserError(
                f"{where}: a response has the reward {reward:g}, and its parts add up to {summed:g}; let what gives "
                'rewards always return them as parts by name, or set advantage.kind="grpo"'
            )


def group_view(group: Group, rewards: Sequence[float], config: Config, factor: float) -> GroupView:
    """Return the view of a group that its advantage gets.

    Args:
        rewards: the rewards of its valid samples, shaped and scaled.
        factor: the scale of rewards, for the turns' own.
    """
    samples = (_sample_view(s, reward, factor) for s, reward in zip(group.valid, rewards, strict=True))
    return GroupView(group.prompt, tuple(samples), config.advantage.gamma, config.reward.weights)


def _sample_view(sample: Sample, reward: float, factor: float) -> SampleView:
    turn_lengths = tuple(len(turn) for trajectory in sample.trajectories for turn in trajectory.turns) or (0,)
    parts = sample.need.parts if isinstance(sample.need, Ended) else {}
    earlier = tuple(factor * total(r or 0.0) for r in sample.turn_rewards[: len(turn_lengths) - 1])
    return SampleView(reward, turn_lengths, sample.finish_reason, parts, earlier)


def _without_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the metrics of rewards, because nobody judges."""
    ends = ("/reward", "/zero_variance_share")
    return {name: x for name, x in metrics.items() if not (name.startswith("reward/") or name.endswith(ends))}


def _zeros(view: GroupView) -> list[list[float]]:
    return [[0.0] * len(sample.turn_lengths) for sample in view.samples]


def _on_tokens(stream: TokenStream, segments: Sequence[Segment]) -> Tensor:
    """Return the stream's rows for all tokens, [T, *shape], with the filler where a segment has none."""
    parts = (s.values[stream] if stream in s.values else stream.filled(s.num_tokens) for s in segments)
    return torch.from_numpy(np.concatenate([stream.filled(0), *parts]))


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards, lengths and shares of one step's judged groups, under their names in `bapo help metrics`."""
    samples = [s for g in groups for s in g.valid]
    lengths = [s.num_sampled_tokens for s in samples]
    rewards = [r for g in groups for r in g.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_samples": float(len(samples)),
        "rollout/response_tokens_mean": statistics.fmean(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "rollout/resumed_token_share": sum(s.num_resumed_tokens for s in samples) / max(sum(lengths), 1),
        "rollout/zero_variance_share": sum(
            len(g.rewards) > 1 and not has_spread(min(g.rewards), max(g.rewards)) for g in groups
        )
        / len(groups),
        **_part_means(samples),
    }


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return what one step's samples did with their environment, under the names in `bapo help metrics`."""
    samples = [s for g in groups for s in g.valid]
    trained = [t for s in samples for t in s.trajectories if t.num_sampled_tokens]
    num_turns = [sum(len(t.turns) for t in s.trajectories) for s in samples]
    num_sampled, num_forwarded = (
        sum(getattr(t, name) for t in trained) for name in ("num_sampled_tokens", "num_tokens")
    )
    return {
        "environment/turns_mean": statistics.fmean(num_turns),
        "environment/sequences_mean": len(trained) / len(samples),
        "environment/trained_per_forwarded": num_sampled / max(num_forwarded, 1),
        "environment/answered_share": sum(s.num_given_tokens > 0 for s in samples) / len(samples),
        "environment/given_tokens_mean": statistics.fmean(s.num_given_tokens for s in samples),
        "environment/turn_limit_share": sum(s.finish_reason == "turns" for s in samples) / len(samples),
        "environment/failed_samples": float(sum(len(g.samples) for g in groups) - len(samples)),
    }


def _part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each part of the reward over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, part in sample.need.parts.items() if isinstance(sample.need, Ended) else ():
            values[name].append(part)
    return {f"reward/{name}/mean": statistics.fmean(parts) for name, parts in values.items()}


def source_metrics(groups: Sequence[Group], sources: Sequence[MixedSource]) -> dict[str, float]:
    """Return each data source's share of one step's prompts and its mean reward, which is nan without a prompt."""
    metrics: dict[str, float] = {}
    for one in sources:
        rewards = [group.rewards for group in groups if group.prompt.source == one.name]
        metrics[f"data/{one.name}/prompt_share"] = len(rewards) / len(groups)
        metrics[f"data/{one.name}/reward"] = statistics.fmean(chain(*rewards)) if rewards else math.nan
    return metrics
