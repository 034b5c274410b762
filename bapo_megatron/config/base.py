"""The base of every configuration section, the ranges of its values, and the findings of checks."""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bapo_megatron.errors import ConfigError

# The upper limits are far above any real use. They keep the arithmetic of checks and plans short and finite.
LARGEST = 10**9
Count = Annotated[int, Field(gt=0, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Processes = Annotated[int, Field(gt=0, le=65_536)]

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095  # Linux: NAME_MAX, PATH_MAX


def _possible_path(text: str) -> str:
    """Return `text` if a file may have this path. Raises ValueError, for a pydantic validator."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text) or not text:
        raise ValueError("must be a path, without control characters")
    if len(text.encode()) > _MAX_PATH_BYTES or any(len(name.encode()) > _MAX_NAME_BYTES for name in text.split("/")):
        raise ValueError(
            f"must be a path of at most {_MAX_PATH_BYTES} bytes, and {_MAX_NAME_BYTES} between two slashes; "
            f"got {len(text.encode())} bytes"
        )
    try:
        Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"must be a path: {error}") from error
    return text


PathText = Annotated[str, AfterValidator(_possible_path)]


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something wrong with one setting, or with several together. An error stops the run, a warning does
    not, and a note only tells.

    Example: Violation(("data.path", "data.source"), 'data.source="jsonl" needs data.path', "set it to a file")
    """

    settings: tuple[str, ...]
    """All settings (or tables) whose values cause the problem; the remedy changes the first one."""
    problem: str
    """What is wrong, with the values."""
    remedy: str = ""
    """What to do about it."""
    severity: Severity = "error"

    @property
    def message(self) -> str:
        """The line that users see. No code reads it."""
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem

    def depends_on(self, names: Iterable[str]) -> bool:
        """Return whether the value of one of these settings or tables causes the problem."""
        return overlap(self.settings, names)


def warning(settings: tuple[str, ...], problem: str, remedy: str = "") -> Violation:
    """Return a violation that does not stop the run."""
    return Violation(settings, problem, remedy, "warning")


def refuse(violations: Iterable[Violation]) -> None:
    """Raise ConfigError with the messages of these violations, if there are any."""
    if messages := [violation.message for violation in violations]:
        raise ConfigError("; ".join(messages))


def overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether two lists have a setting in common; a table stands for all its settings."""
    paths = [name.split(".") for name in others]
    return any(one[: len(two)] == two[: len(one)] for one in (name.split(".") for name in some) for two in paths)


class ContradictionError(ValueError):
    """Settings of one section that contradict each other, for a pydantic validator.

    Args:
        violations: name settings of the section; a problem's text continues the name of its first setting.

    Example: ContradictionError(Violation(("rho0", "contribution"), "must be below 1, as it is a share, got 1.4"))
    """

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(f"{v.settings[0]} {v.message}" for v in violations))
        self.violations = violations
