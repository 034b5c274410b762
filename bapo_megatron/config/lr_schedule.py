"""The learning rate of every optimizer update: warm-up, then constant or falling to a floor.

A pure function of the number of updates attempted before, which is the learner's version, so a resumed run continues
exactly and nothing has to be saved. A skipped update (its gradient was not finite) counts too, so that the schedule
ends with the run.
"""

import math

from bapo_megatron.config.schema import Config, OptimizerConfig

LARGE_RATE = 0.02
"""The usual standard deviation of a model's first weights: an update of Adam moves each by about the rate."""


def planned_updates(config: Config) -> int:
    """Return `optimizer.total_updates`, or the updates of the whole run: steps x mini-batches x epochs."""
    train = config.train
    return config.optimizer.total_updates or train.num_steps * train.minibatches_per_step * train.epochs_per_step


def learning_rate(num_attempted: int, settings: OptimizerConfig, num_updates: int) -> float:
    """Return the rate of the update that follows `num_attempted` others.

    The first w = `warmup_updates` rise linearly, lr / w, 2 lr / w, ..., lr. From the last of these (the very first
    update if w = 0) to the last planned one, the rate stays (constant), or falls to lr x `min_lr_ratio` along a line or
    half a cosine (arXiv 1608.03983, Eq. 5, without restarts); there it stays.
    Example: w = 2, linear, 6 planned, floor 0: lr x (1/2, 1, 3/4, 1/2, 1/4, 0, 0, ...).

    Args:
        num_attempted: updates before this one, skipped ones included.
        num_updates: the result of `planned_updates`.
    """
    assert num_attempted >= 0, "updates are counted from 0"
    if num_attempted < settings.warmup_updates:
        return settings.lr * ((num_attempted + 1) / settings.warmup_updates)
    if settings.schedule == "constant":
        return settings.lr
    peak = max(settings.warmup_updates - 1, 0)
    progress = min(1.0, (num_attempted - peak) / max(num_updates - 1 - peak, 1))
    height = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * height)
