"""docs/configuration.md, written from the schema: `python -m bapo_megatron.config.document > docs/configuration.md`."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bapo_megatron.config.base import Section
from bapo_megatron.config.schema import Config

_HEAD = """# Configuration

A run is described by one or more TOML files, merged in order, and `key.path=value` overrides, merged last and validated
once: `bapo train a.toml b.toml optimizer.lr=3e-4`. A table below is a TOML table. Unknown keys are errors, and
`bapo check` answers all violations at once. The run directory keeps the resolved configuration. `none` unsets a setting
that may be unset. Relative paths are relative to the working directory.

This page is written from `config/schema.py`; a test keeps it current.
"""


def document() -> str:
    """The page, as Markdown."""
    return _HEAD + "".join(_section(name, field.annotation) for name, field in Config.model_fields.items())


def _section(name: str, section: Any) -> str:
    assert issubclass(section, Section)
    about = _sentence(section.__doc__)
    lines = [f"\n## [{name}]\n\n{about}\n\n| setting | type | default | meaning |\n|---|---|---|---|\n"]
    for key, field in section.model_fields.items():
        cells = (f"`{key}`", _type(field.annotation), _default(field), _sentence(field.description))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("unset" if part is type(None) else _type(part) for part in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{ " + ", ".join(annotation.model_fields) + " }"
    names = {str: "text", bool: "true, false", int: "integer", float: "number"}
    return names.get(annotation) or {dict: "table", tuple: "list"}.get(origin or annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "by preset" if field.default_factory is None else "empty"
    if field.default is None:
        return "unset"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{field.default}`" if field.default not in ("", ()) else "empty"


if __name__ == "__main__":
    print(document(), end="")
