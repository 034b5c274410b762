"""What the checks of a configuration find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Violation:
    """Something wrong with a combination of settings. An error stops the run, a warning does not.

    Example: Violation("parallel.num_ranks=3, but tensor x pipeline x context x data = 2 x 1 x 1 x 1 = 2; set ...")
    """

    message: str
    severity: Literal["error", "warning"] = "error"
