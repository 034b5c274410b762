"""What a run reads besides its settings, by digest: prompts, evaluation sets, and the modules of the user's functions.

A resume may find other contents under the same name. Then its results differ from an uninterrupted run's.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.runtime.files import write_atomically

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

_FUNCTION = re.compile(r"(?:replay:)?([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def module_digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the files of `function_modules`, by path, without files that nobody can read."""
    found: dict[str, str] = {}
    for path in {path for paths in function_modules(config).values() for path in paths}:
        with contextlib.suppress(OSError), path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def function_modules(config: Config) -> dict[str, list[Path]]:
    """Return, by name, the files of each module that settings name, and of what it imports from the same place.

    Example: {"judges.sums": [Path("/home/me/judges/sums.py"), Path("/home/me/judges/common.py")]}
    """
    names = {name for _, value in _texts(config.model_dump()) if (name := _module(value))}
    return {name: files for name in sorted(names) if (files := _files(name))}


def settings_of_input(name: str, config: Config) -> list[str]:
    """Return the settings behind an input. Example: ["data.path"] for "data (sums.jsonl)"."""
    if not Path(name).is_absolute():
        return [f"{name.partition(' (')[0]}.path"]
    texts = _texts(config.model_dump())
    return [setting for setting, value in texts if (module := _module(value)) and Path(name) in _files(module)]


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


def _module(value: str) -> str | None:
    """Return the name of the module that a function's dotted path names."""
    return path[1] if (path := _FUNCTION.fullmatch(value)) else None


def _files(module: str) -> list[Path]:
    """Return the file of a module, then those that it imports from the same folder; the former alone if installed."""
    for root in _folders(module.partition(".")[0]):
        if _file(module, root) is None:
            continue
        is_installed = any(root == Path(folder) for folder in sysconfig.get_paths().values())
        found: list[Path] = []
        waiting = [module]
        while waiting:
            name = waiting.pop(0)
            if (file := _file(name, root)) is not None and file not in found:
                found.append(file)
                waiting += [] if is_installed else _imports(name, file)
        return found
    return []


def _folders(package: str) -> Iterable[Path]:
    """Return the folders that may hold a package: its own if it has been imported, or the search path."""
    loaded = getattr(sys.modules.get(package), "__path__", None)
    return (
        [Path(path).parent for path in loaded] if loaded else [Path(one or ".").absolute() for one in ("", *sys.path)]
    )


def _file(module: str, root: Path) -> Path | None:
    place = root.joinpath(*module.split("."))
    return next(filter(Path.is_file, (place.with_suffix(".py"), place / "__init__.py")), None)


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield the names that a module may import, without this package's own. Its own packages run before it."""
    names = module.split(".")
    imported = [".".join(names[:n]) for n in range(1, len(names))]
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # whoever imports it will tell
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = names if file.name == "__init__.py" else names[:-1]
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                imported += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    yield from (name for name in imported if name.partition(".")[0] != __name__.partition(".")[0])
