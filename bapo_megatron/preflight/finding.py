"""What `bapo doctor` says about one thing: fit, missing, or broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "absent", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    ok: as it should be. absent: not there, and not needed here. warning: works, but will hurt. error: what was asked
    for will not work.

    Example: Finding("disk", "error", "0.1 GiB free in runs", "free 5 GiB, or set run.dir").
    """

    name: str
    verdict: Verdict
    what: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok", "absent": "--", "warning": "warn", "error": "FAIL"}[self.verdict]
        return f"{mark:<5}{self.name:<20}{self.what}" + (f"; {self.advice}" if self.advice else "")
