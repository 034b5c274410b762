"""Paths into the schema: all settings, the types they accept, and the setting that a typo meant."""

import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bapo_megatron.config.coming_from import meant_by
from bapo_megatron.config.schema import Config
from bapo_megatron.config.wording import closest

Path = tuple[str, ...]


def options(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type: (int, NoneType) for `int | None`, (t,) for any other t."""
    if typing.get_origin(annotation) is typing.Annotated:
        return options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(option for part in typing.get_args(annotation) for option in options(part))
    return (annotation,)


def subsections(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: several for [loss], none for a plain value."""
    return [t for t in options(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)]


def entries(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section of each entry in a list of tables, such as [[eval.sets]]; None for other fields."""
    is_list = typing.get_origin(field.annotation) is tuple
    kind = typing.get_args(field.annotation)[0] if is_list else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def walk(model: type[BaseModel] = Config, prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every field of the schema with its path, sections before their fields."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        for section in subsections(field):
            yield from walk(section, (*prefix, name))


@cache
def schema() -> dict[Path, FieldInfo]:
    """Return all fields by path."""
    return dict(walk())


def accepts(path: Path, kind: type) -> bool:
    """Return whether a setting's type allows `kind`, such as str or NoneType; False for a path that does not exist."""
    field = schema().get(path)
    return field is not None and any(
        (typing.get_origin(t) or t) is kind or (kind is str and typing.get_origin(t) is typing.Literal)
        for t in options(field.annotation)
    )


def choices(path: Path) -> list[str]:
    """Return a setting's possible values if they are few (names, or true and false), otherwise an empty list."""
    field = schema().get(path)
    kinds = options(field.annotation) if field else ()
    names = [
        str(value) for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)
    ]
    return names + (["true", "false"] if bool in kinds else [])


def meant_setting(path: Path) -> str | None:
    """Return the setting that a wrong path most likely meant; within a list of tables, only a setting of its entries.

    In order: the same name in lower case; the name of another framework (coming_from.toml); a typo within the section;
    the same name in another section; the end of another framework's name; a typo anywhere.
    """
    name, last = ".".join(path), path[-1]
    if (listed := schema().get(path[:-2])) is not None and (section := entries(listed)) is not None:
        close = closest(last, section.model_fields, 0.55)
        return ".".join((*path[:-1], close)) if close else None
    dotted = {".".join(p): p for p in schema()}
    if name.lower() in dotted:
        return name.lower()
    settings = {known: p for known, p in dotted.items() if len(p) > 1}
    same_name = [known for known, p in settings.items() if p[-1] == last]
    in_section = {p[-1]: known for known, p in settings.items() if p[:-1] == path[:-1]}
    last_names = {p[-1]: known for known, p in settings.items()}
    return (
        meant_by(name, whole=True)
        or in_section.get(closest(last, in_section, 0.65))
        or (same_name[0] if len(same_name) == 1 else None)
        or meant_by(name)
        or closest(name, dotted, 0.75)
        or last_names.get(closest(last, last_names, 0.8))
        or None
    )
