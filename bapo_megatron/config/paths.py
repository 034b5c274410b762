"""Paths into the schema: all settings, the types they accept, and the setting that a typo meant."""

import types
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bapo_megatron.config.coming_from import AROUND, Hint, covered_by, meant_by, tails
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import closest

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


def meant_setting(path: Path) -> Hint | None:
    """Return what a wrong path most likely meant; within a list of tables, only a setting of its entries.

    In order: a name of another framework (coming_from.toml); ours in lower case, or in a section around it; a typo
    within the section; names of a kind, such as "*lora*"; the same name in another section; a typo of the section, or
    of a name without one. A single word in another section decides nothing: `scale`, `path` and `lr` are in many.
    """
    name, section, last = ".".join(path), path[:-1], path[-1]
    if (listed := schema().get(path[:-2])) is not None and (entry := entries(listed)) is not None:
        close = closest(last, entry.model_fields, 0.55)
        return Hint(".".join((*section, *close))) if close else None
    if (hint := meant_by(name)) is not None:
        return hint
    if ours := next((tail for tail in tails(name) if tuple(tail.split(".")) in schema()), None):
        return Hint(ours)
    settings = [known for known in schema() if len(known) > 1]
    in_section = [known[-1] for known in settings if known[:-1] == section]
    elsewhere = [known for known in settings if known[-1] == last and len(known) == 2]
    if close := closest(last, in_section, 0.75):
        return Hint(".".join((*section, *close)))
    if (hint := covered_by(name)) is not None:
        return hint
    if len(elsewhere) == 1 and (not section or ("_" in last and AROUND.issuperset(section))):
        return Hint(".".join(elsewhere[0]))
    sections = {".".join(known[:-1]) for known in settings}
    if section and not in_section and (close := closest(".".join(section), sections, 0.8)):
        meant = (*close[0].split("."), last)
        return Hint(".".join(meant)) if meant in schema() else None
    if not section:
        # A name alone: {"data": "data", "eval.sets": "eval.sets", "entropy_bonus": "loss.entropy_bonus", ...}
        times = Counter(known[-1] for known in settings)
        meant_by_name = {known[-1]: ".".join(known) for known in settings if times[known[-1]] == 1}
        meant_by_name |= {section: section for section in sections}
        return next((Hint(meant_by_name[name]) for name in closest(last, meant_by_name, 0.85)), None)
    return None
