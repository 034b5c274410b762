"""The base of every configuration section, the ranges of its values, and the findings of checks."""

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Upper limits are far above any use. They keep checks and plans, which compute with these values, short and finite.
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


class ContradictionError(ValueError):
    """Settings of one section that do not go together, for a pydantic validator.

    Args:
        problems: what is wrong, by the settings concerned; the text follows the name of the first one.

    Example: ContradictionError({("rho0", "contribution"): "must be below 1, as it is the target of a share, got 1.4"})
    """

    def __init__(self, problems: dict[tuple[str, ...], str]) -> None:
        super().__init__("; ".join(f"{settings[0]} {text}" for settings, text in problems.items()))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Violation:
    """Something wrong with a combination of settings. An error stops the run, a warning does not.

    Example: Violation("parallel.num_ranks=3, but tensor x pipeline x context x data = 2 x 1 x 1 x 1 = 2; set ...")
    """

    message: str
    severity: Literal["error", "warning"] = "error"


def warning(message: str) -> Violation:
    """Return a violation that does not stop the run."""
    return Violation(message, "warning")
