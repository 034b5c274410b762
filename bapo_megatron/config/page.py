"""The pages of all settings and of all metrics: `bapo help settings` and `metrics`, and two pages of the site."""

import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bapo_megatron.config.base import Section
from bapo_megatron.config.changing import cost_of_change
from bapo_megatron.config.losses import LOSS_SECTIONS, LOSSES
from bapo_megatron.config.paths import entries, subsections
from bapo_megatron.config.schema import Config, SourceConfig
from bapo_megatron.config.schema_loss import LossConfig
from bapo_megatron.metrics import INTRO, SECTIONS, MetricSection

_HEAD = """# Configuration

One or more TOML files describe a run. They are merged in order; `key.path=value` overrides are merged last, and the
result is validated once: `bapo train a.toml b.toml optimizer.lr=3e-4`. A table below is a TOML table. Unknown keys are
errors, and `bapo check` reports all violations together. The run directory keeps the resolved configuration. `none`
unsets a setting that may be unset. Relative paths start from the working directory.

A run that has begun takes a change by the same command (resume), or in a new run from its checkpoint
([branch](resume.md#branches)), which may have to leave a part of the checkpoint behind.
"""
_COLUMNS = "| setting | type | default | meaning | change |\n|---|---|---|---|---|\n"


def settings_page() -> str:
    """Return the page as Markdown: a table for each section of the configuration."""
    return _HEAD + "".join(_section(name, field) for name, field in Config.model_fields.items())


def metrics_page() -> str:
    """Return the page of all metrics, of each built-in loss too, as Markdown: a table for each section."""
    of_losses = [MetricSection(f"Loss {name}", loss.metrics) for name, loss in LOSSES.items() if loss.metrics]
    parts = [INTRO]
    for section in [*SECTIONS, *of_losses]:
        parts.append(f"\n## {section.title}\n\n" + (f"{section.intro}\n" if section.intro else ""))
        parts.append("| Name | Unit | Meaning | How to read it |\n|---|---|---|---|\n")
        parts += [_cells(f"`{one.key}`", one.unit, one.meaning, one.how_to_read) for one in section.metrics]
    return "".join(parts)


def _section(name: str, field: FieldInfo) -> str:
    sections = subsections(field)
    about = sections[0].__doc__ if len(sections) == 1 else LossConfig.__doc__
    # In [loss], a setting has one row for each meaning and default, which lists the losses that share it.
    fields: dict[tuple[str, str, str | None], tuple[FieldInfo, list[str]]] = {}
    shared: list[type[BaseModel]] = [LossConfig] if len(sections) > 1 else []
    for section in [*shared, *sections]:
        tags = [tag for tag, known in LOSS_SECTIONS.items() if known is section]
        for key, one in section.model_fields.items():
            text = key if key == "name" else one.description
            fields.setdefault((key, _default(one) if key != "name" else "", text), (one, []))[1].extend(tags)
    rows = [
        (key, one, "" if len(tags) in (0, len(LOSS_SECTIONS)) else f"{', '.join(tags)}: ")
        for (key, *_), (one, tags) in fields.items()
    ]
    return "".join(
        [
            f"\n## [{name}]\n\n{_sentence(about)}\n\n{_COLUMNS}",
            *(_row(*row, f"{name}.{row[0]}") for row in rows),
            *(_entries(f"{name}.{key}", listed) for key, one, _ in rows if (listed := entries(one)) is not None),
        ]
    )


def _entries(name: str, section: type[BaseModel]) -> str:
    """Return the section about a list of tables: its own settings, without the ones that describe a prompt source."""
    own = [(key, one, "") for key, one in section.model_fields.items() if key not in SourceConfig.model_fields]
    head = f"\n### [[{name}]]\n\n{_sentence(section.__doc__)}\n\n{_COLUMNS}"
    return head + "".join(_row(*row, name) for row in own)


def _row(key: str, field: FieldInfo, prefix: str, setting: str) -> str:
    meaning = prefix + _sentence(field.description)
    if setting == "loss.name":
        meaning = " ".join([meaning, *(f"{name}: {_sentence(loss.__doc__)}" for name, loss in LOSSES.items())])
    return _cells(f"`{key}`", _type(field.annotation), _default(field), meaning, cost_of_change(setting))


def _cells(*cells: str) -> str:
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
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        return "by preset" if field.default_factory is None else "empty"
    if field.default is None:
        return "unset"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{field.default}`" if field.default not in ("", ()) else "empty"
