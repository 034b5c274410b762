"""What setup.py asks for, and the versions in requirements/*.txt."""

import importlib.metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

Stack = Literal["cpu", "gpu"]
EXTRAS = {"core": "train", "sglang-needs": "sglang"} | {name: name for name in ("parquet", "gym", "studies", "gpu")}
GROUPS = (*EXTRAS, "sglang")
_FOLDER = Path(__file__).parents[1] / "requirements"


def requirements(group: str) -> list[Requirement]:
    """Return a group's requirements: an extra of bapo-megatron, or the SGLang packages installed without dependencies.

    core is the extra "train" together with the base installation.
    """
    if group == "sglang":
        return _read("sglang-cpu.txt")
    declared = [Requirement(text) for text in importlib.metadata.requires("bapo-megatron") or []]
    of_extra = [r for r in declared if r.marker is not None and r.marker.evaluate({"extra": EXTRAS[group]})]
    of_base = [r for r in declared if r.marker is None] if group == "core" else []
    return list({r.name: r for r in of_base + of_extra}.values())  # an extra may ask for more than the base


def pins(stack: Stack) -> dict[str, str]:
    """Return the version of each package in requirements/<stack>.txt. Example: pins("cpu")["torch"] is "2.13.0"."""
    exact = ((r.name, list(r.specifier)) for r in _read(f"{stack}.txt"))
    return {name: found[0].version for name, found in exact if len(found) == 1 and found[0].operator == "=="}


def _read(file: str) -> list[Requirement]:
    text = (_FOLDER / file).read_text(encoding="utf-8")
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return [r for r in lines if r.marker is None or r.marker.evaluate()]
