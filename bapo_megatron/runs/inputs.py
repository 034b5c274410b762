"""The files behind a run's settings, by digest: prompts, evaluation sets, and the modules of the user's functions.

A resume may find other contents under the same path. Then its results differ from an uninterrupted run's.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.runtime.files import write_atomically

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

_FUNCTION = re.compile(r"(?:replay:)?([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_PROMPTS = re.compile(r"(?:data|eval)\.(?:.*\.)?path")


def input_digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of each file that settings name, by path. A file that cannot be read is left out."""
    found: dict[str, str] = {}
    for path in settings_of_files(config):
        try:
            with path.open("rb") as file:
                found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            continue
    return found


def settings_of_files(config: Config) -> dict[Path, list[str]]:
    """Return the settings that name each file, such as "data.path"."""
    found: dict[Path, list[str]] = {}
    for setting, value in _texts(config.model_dump(), ""):
        for path in _files(setting, value):
            found.setdefault(path, []).append(setting)
    return found


def changed_inputs(record: Path, config: Config) -> list[str]:
    """Return the files whose contents differ from those that `record_inputs` wrote, without new and missing ones."""
    try:
        earlier = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the run began before these records
        return []
    here = input_digests(config)
    return sorted(path for path in here.keys() & earlier.keys() if here[path] != earlier[path])


def record_inputs(record: Path, config: Config) -> None:
    """Write the digests for a later resume. Raises UserError if the disk is full."""
    write_atomically(record, json.dumps(input_digests(config), indent=2) + "\n")


def _texts(value: Any, setting: str) -> Iterator[tuple[str, str]]:
    """Yield all texts in a configuration, with the names of their settings."""
    if isinstance(value, str):
        yield setting, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _texts(one, f"{setting}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, setting)


def _files(setting: str, value: str) -> Iterator[Path]:
    if _PROMPTS.fullmatch(setting):
        if (path := Path(value).expanduser().absolute()).is_file():
            yield path
    elif (function := _FUNCTION.fullmatch(value)) is not None:
        place = Path(*function[1].split("."))
        candidates = (
            Path(folder or ".").absolute() / file
            for folder in ("", *sys.path)
            for file in (place.with_suffix(".py"), place / "__init__.py")
        )
        yield from (path for path in [next(filter(Path.is_file, candidates), None)] if path is not None)
