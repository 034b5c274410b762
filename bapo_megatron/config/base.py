"""The base of every configuration section, and the finding that checks of a configuration return."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


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
