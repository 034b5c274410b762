"""Rewards on their way from a judge's verdict to advantages: shaped for length, scaled, and bounded.

    scaled = clip(reward.scale x shaped / std, -reward.clip, reward.clip)

std is 1, or with `reward.running_std` the standard deviation of all shaped rewards so far. This is the reward scaling
of PPO implementations (arXiv 2005.12729, section 3), which divide by the standard deviation of discounted returns: a
response is one step, and its return is its reward. The mean is not subtracted, so a reward keeps its sign; advantages
subtract the group's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from bapo_megatron.algorithms.advantages import has_spread
from bapo_megatron.config import dotted
from bapo_megatron.types import Ended, Natural, Number

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config, RewardConfig
    from bapo_megatron.types import Group, Sample

_EPSILON = 1e-8  # added to the variance, as in PPO implementations: equal rewards must not cause a division by 0


def shaped_reward(sample: Sample, config: Config) -> float:
    """Subtract the length penalty from the verdict: DAPO's soft over-long punishment, arXiv 2503.14476, Eq. 13.

    The penalty grows linearly from 0 to reward.overlong_penalty over the last reward.overlong_buffer_tokens before
    rollout.max_response_tokens; a truncated response loses all of it. `Sample.reward` keeps the verdict.
    Example: limit 100, buffer 20, penalty 1: 80 tokens cost 0, 90 cost 0.5, a truncated response 1.
    """
    assert sample.reward is not None, f"{sample.sample_id} has no verdict"
    penalty, buffer = config.reward.overlong_penalty, config.reward.overlong_buffer_tokens
    if sample.finish_reason == "length":
        return sample.reward - penalty
    num_left = config.rollout.max_response_tokens - sample.num_sampled_tokens
    if num_left >= buffer:
        return sample.reward
    return sample.reward - penalty * min(1.0, (buffer - num_left) / buffer)


def is_trained(sample: Sample, config: Config) -> bool:
    """Return whether the response's tokens count in the loss; rollout.truncated = "mask" excludes truncated ones."""
    return not (config.rollout.truncated == "mask" and sample.finish_reason == "length")


def is_informative(group: Group, config: Config) -> bool:
    """Return whether a scored group can change the policy: it has tokens to train on, and its shaped rewards differ.

    rollout.keep_group = "informative" drops the others (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).
    Rewards that reward.clip makes equal do not differ, but with reward.running_std only the batch can tell. GDPO learns
    from groups in which any part differs.
    """
    if not any(s.num_sampled_tokens and is_trained(s, config) for s in group.valid):
        return False
    if config.advantage.reads_parts:
        parts = [s.need.parts for s in group.valid if isinstance(s.need, Ended)]
        columns = [[one.get(name, 0.0) for one in parts] for name in {*chain(*parts)}]
        return any(has_spread(min(column), max(column)) for column in columns)
    rewards = [shaped_reward(s, config) for s in group.valid]
    if config.reward.clip is not None and not config.reward.running_std:
        rewards = [bounded(config.reward.scale * reward, config.reward.clip) for reward in rewards]
    return has_spread(min(rewards), max(rewards))


FILTERS: dict[str, Callable[[Group, Config], bool]] = {
    "all": lambda group, config: True,
    "informative": is_informative,
}
"""Built-in filters of scored groups by `rollout.keep_group`."""


def group_filter(config: Config) -> Callable[[Group], bool]:
    """Return the predicate that decides whether to keep a scored group. Raises UserError for a bad dotted path."""
    name = config.rollout.keep_group
    keep = FILTERS.get(name) or dotted.KEEP_GROUP.load(name)
    return lambda group: bool(keep(group, config))


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared distances from the mean."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_more(self, values: Sequence[float]) -> Moments:
        """Return the combined moments, by Chan, Golub & LeVeque's update, which loses no digits to large means."""
        if not values:
            return self
        mean = math.fsum(values) / len(values)
        squares = math.fsum((x - mean) ** 2 for x in values)
        count, shift = self.count + len(values), mean - self.mean
        return Moments(
            count,
            self.mean + shift * len(values) / count,
            self.squares + squares + shift**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        """Standard deviation with divisor `count`, or nan if there are no values."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


class MomentsState(TypedDict):
    """The `Moments` of a `RewardScaler` in a checkpoint."""

    count: Natural
    mean: Number
    squares: Annotated[Number, Field(ge=0)]


class RewardScaler:
    """Scaling of the rewards of successive batches, with statistics that are saved with the run."""

    def __init__(self, settings: RewardConfig) -> None:
        self._settings = settings
        self._moments = Moments()

    @property
    def factor(self) -> float:
        """The scale of the latest batch's rewards, before reward.clip."""
        std = math.sqrt(self._moments.std**2 + _EPSILON) if self._moments.count else 1.0
        return self._settings.scale / std

    def scaled(self, groups: Sequence[Sequence[float]]) -> tuple[list[list[float]], dict[str, float]]:
        """Scale a batch's rewards by statistics that include them; return them by group, with metrics.

        Args:
            groups: the shaped rewards of each group, all finite.
        """
        settings, metrics = self._settings, {}
        if settings.running_std:
            self._moments = self._moments.with_more([reward for group in groups for reward in group])
            metrics["reward/running_std"] = self._moments.std
        unbounded = [[self.factor * reward for reward in group] for group in groups]
        if settings.clip is None:
            return unbounded, metrics
        num_clipped = sum(abs(reward) > settings.clip for group in unbounded for reward in group)
        metrics["reward/clipped_share"] = num_clipped / max(sum(map(len, groups)), 1)
        return [[bounded(reward, settings.clip) for reward in group] for group in unbounded], metrics

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value; JSON preserves floats bit for bit."""
        return asdict(self._moments)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._moments = Moments(**state)


def bounded(reward: float, limit: float) -> float:
    """Clip a reward to [-limit, limit]."""
    return min(max(reward, -limit), limit)
