"""Write docs/configuration.md from the schema: python scripts/write_configuration_page.py."""

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bapo_megatron.config.base import Section
from bapo_megatron.config.paths import subsections
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import LOSS_SECTIONS, LossConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

A run is described by one or more TOML files, merged in order, and `key.path=value` overrides, merged last and validated
once: `bapo train a.toml b.toml optimizer.lr=3e-4`. A table below is a TOML table. Unknown keys are errors, and
`bapo check` answers all violations at once. The run directory keeps the resolved configuration. `none` unsets a setting
that may be unset. Relative paths are relative to the working directory.

This page is written from `config/schema.py`; a test keeps it current.
"""


def document() -> str:
    """Return the page, as Markdown."""
    return _HEAD + "".join(_section(name, field) for name, field in Config.model_fields.items())


def _section(name: str, field: FieldInfo) -> str:
    sections = subsections(field)
    about, fields = sections[0].__doc__, {}
    if len(sections) > 1:  # [loss]: all settings once, with the losses that have them
        about, fields = LossConfig.__doc__, dict(LossConfig.model_fields)
    for section in sections:
        fields = {**section.model_fields, **fields}
    return "".join(
        [
            f"\n## [{name}]\n\n{_sentence(about)}\n\n| setting | type | default | meaning |\n|---|---|---|---|\n",
            *(_row(key, fields[key], _having(key, sections)) for key in fields),
        ]
    )


def _having(key: str, sections: list[type[BaseModel]]) -> str:
    """Return "bapo, grpo: " for a setting of these losses; empty for one of all."""
    tags = [tag for tag, section in LOSS_SECTIONS.items() if section in sections and key in section.model_fields]
    return f"{', '.join(tags)}: " if 0 < len(tags) < len(LOSS_SECTIONS) else ""


def _row(key: str, field: FieldInfo, prefix: str) -> str:
    cells = (f"`{key}`", _type(field.annotation), _default(field), prefix + _sentence(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


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
    PAGE.write_text(document(), encoding="utf-8")
