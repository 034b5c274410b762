"""Resuming a run: the steps it has done, the settings that may change, and the models that must not."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.assets import hub, model_folder
from bapo_megatron.config.changing import is_resumable, parts_left_by
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.hf.tokenizer import reads_clock
from bapo_megatron.runs.branching import branch_command, shown_changes, with_more_steps
from bapo_megatron.runs.steps import read_metrics

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config


def different_settings(old_text: str, new_text: str) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two TOML texts, as {"bapo.rho0": (0.4, 0.5)}; None means unset."""
    old, new = (_flatten(tomllib.loads(text)) for text in (old_text, new_text))
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def check_resumable(path: Path, config_text: str) -> None:
    """Refuse to mix two experiments in one folder. A run that has not finished a step may start over freely."""
    config_path = path / "config.toml"
    if not config_path.exists() or not has_results(path):
        return
    num_done, num_steps = num_steps_done(path), num_steps_planned(config_text)
    if num_steps is not None and num_done > num_steps:
        raise ConfigError(
            f"cannot resume the run {path}: it has done {plural(num_done, 'step')}, and train.num_steps is "
            f"{num_steps}. Set "
            f"train.num_steps to {num_done} or more, or choose another run.name."
        )
    changed = {
        key: values
        for key, values in different_settings(config_path.read_text(encoding="utf-8"), config_text).items()
        if not _is_newer(key, *values)
    }
    may_move = "model.path" if _trains_adapters(config_text) else None  # its weights are compared when it is read
    if different := {key: values for key, values in changed.items() if not is_resumable(key) and key != may_move}:
        lines = [f"  {shown_changes({key: values})}" for key, values in different.items()]
        raise ConfigError(
            f"cannot resume the run {path}: it was started with other settings (run -> now):\n"
            + "\n".join(lines)
            + "\nUse the run's settings, choose another run.name, or delete the folder to start over."
            + _how_to_branch(path, {key: new for key, (_, new) in changed.items()}, num_steps)
        )


def _trains_adapters(config_text: str) -> bool:
    return tomllib.loads(config_text).get("lora", {}).get("rank") is not None


def _how_to_branch(path: Path, values: Mapping[str, Any], num_steps: int | None) -> str:
    """Return the command that continues with other settings; "" without a checkpoint, or if it would be refused.

    A loss has settings of its own, so a new one leaves the former one's out. A run that is done needs more steps.
    """
    lost = {"run.dir", "run.name"} | {key for key, value in values.items() if value is None and "loss.name" in values}
    values = {key: value for key, value in values.items() if key not in lost}
    num_saved = num_steps_saved(path)
    if num_saved is None or any("weights" in parts_left_by(key) for key in values):
        return ""
    command = branch_command(path, with_more_steps(values, num_saved, num_steps))
    return f"\nTo continue from its latest checkpoint in a new run: {command}" if command else ""


def _is_newer(key: str, old: Any, new: Any) -> bool:
    """Return whether a setting is newer than the run and at its default, with which the run behaves as before."""
    from bapo_megatron.config import paths

    path = tuple(key.split("."))
    if old is not None or path not in paths.schema() or paths.accepts(path, type(None)):  # then `old` may mean "none"
        return False
    default = paths.schema()[path].get_default(call_default_factory=True)
    return bool(new == (list(default) if isinstance(default, tuple) else default))


def num_steps_planned(config_text: str) -> int | None:
    """Return train.num_steps from a configuration as TOML text, or None if it is not set."""
    return tomllib.loads(config_text).get("train", {}).get("num_steps")


def num_steps_saved(path: Path) -> int | None:
    """Return the step of the checkpoint that `latest` names, or None if that checkpoint is missing or incomplete."""
    with contextlib.suppress(OSError):
        named = re.fullmatch(r"step-(\d{6,18})", (path / "checkpoints" / "latest").read_text(errors="replace").strip())
        if named and (path / "checkpoints" / named[0] / "state.json").is_file():
            return int(named[1])
    return None


def steps_saved(path: Path) -> list[int]:
    """Return the steps of a run's checkpoints, ascending; a checkpoint may be torn."""
    named = (re.fullmatch(r"step-(\d{6,18})", one.name) for one in (path / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def num_steps_done(path: Path) -> int:
    """Return the number of steps that a resumed run need not repeat. Without any checkpoint, metrics.jsonl counts."""
    saved = num_steps_saved(path)
    if saved is not None or any((path / "checkpoints").glob("*")):
        return saved or 0
    rows = read_metrics(path / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def has_results(path: Path) -> bool:
    """Return whether the run has finished a step or saved a checkpoint."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def with_pins(config: Config) -> Config:
    """Download the models that are named on the Hugging Face hub, and pin their commits; pin the time that the chat
    template reads, if it reads one.

    A resumed run keeps what its config.toml says.

    Raises:
        CheckpointError: see `hub.snapshot`.
    """
    path = Path(config.run.dir) / config.run.name
    try:
        earlier = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a new run, or a bad folder, which RunDir.open will report
        earlier = {}

    def pinned(value: str, before: Any, setting: str) -> str:
        if not hub.is_hub_name(value) or hub.is_pinned(value):
            return value
        return hub.pin(before if str(before).startswith(f"{value}@") else value, setting=setting)

    for section, key in (("model", "path"), ("loss", "reference_path"), ("critic", "path"), ("teacher", "path")):
        value = getattr(getattr(config, section), key, None)
        if value is not None:
            found = pinned(value, earlier.get(section, {}).get(key), f"{section}.{key}")
            config = _with(config, section, key, found)
    before = earlier.get("teacher", {}).get("path_by_source", {})
    teachers = {
        name: pinned(value, before.get(name), f"teacher.path_by_source.{name}")
        for name, value in config.teacher.path_by_source.items()
    }
    config = _with(config, "teacher", "path_by_source", teachers)
    if not config.data.chat_template or config.data.template_time is not None:
        return config
    now = earlier.get("data", {}).get("template_time")
    if now is None and not has_results(path) and reads_clock(model_folder(config.model.path)):
        now = datetime.now().isoformat(timespec="seconds")
    return config.model_copy(update={"data": config.data.model_copy(update={"template_time": now})})


def _with(config: Config, section: str, key: str, value: Any) -> Config:
    """Return the configuration with another value of a setting."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
