"""The identity of a training run: equal code, settings and files make it the same run in every study."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bapo_megatron.assets import SHIPPED_MODELS, shipped_model_path
from bapo_megatron.checkpoint.folder import digest_of
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.runs.inputs import function_modules
from studies.code import code_here

_MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model")  # settings, weights, tokenizer


def run_name(config: Config) -> str:
    """Return 16 hex digits that identify a run.

    They depend on all settings (including defaults) except run.name and run.dir, on the code (code.py), and on the
    content of the models, data files and functions that the settings name.

    Raises:
        ConfigError: such a file cannot be read. A missing file counts as empty; checks.py reports it.
    """
    identity = {
        "code": code_here(),
        "settings": config.model_dump(mode="json", exclude={"run": {"name", "dir"}}),
        "files": {setting: _digests(path) for setting, path in inputs(config)},
        "modules": {name: [*map(_digests, files)] for name, files in function_modules(config).items()},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def inputs(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the models and data files that the settings name, as (setting, file or folder)."""
    paths = {
        "model.path": config.model.path,
        "loss.reference_path": config.loss.reference_path,
        "critic.path": config.critic.path,
        **config.teacher.paths,
        **config.prompt_files,
    }
    for setting, path in paths.items():
        if path is not None:
            yield setting, shipped_model_path(path) if path in SHIPPED_MODELS else Path(path).expanduser()


def _digests(path: Path) -> dict[str, str]:
    """Return the digests of a file, or of a model's folder, by file name."""
    try:
        files = [path] if path.is_file() else [file for pattern in _MODEL_FILES for file in sorted(path.glob(pattern))]
        return {file.name: _digest(file, (s := file.stat()).st_size, s.st_mtime_ns) for file in files}
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


@cache
def _digest(file: Path, _size: int, _mtime_ns: int) -> str:
    """Compute a file's digest, once per size and modification time."""
    return digest_of(file)
