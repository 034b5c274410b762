"""From TOML files and `key.path=value` overrides to one checked `Config`, and back to TOML.

All sources are merged first, and later ones win. The result is validated strictly; one error lists every violation with
the file or override that it came from. An invalid setting then gets its default, so that later checks can report the
rest of what is wrong.

- A path that does not exist but is the name of a shipped configuration ("demo") means that one.
- Relative paths inside a configuration (model.path, data.path, run.dir) are relative to the working directory.
- `data.options` belong to a prompt source: if a later `data.source` names another one, earlier options are dropped.
- TOML has no null: the string "none" unsets a setting that can be unset.
"""

import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from bapo_megatron.config import paths
from bapo_megatron.config.base import ContradictionError, Violation, overlap
from bapo_megatron.config.coming_from import meant_by
from bapo_megatron.config.losses import CUSTOM, LOSS_SECTIONS
from bapo_megatron.config.schema import Config
from bapo_megatron.config.wording import expected, shown
from bapo_megatron.errors import ConfigError, closest, did_you_mean, escaped

UNSET = "none"
Origins = dict[paths.Path, str]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into configurations and overrides: an override contains "=" and does not name a file.

    Raises:
        ConfigError: a setting is written without a "=", such as `optimizer.lr 3e-4`.
    """
    known = {".".join(path) for path in paths.schema() if len(path) > 1}
    bare = [i for i, text in enumerate(arguments) if text in known and not os.path.exists(text)]
    if bare:
        values = {i: next((text for text in arguments[i + 1 : i + 2] if "=" not in text), "VALUE") for i in bare}
        raise ConfigError("\n".join(f"{arguments[i]} needs a =: write {arguments[i]}={values[i]}" for i in bare))
    overrides = [a for a in arguments if "=" in a and not os.path.isfile(a)]  # Path.is_file raises if it is long
    return [a for a in arguments if a not in overrides], overrides


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration without its invalid settings, and what is wrong with them."""

    config: Config
    violations: tuple[Violation, ...]
    unread: frozenset[str]  # settings whose intended value could not be read
    given: frozenset[str]  # settings and tables from overrides and from the user's own files
    files: Mapping[str, str]  # the file of each setting, if there are several files

    def valid(self) -> Config:
        """Return the configuration. Raises ConfigError with all violations, one per line."""
        if self.violations:
            raise ConfigError("\n".join(v.message for v in self.violations))
        return self.config


def load_config(files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Merge TOML files in order, then overrides, and validate the result.

    Args:
        files: paths, or names of shipped configurations.
        overrides: such as "optimizer.lr=3e-4"; the value is TOML, a bare word is a string.

    Raises:
        ConfigError: a missing or malformed file, a malformed override, or all violations of the schema, one per line.
    """
    return read_config(files, overrides).valid()


def read_config(files: Sequence[Path | str], overrides: Sequence[str] = ()) -> Reading:
    """Read what `load_config` reads, and leave invalid settings out.

    Raises:
        ConfigError: a file is missing or malformed, so that the rest may mean something else; names all problems.
    """
    tables: list[tuple[str, dict[str, Any]]] = []
    unreadable: list[str] = []
    for file in files:
        try:
            path = find_config(file)
            tables.append((escaped(str(path)), _read_toml(path)))
        except ConfigError as error:
            unreadable.append(str(error))
    reading = _merged(tables, overrides)
    if unreadable:
        raise ConfigError("\n".join((*unreadable, *(v.message for v in reading.violations))))
    return reading


def load_tables(tables: Mapping[str, dict[str, Any]], overrides: Sequence[str] = ()) -> Config:
    """Merge tables in order, then overrides, and validate the result; the keys name the tables in errors."""
    return read_tables(tables, overrides).valid()


def read_tables(tables: Mapping[str, dict[str, Any]], overrides: Sequence[str] = ()) -> Reading:
    """Read what `load_tables` reads, and leave invalid settings out."""
    return _merged(list(tables.items()), overrides)


def _merged(tables: Sequence[tuple[str, dict[str, Any]]], overrides: Sequence[str]) -> Reading:
    merged: dict[str, Any] = {}
    origins: Origins = {}
    found: list[Violation] = []
    for source, table in tables:
        _put_over(merged, table)
        _put_origins(origins, table, source)
    parsed, wrong = parse_overrides(overrides)
    found += wrong
    _forget_options(merged, [value for _, path_in_schema, value in parsed if path_in_schema == ("data", "source")])
    for text, path_in_schema, value in parsed:
        try:
            _set(merged, path_in_schema, value)
        except ConfigError as error:
            found.append(Violation((".".join(path_in_schema),), str(error)))
            continue
        _put_origins(origins, value or None, f"override {escaped(text)}", path_in_schema)  # {} replaces a table
    unread = {setting for violation in found for setting in violation.settings}
    several = {source for source, _ in tables} if len(tables) > 1 else set()
    return _validated(merged, origins, found, unread, several)


def _validated(
    merged: dict[str, Any], origins: Origins, found: list[Violation], unread: set[str], several: set[str]
) -> Reading:
    """Validate, drop what is invalid, and validate again: pydantic compares settings only once each one is valid.

    Args:
        found, unread: as in the Reading, so far.
        several: the merged files; empty if there is only one.
    """
    dropped: set[str] = set()
    named: set[str] = set()  # the same, with the names of list entries
    while True:
        try:
            config = Config.model_validate_json(json.dumps(_without_unset(merged), default=str), strict=True)
        except ValidationError as error:
            mistakes = _mistakes([dict(details) for details in error.errors()], origins)
        else:
            shipped = {str(path): name for name, path in shipped_configs().items()}
            given = frozenset(".".join(path) for path, source in origins.items() if source not in shipped)
            files = {
                ".".join(path): shipped.get(source, source)
                for path, source in origins.items()
                if source in several and path in paths.schema()
            }
            all_unread = frozenset(_with_derived(unread | dropped | named, merged))
            return Reading(config, tuple(found), all_unread, given, files)
        found += [v for _, violations in mistakes for v in violations if not v.depends_on(dropped)]
        named |= {".".join(_by_name(path, merged)) for at, _ in mistakes for path in at}
        gone = [path for at, _ in mistakes for path in _remove(merged, at)]
        if not gone:
            raise ConfigError("\n".join(v.message for v in found))
        dropped |= {".".join(path) for path in (*gone, *(path for at, _ in mistakes for path in at))}


def _with_derived(unread: set[str], merged: dict[str, Any]) -> set[str]:
    """Add parallel.data if other settings of the layout determine it and one of them could not be read."""
    is_derived = "data" not in merged.get("parallel", {})
    return unread | {"parallel.data"} if is_derived and overlap(unread, _CHOOSE_DATA) else unread


_CHOOSE_DATA = ("parallel.num_ranks", "parallel.tensor", "parallel.pipeline", "parallel.context")

Mistake = tuple[tuple[paths.Path, ...], Sequence[Violation]]
"""Settings to drop, and what is wrong with them; empty if that only follows from another mistake."""


def _mistakes(errors: Sequence[dict[str, Any]], origins: Origins) -> list[Mistake]:
    found: list[Mistake] = []
    has_loss = not any(error["loc"] == ("loss", CUSTOM, "name") for error in errors)
    for error in errors:
        path = tuple(str(part) for part in error["loc"])
        loss = path[1] if path[:1] == ("loss",) and len(path) > 1 else ""  # pydantic names the section of [loss]
        path = (path[0], *path[2:]) if loss else path
        contradiction = error.get("ctx", {}).get("error")
        if isinstance(contradiction, ContradictionError):
            found += _contradictions(path, contradiction, origins)
        elif not has_loss and error["type"] == "extra_forbidden" and path in paths.schema():
            found.append(((path,), ()))  # a setting of the intended loss
        else:
            found.append(((path,), _explain(error, path, loss, origins)))
    return found if has_loss else [*found, ((("loss",),), ())]


def _contradictions(section: paths.Path, error: ContradictionError, origins: Origins) -> Iterator[Mistake]:
    """Blame the first setting that was set explicitly, and name its source."""
    for violation in error.violations:
        at = tuple((*section, *setting.split(".")) for setting in violation.settings)
        names = tuple(".".join(path) for path in at)
        were_set = (path for path in at for n in range(len(section) + 1, len(path) + 1) if path[:n] in origins)
        source = _source(next(were_set, section), origins)
        yield at, [replace(violation, settings=names, problem=f"{names[0]} {violation.problem} ({source})")]


def _remove(table: dict[str, Any], at: Sequence[paths.Path]) -> list[paths.Path]:
    """Remove the settings if they are there, otherwise the nearest table around them; return the removed paths."""
    for depth in range(max(map(len, at)), 0, -1):
        if gone := [path[:depth] for path in at if len(path) >= depth and _pop(table, path[:depth])]:
            return gone
    return []


def _pop(value: Any, path: paths.Path) -> bool:
    for key in path[:-1]:
        value = _below(value, key)
    return isinstance(value, dict) and value.pop(path[-1], None) is not None


def _below(value: Any, key: str) -> Any:
    """Return a table's or list's value for the key, or None."""
    if isinstance(value, list):
        return value[int(key)] if key.isdigit() and int(key) < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


def _by_name(path: paths.Path, value: Any) -> Iterator[str]:
    """Yield the parts of a path, with list entries by name instead of number, as later checks name them."""
    for key in path:
        is_entry, value = isinstance(value, list), _below(value, key)
        yield str(value["name"]) if is_entry and isinstance(value, dict) and "name" in value else key


def dump_config(config: Config) -> str:
    """Render the resolved configuration as TOML, which `load_config` reads back as an equal one."""
    return tomli_w.dumps(_to_toml(config))


def find_config(file: Path | str) -> Path:
    """Return an existing file, or the shipped configuration of that name.

    Raises:
        ConfigError: neither exists; suggests a name.
    """
    if os.path.isfile(file):
        return Path(file)
    shipped = shipped_configs()
    if str(file) in shipped:
        return shipped[str(file)]
    if os.path.isfile(os.path.join(file, "config.json")):
        raise ConfigError(
            f"{file} is a model, not a configuration: `bapo init {file} DATA` writes one, or set model.path={file}"
        )
    what = "is a folder" if os.path.isdir(file) else "does not exist"
    known = {name.removesuffix(".toml"): name for name in (*shipped, *_beside(file))}
    close = closest(str(file).removesuffix(".toml"), known)  # endings are always equal
    names = dict.fromkeys(f"{name.partition('/')[0]}/..." if "/" in name else name for name in sorted(shipped))
    every = f"give a TOML file or a shipped configuration: {', '.join(names)} (docs/recipes.md)"
    advice = did_you_mean(*(known[name] for name in close)) or every
    raise ConfigError(f"configuration {file} {what}; {advice}")


def _beside(file: Path | str) -> list[str]:
    """List the other TOML files in the folder where one was expected."""
    folder, missing = os.path.split(file)
    try:
        names = [name for name in os.listdir(folder or ".") if name.endswith(".toml") and name != missing]
        return [os.path.join(folder, name) for name in names]
    except OSError:  # also ENAMETOOLONG
        return []


@cache
def shipped_configs() -> dict[str, Path]:
    """Return the configurations that ship with the package: name ("demo", "recipes/qwen3-32b-64k") -> file."""
    with resources.as_file(resources.files("bapo_megatron_configs")) as folder:
        return {file.relative_to(folder).with_suffix("").as_posix(): file for file in folder.rglob("*.toml")}


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge `top` into `base` in place, table by table; a value that is not a table replaces what was there."""
    for key, value in top.items():
        if isinstance(value, dict):
            below = base.get(key)
            base[key] = merge(below if isinstance(below, dict) else {}, value)
        else:
            base[key] = value
    return base


def _put_over(merged: dict[str, Any], table: dict[str, Any]) -> None:
    data = table.get("data")
    _forget_options(merged, [data["source"]] if isinstance(data, dict) and "source" in data else [])
    merge(merged, table)


def _forget_options(merged: dict[str, Any], sources: Sequence[Any]) -> None:
    """Drop `data.options`, which belong to one prompt source, if one of the later `sources` is another."""
    data = merged.get("data")
    if isinstance(data, dict) and any(source != data.get("source") for source in sources):
        data.pop("options", None)


def parse_override(text: str) -> tuple[paths.Path, Any]:
    """Split "section.key=value". The value is TOML; a bare word, or anything for a text setting, is a string.

    Raises:
        ConfigError: no "=", an empty key, or a value that starts like TOML but is not valid TOML.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        if (encoding := sys.getfilesystemencoding()) == "utf-8":
            raise ConfigError(f"override {text!r} is not UTF-8")
        how = "set LC_ALL=C.UTF-8, and leave PYTHONUTF8=0 out"
        raise ConfigError(f"override {text!r}: this locale's encoding, {encoding}, lacks some of its characters; {how}")
    key, equals, value = (part.strip() for part in text.partition("="))
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {text!r} is not of the form section.key=value, such as optimizer.lr=3e-4")
    quoted = value[:1] in ('"', "'")
    if paths.accepts(path, str) and not quoted:
        return path, value
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:  # tomllib.TOMLDecodeError, or an integer of thousands of digits
        if quoted or value[:1] in ("[", "{") or not isinstance(error, tomllib.TOMLDecodeError):
            if path[:2] not in paths.schema():  # below a section all else is options
                raise ConfigError(_unknown(path, {path: f"override {escaped(text)}"}).message) from None
            raise ConfigError(f"override {shown(text)}: the value is not TOML: {escaped(str(error))}") from error
        return path, value


def parse_overrides(overrides: Sequence[str]) -> tuple[list[tuple[str, paths.Path, Any]], list[Violation]]:
    """Return text, path and value of each override that `parse_override` takes, and what is wrong with the others."""
    parsed, wrong = [], []
    for text in overrides:
        try:
            parsed.append((text, *parse_override(text)))
        except ConfigError as error:
            wrong.append(Violation((text.partition("=")[0].strip(),), str(error)))
    return parsed, wrong


def as_override(setting: str, value: Any) -> str | None:
    """Return the override that sets a value, or None if there is none; the value None unsets.

    Example: as_override("rollout.urls", ["a", "b"]) == 'rollout.urls=["a", "b"]'
    """
    path = tuple(setting.split("."))
    if value is None:
        return f"{setting}={UNSET}" if paths.accepts(path, NoneType) else None
    for text in (value, _inline(value)):  # text without quotes is easier to read
        with contextlib.suppress(ConfigError):
            if isinstance(text, str) and parse_override(f"{setting}={text}") == (path, value):
                return f"{setting}={text}"
    return None


def _inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def _set(table: dict[str, Any], path: paths.Path, value: Any) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            if depth == 1:
                return  # a section is a table: validation refuses this value
            whole = ".".join(path[:depth])
            raise ConfigError(f"cannot set {'.'.join(path)}: {whole} was set as a whole; override {whole} instead")
    if value == {}:  # to merge it would change nothing
        table[path[-1]] = value
    else:
        merge(table, {path[-1]: value})


_OF_PROMPTS = (".jsonl", ".json", ".csv", ".parquet")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except (ValueError, RecursionError) as error:  # also for an integer of thousands of digits
        if path.suffix in _OF_PROMPTS:
            advice = f"set data.path={path}, or in `bapo eval` give it as --data {path}"
            raise ConfigError(f"{path} is not a configuration; if it is a file of prompts, {advice}") from error
        if path.suffix in (".yaml", ".yml"):
            how = "TOML with our settings (docs/coming-from.md has other frameworks' names for them)"
            raise ConfigError(f"{path} is YAML, and a configuration is TOML; write it as {how}") from error
        raise ConfigError(f"{path} is not valid TOML: {escaped(str(error))}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _put_origins(origins: Origins, value: Any, source: str, path: paths.Path = ()) -> None:
    """Record the source of every table and value, for errors at any depth. A value replaces a table."""
    if isinstance(value, dict):
        for key, below in value.items():
            _put_origins(origins, below, source, (*path, key))
    else:
        for replaced in [other for other in origins if other[: len(path)] == path]:
            del origins[replaced]
    origins[path] = source


def _without_unset(table: dict[str, Any], prefix: paths.Path = ()) -> dict[str, Any]:
    """Replace "none" by None where the schema allows None."""
    plain: dict[str, Any] = {}
    for key, value in table.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            plain[key] = _without_unset(value, path)
        else:
            plain[key] = None if value == UNSET and paths.accepts(path, NoneType) else value
    return plain


def _to_toml(section: BaseModel) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            table[name] = _to_toml(value)
        elif isinstance(value, tuple):
            table[name] = [_to_toml(one) if isinstance(one, BaseModel) else one for one in value]
        elif value is not None:
            table[name] = value
        elif field.default is not None:
            table[name] = UNSET
    return table


def _explain(error: dict[str, Any], path: paths.Path, loss: str, origins: Origins) -> list[Violation]:
    """Describe one pydantic error: what, where, what to do.

    Args:
        path: the setting.
        loss: tag of the section that reads [loss], for a setting there.
    """
    name, source = escaped(".".join(path)), _source(path, origins)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden" and not (loss and path in paths.schema()):
        return [_unknown(wrong, origins) for wrong in _most_telling(path, error["input"])]
    hint = meant_by(name) if kind == "model_type" else None
    if kind == "extra_forbidden":
        problem = f"{name} is not a setting of {_loss_name(loss)}, but of {_losses_with(path[1])}"
    elif kind == "missing":
        problem = f"{name} is missing"
    elif kind == "value_error":  # its text follows the name
        problem = f"{name} {context['error']}"
    else:
        problem = f"{name}{expected(error, is_table=hint is not None)}, got {shown(error['input'])}"
    remedy = hint.advice if hint else ""
    if kind == "literal_error" and isinstance(error["input"], str):
        remedy = did_you_mean(*(f'"{name}"' for name in closest(error["input"], paths.choices(path))))
    if kind == "value_error" and isinstance(error["input"], str):
        remedy = _VALUES.get((*path, error["input"].lower()), "")
    if kind == "greater_than_equal" and path == ("loss", "clip_high"):
        remedy = f"it bounds the ratio: for an epsilon of {error['input']:g}, set loss.clip_high={1 + error['input']:g}"
    return [Violation((".".join(path),), f"{problem} ({source})", remedy)]


_VALUES: dict[paths.Path, str] = {
    ("rollout", "engine", "vllm"): 'vLLM is not supported, set rollout.engine="sglang"',
    **{
        ("data", "source", name): 'a file is "jsonl", whether it has JSON lines, a JSON list, CSV or Parquet'
        for name in ("file", "json", "csv", "parquet", "local")
    },
}
"""What to do instead, by setting and value."""


def _most_telling(path: paths.Path, value: Any) -> list[paths.Path]:
    """Return the path itself if it is a misspelt section or a value, otherwise the settings below it (actor.lr)."""
    if not isinstance(value, dict) or not value:
        return [path]
    meant = paths.meant_setting(path)
    if meant and all((meant.setting, key) in paths.schema() for key in value):
        return [path]
    return [leaf for key in value for leaf in _most_telling((*path, key), value[key])]


def _unknown(path: paths.Path, origins: Origins) -> Violation:
    name, hint = ".".join(path), paths.meant_setting(path)
    problem = f"no such setting: {escaped(name)} ({_source(path, origins)})"
    return Violation((name,), problem, hint.advice if hint else "")


def _losses_with(setting: str) -> str:
    names = [_loss_name(tag) for tag, section in LOSS_SECTIONS.items() if setting in section.model_fields]
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _loss_name(tag: str) -> str:
    return "your own loss" if tag == CUSTOM else f'loss.name="{tag}"'


def _source(path: paths.Path, origins: Origins) -> str:
    """Return the source of the nearest table or value around this path, or else of one below it."""
    around = (path[:n] for n in range(len(path), 0, -1))
    below = (other for other in origins if other[: len(path)] == path)
    return next((origins[p] for p in (*around, *below) if p in origins), "default")
