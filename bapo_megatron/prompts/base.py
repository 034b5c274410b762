"""Prompt sources: indexable lists of questions that depend on settings and seed alone."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from bapo_megatron.config.base import Section
from bapo_megatron.errors import DataError

Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True, slots=True)
class Question:
    """One question before tokenisation.

    Example: Question(text="3+5*2=", answer="2", where="chains item 7")
    """

    text: str
    answer: Any  # JSON value, see types.Prompt.answer
    where: str  # its place, for error messages


class PromptSource(Protocol):
    """Questions by index; `source[i]` depends on the settings, the seed and `i` alone."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Question: ...


def read_options(section: type[Options], source: str, options: dict[str, Any]) -> Options:
    """Read a source's `[data.options]`. Raises DataError for unknown or contradictory ones."""
    try:
        return section(**options)
    except ValidationError as error:
        reasons = "; ".join(
            ": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))))
            for e in error.errors()
        )
        raise DataError(f"data.options of the source {source}: {reasons}") from error
