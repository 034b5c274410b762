"""From shaped rewards to those that advantages are made of: scaled, and bounded.

    scaled = clip(reward.scale x shaped / std, -reward.clip, reward.clip)

std is 1, or with `reward.running_std` the standard deviation of all shaped rewards so far: the reward scaling that PPO
implementations do with discounted returns (arXiv 2005.12729, section 3; here a response is one step, its return the
reward). No mean is taken off, so that a reward keeps its sign; advantages take off the group's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapo_megatron.config.schema import RewardConfig

_EPSILON = 1e-8  # added to the variance, as PPO implementations do: all rewards equal is no division by 0


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared distances from the mean, of some numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_more(self, values: Sequence[float]) -> Moments:
        """Those of all together: Chan, Golub & LeVeque's pairwise update, which loses no digits to large means."""
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
        """Of the whole, divisor `count`; nan for none."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan


class RewardScaler:
    """Scales the rewards of one batch after the other; its statistics are saved with the run."""

    def __init__(self, settings: RewardConfig) -> None:
        self._settings = settings
        self._moments = Moments()

    def scaled(self, groups: Sequence[Sequence[float]]) -> tuple[list[list[float]], dict[str, float]]:
        """The scaled rewards of a batch, group by group, and metrics. The batch's own rewards count in the statistics.

        Args:
            groups: shaped rewards, each finite.
        """
        settings, std, metrics = self._settings, 1.0, {}
        if settings.running_std:
            self._moments = self._moments.with_more([reward for group in groups for reward in group])
            std = math.sqrt(self._moments.std**2 + _EPSILON) if self._moments.count else 1.0
            metrics["reward/running_std"] = self._moments.std
        unbounded = [[settings.scale * reward / std for reward in group] for group in groups]
        if settings.clip is None:
            return unbounded, metrics
        num_clipped = sum(abs(reward) > settings.clip for group in unbounded for reward in group)
        metrics["reward/clipped_share"] = num_clipped / max(sum(map(len, groups)), 1)
        return [[bounded(reward, settings.clip) for reward in group] for group in unbounded], metrics

    def state_dict(self) -> dict[str, Any]:
        """JSON value; floats survive JSON bit for bit."""
        moments = self._moments
        return {"count": moments.count, "mean": moments.mean, "squares": moments.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = Moments(**state)


def bounded(reward: float, limit: float) -> float:
    return min(max(reward, -limit), limit)
