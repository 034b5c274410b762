"""From a judge's verdict to the reward that advantages are made of, and whether a group teaches anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bapo_megatron.config import dotted
from bapo_megatron.rewards.scaling import bounded

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.types import Group, Trajectory


def shaped_reward(trajectory: Trajectory, config: Config) -> float:
    """The verdict less the penalty for length: DAPO's soft over-long punishment, arXiv 2503.14476, Eq. 13.

    The penalty grows linearly from 0 to reward.overlong_penalty over the last reward.overlong_buffer_tokens before
    rollout.max_response_tokens; a truncated response gets all of it. `Trajectory.reward` keeps the verdict.
    Example: limit 100, buffer 20, penalty 1: 80 tokens cost 0, 90 cost 0.5, a truncated response 1.
    """
    assert trajectory.reward is not None, f"{trajectory.sample_id} has no verdict"
    penalty, buffer = config.reward.overlong_penalty, config.reward.overlong_buffer_tokens
    if trajectory.finish_reason == "length":
        return trajectory.reward - penalty
    num_left = config.rollout.max_response_tokens - trajectory.num_response_tokens
    if num_left >= buffer:
        return trajectory.reward
    return trajectory.reward - penalty * min(1.0, (buffer - num_left) / buffer)


def is_trained(trajectory: Trajectory, config: Config) -> bool:
    """Whether the response's tokens count in the loss: not those of a truncated one with rollout.truncated = "mask"."""
    return not (config.rollout.truncated == "mask" and trajectory.finish_reason == "length")


def is_informative(group: Group, config: Config) -> bool:
    """Whether a scored group can change the policy: its shaped rewards differ, and it has a token that is trained.

    DAPO's dynamic sampling, arXiv 2503.14476, section 3.2, drops the others (rollout.keep_group = "informative").
    Rewards that reward.clip makes equal do not differ; with reward.running_std that shows when the batch is made.
    """
    if not any(t.num_response_tokens and is_trained(t, config) for t in group.trajectories):
        return False
    rewards = [shaped_reward(t, config) for t in group.trajectories]
    if config.reward.clip is not None and not config.reward.running_std:
        rewards = [bounded(config.reward.scale * reward, config.reward.clip) for reward in rewards]
    return len(set(rewards)) > 1


def keep_all(group: Group, config: Config) -> bool:
    """Keep every group."""
    return True


KEEP_GROUP: dict[str, Callable[[Group, Config], bool]] = {"all": keep_all, "informative": is_informative}
"""Built-in filters of scored groups by `rollout.keep_group`."""


def group_filter(config: Config) -> Callable[[Group], bool]:
    """Return the test that decides whether a scored group is kept. Raises UserError for a bad dotted path."""
    name = config.rollout.keep_group
    keep = KEEP_GROUP.get(name) or dotted.KEEP_GROUP.load(name)
    return lambda group: bool(keep(group, config))
