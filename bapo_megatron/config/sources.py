"""Sources of prompts by name, and the settings that each one reads."""

from dataclasses import dataclass
from typing import Literal

from bapo_megatron.config.dotted import Seam


@dataclass(frozen=True, slots=True)
class SourceKind:
    """What a source of prompts reads."""

    reads: tuple[str, ...]  # settings that describe its prompts, as messages list them
    path: Literal["file", "data set"] | None = None  # what `path` names

    @property
    def has_rows(self) -> bool:
        """Whether the prompts are stored rows, not generated as needed."""
        return "format" in self.reads


SOURCES = {
    "chains": SourceKind(("options", "source")),
    "programs": SourceKind(("options", "source")),
    "reasoning_gym": SourceKind(("options", "dataset", "source")),
    "jsonl": SourceKind(("path", "source", "format", "fields"), path="file"),
    "hub": SourceKind(("path", "subset", "split", "source", "format", "fields"), path="data set"),
}
"""Kinds by name; each is a class as in prompts/base.py, which `build_source` of prompts/__init__.py makes."""
OWN_ROWS = SourceKind(("source", "options", "format", "fields"))
"""The kind of a user's own function."""


def source_kind(name: str) -> SourceKind:
    """Return what a source reads, by its name or dotted path."""
    return SOURCES.get(name, OWN_ROWS)


SOURCE = Seam(
    "data.source",
    tuple(SOURCES),
    'def rows(**options) that returns or yields rows such as {"prompt": "...", "answer": ...}',
)
