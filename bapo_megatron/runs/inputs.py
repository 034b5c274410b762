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
    for path in filter(None, map(_module, _texts(config.model_dump()))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


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


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


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
