"""Paths into the schema: all settings, the types they accept, and the setting that a typo meant."""

import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bapo_megatron.config.schema import Config

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


def suggest(path: Path) -> str | None:
    """Return the setting that a wrong path most likely meant: a typo, or a right name in a wrong section."""
    known = schema()
    dotted = {".".join(p): p for p in known}
    same_name = [name for name, p in dotted.items() if len(p) > 1 and p[-1] == path[-1]]
    if len(same_name) == 1:
        return same_name[0]
    close = difflib.get_close_matches(".".join(path), dotted, n=1, cutoff=0.75)
    if close:
        return close[0]
    last_names = {p[-1]: name for name, p in dotted.items() if len(p) > 1}
    close = difflib.get_close_matches(path[-1], last_names, n=1, cutoff=0.8)
    return last_names[close[0]] if close else None
