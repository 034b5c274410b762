"""Models that can be planned without their files: the config.json of published models.

An existing folder takes precedence over known_models.toml.
"""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import shipped_configs, split_arguments
from bapo_megatron.errors import ConfigError, closest, did_you_mean
from bapo_megatron.hf.families.settings import with_text_settings
from bapo_megatron.hf.shape import load_hf_config

_FILE = Path(__file__).with_name("known_models.toml")
_PUBLISHED: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
_HUB = {name.rpartition("/")[2]: name for name in _PUBLISHED}
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: with_text_settings({key: None if value == "none" else value for key, value in _PUBLISHED[hub].items()})
    for name, hub in _HUB.items()
}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the known config.json for a folder that is missing on this machine; None for an unknown name.

    Example: known_config("models/Qwen3-32B")["num_hidden_layers"] is 64.
    """
    return None if os.path.exists(os.path.expanduser(path)) else KNOWN_MODELS.get(Path(path).name)


def with_model(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `bapo plan` with settings in place of a model: a published one's name, or a folder.

    Example: ["Qwen3-8B", "clusters/1x8-h100"] becomes ["clusters/1x8-h100", 'model.path="Qwen/Qwen3-8B"',
    "model.dtype=bfloat16"], the type of published weights. Settings in `arguments` win over these.

    Raises:
        ConfigError: there are two models, or an argument is neither a model nor a configuration.
    """
    files, settings = split_arguments(arguments)
    models = [text for text in files if not os.path.isfile(text) and text not in shipped_configs() and _is_model(text)]
    if not models:
        return list(arguments)
    if len(models) > 1:
        raise ConfigError(f"a plan is for one model, and these are {len(models)}: {', '.join(models)}")
    path = _HUB.get(models[0], models[0])
    others = [text for text in files if text not in models]
    return [*others, f"model.path={json.dumps(path)}", "model.dtype=bfloat16", *settings]


def _is_model(text: str) -> bool:
    """Return whether `text` names a model; False if it may be meant as a configuration. Raises: see `with_model`."""
    if os.path.isfile(os.path.join(text, "config.json")) or known_config(text) is not None:
        return True
    close = closest(text, [*shipped_configs(), *KNOWN_MODELS, *_HUB.values()])
    is_file = text.endswith(".toml") or os.path.isfile(f"{text}.toml")
    if is_file or any(name in shipped_configs() for name in close):
        return False
    if os.path.isdir(text):
        raise ConfigError(f"the folder {text} has no config.json, from which a plan takes the model's sizes")
    advice = did_you_mean(*close) or f"the models are {', '.join(sorted(KNOWN_MODELS))}."
    raise ConfigError(
        f"{text} is neither a configuration nor a model that is known by its name; {advice} For any other model, give "
        "a folder with its config.json"
    )


def origin(path: str) -> str:
    """Say how to get a known model that is missing on this machine; empty for an unknown one, or a name on the hub."""
    name = Path(path).name
    if name == "Qwen3-32B-64k":
        edited = 'set "max_position_embeddings": 65536 and "rope_scaling" of YaRN in config.json: recipes/qwen3-32b-64k'
        return f"`hf download Qwen/Qwen3-32B --local-dir {path}`, then {edited}"
    if name == "Qwen2.5-Math-7B-64k":
        return "it is your own long-context tuning of Qwen/Qwen2.5-Math-7B"
    source = _HUB.get(name, path)
    return f"`hf download {source} --local-dir {path}`" if source != path else ""


def planned_config(path: str, setting: str = "model.path") -> dict[str, Any]:
    """Return the config.json of a model that `setting` names, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it.
    """
    return known_config(path) or load_hf_config(resolve_model_path(path, setting=setting, config_only=True))
