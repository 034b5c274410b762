"""Settings of earlier versions: a run's own config.toml is updated; for a user's file, errors say what to write."""

from collections.abc import Callable
from typing import Any

Path = tuple[str, ...]

_KEEP_GROUP = {"keep": "all", "drop": "informative"}

MOVED: dict[Path, Callable[[Any], str]] = {
    ("loss", "clip_higher"): lambda value: f'loss.name="grpo" with loss.clip_high={value}',
    ("rollout", "zero_variance"): lambda value: f'rollout.keep_group="{_KEEP_GROUP.get(value, "informative")}"',
}
"""Replacements of the moved settings, given their values."""

_OPTION = "write it into slurm.options, such as slurm.options=%s"
RETIRED: dict[str, tuple[Any, str]] = {
    "precision.amax_history": (1024, "leave it out"),
    "precision.margin": (0, "leave it out"),
    "slurm.partition": ("none", _OPTION % '["--partition=NAME"]'),
    "slurm.account": ("none", _OPTION % '["--account=NAME"]'),
    "slurm.qos": ("none", _OPTION % '["--qos=NAME"]'),
    "slurm.exclusive": (False, _OPTION % '["--exclusive", "--mem=0"]'),
    "monitor.wandb_entity": ("none", "set WANDB_ENTITY in the environment"),
    "monitor.wandb_mode": ("online", "set WANDB_MODE in the environment"),
}
"""Settings without a successor: the default, which an old file may still contain, and the advice for other values."""


def updated(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a config.toml that an earlier version wrote, as this version writes it; any other unchanged.

    Such a file is recognised by its [loss], which has the settings of all losses.
    """
    loss, rollout = table.get("loss"), table.get("rollout")
    if not isinstance(loss, dict) or not loss.keys() >= {"name", "clip_low", "clip_high", "clip_higher"}:
        return table
    loss = dict(loss)
    clip_higher = loss.pop("clip_higher")
    if loss["name"] == "clip_higher":
        loss |= {"name": "grpo", "clip_high": clip_higher}
    bounds = ("clip_low", "clip_high")
    unused = {"bapo": bounds, "sft": (*bounds, "dual_clip", "proximal", "importance_cap")}.get(loss["name"], ())
    table = table | {"loss": {key: value for key, value in loss.items() if key not in unused}}
    if isinstance(rollout, dict) and "zero_variance" in rollout:
        rollout = dict(rollout)
        rollout["keep_group"] = _KEEP_GROUP.get(rollout.pop("zero_variance"), "all")
        table["rollout"] = rollout
    return table
