"""Models that can be planned without their files: the config.json of each model in a shipped recipe.

An existing folder takes precedence over known_models.toml.
"""

import tomllib
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.hf.shape import load_hf_config, with_text_settings

_FILE = Path(__file__).with_name("known_models.toml")
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: with_text_settings(config) for name, config in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}


def known_config(path: str) -> dict[str, Any] | None:
    """Return the known config.json for a folder that is missing on this machine; None for an unknown name.

    Example: known_config("models/Qwen3-32B")["num_hidden_layers"] is 64.
    """
    folder = Path(path).expanduser()
    return None if folder.exists() else KNOWN_MODELS.get(folder.name)


_SOURCES = {
    "Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen2.5-1.5B-Instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen2.5-3B-Instruct": "Qwen/Qwen2.5-3B-Instruct",
    "DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "DeepSeek-R1-Distill-Qwen-7B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "DeepSeek-R1-Distill-Qwen-14B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "DeepSeek-R1-Distill-Qwen-32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "Qwen2.5-Math-7B": "Qwen/Qwen2.5-Math-7B",
    "OctoThinker-3B-Long-Zero": "OctoThinker/OctoThinker-3B-Long-Zero",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen3.5-9B": "Qwen/Qwen3.5-9B",
    "Qwen3.5-27B": "Qwen/Qwen3.5-27B",
    "Qwen3.5-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Llama-3.3-70B-Instruct": "meta-llama/Llama-3.3-70B-Instruct",
}


def origin(path: str) -> str:
    """Say how to get a known model that is missing on this machine; empty for an unknown one, or a name on the hub."""
    name = Path(path).name
    if name == "Qwen3-32B-64k":
        edited = 'set "max_position_embeddings": 65536 and "rope_scaling" of YaRN in config.json: recipes/qwen3-32b-64k'
        return f"`hf download Qwen/Qwen3-32B --local-dir {path}`, then {edited}"
    if name == "Qwen2.5-Math-7B-64k":
        return "it is your own long-context tuning of Qwen/Qwen2.5-Math-7B"
    source = _SOURCES.get(name, path)
    return f"`hf download {source} --local-dir {path}`" if source != path else ""


def planned_config(path: str, setting: str = "model.path") -> dict[str, Any]:
    """Return the config.json of a model that `setting` names, from its folder or `KNOWN_MODELS`.

    Raises:
        CheckpointError: neither has it.
    """
    return known_config(path) or load_hf_config(resolve_model_path(path, setting=setting, config_only=True))
