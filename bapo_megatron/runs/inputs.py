"""What a run reads besides its settings, by digest: prompts, evaluation sets, and the modules of the user's functions.

A resume may find other contents under the same name. Then its results differ from an uninterrupted run's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.runtime.files import write_atomically

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

_FUNCTION = re.compile(r"(?:replay:)?([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def module_digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the file of each module that settings name, by path, without files that nobody can read."""
    found: dict[str, str] = {}
    for path in filter(None, (_module(value) for _, value in _texts(config.model_dump()))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def settings_of_input(name: str, config: Config) -> list[str]:
    """Return the settings behind an input. Example: ["data.path"] for "data (sums.jsonl)"."""
    if not Path(name).is_absolute():
        return [f"{name.partition(' (')[0]}.path"]
    return [setting for setting, value in _texts(config.model_dump()) if str(_module(value)) == name]


def changed_inputs(record: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the inputs whose digests differ from those that `record_inputs` wrote, without new and missing ones."""
    try:
        earlier = dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # the run began before these records
        return []
    return sorted(name for name in digests.keys() & earlier.keys() if digests[name] != earlier[name])


def record_inputs(record: Path, digests: Mapping[str, str]) -> None:
    """Write the digests for a later resume. Raises UserError if the disk is full."""
    write_atomically(record, json.dumps({**digests}, indent=2) + "\n")


def _texts(value: Any, setting: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a configuration that hold texts, and the texts."""
    if isinstance(value, str):
        yield setting, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _texts(one, f"{setting}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, setting)


def _module(value: str) -> Path | None:
    """Return the file of the module that a function's dotted path names."""
    if (function := _FUNCTION.fullmatch(value)) is None:
        return None
    place = Path(*function[1].split("."))
    candidates = (
        Path(folder or ".").absolute() / file
        for folder in ("", *sys.path)
        for file in (place.with_suffix(".py"), place / "__init__.py")
    )
    return next(filter(Path.is_file, candidates), None)
