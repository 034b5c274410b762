"""Compares installed packages with setup.py's ranges and with the versions in requirements/. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Literal

from bapo_megatron.preflight.machine_checks import Finding, Grade

if TYPE_CHECKING:
    from packaging.requirements import Requirement  # which may be missing too

Stack = Literal["cpu", "gpu"]
Compliance = Literal["exact", "allowed", "not allowed", "missing"]

GROUPS = ("core", "parquet", "gym", "gpu", "sglang", "sglang-needs")
_EXTRAS = {"core": "train", "parquet": "parquet", "gym": "gym", "gpu": "gpu", "sglang-needs": "sglang"}  # in setup.py
_MODULES = {"megatron-core": "megatron"}  # for others, the distribution's name with underscores
_STACKS = {"cpu": "as tested", "gpu": "as docker/Dockerfile.gpu has them, untested"}


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """One package: the installed version, the allowed range, and the stack's own version.

    exact: the stack's version (or any allowed one, if the stack has none). allowed: another version in the range.
    not allowed: a version outside the range.
    """

    requirement: Requirement
    pinned: str
    installed: str | None
    state: Compliance

    def __str__(self) -> str:
        wanted = self.requirement.specifier if self.state == "not allowed" else self.pinned
        return f"{self.requirement.name} {self.installed} ({wanted})"


def requirements(group: str) -> list[Requirement]:
    """Return a group's requirements: an extra of bapo-megatron, or the SGLang packages installed without dependencies.

    core is the extra "train" together with the base installation.
    """
    from packaging.requirements import Requirement

    if group == "sglang":
        return _read("sglang-cpu.txt")
    declared = [Requirement(text) for text in importlib.metadata.requires("bapo-megatron") or []]
    of_extra = [r for r in declared if r.marker is not None and r.marker.evaluate({"extra": _EXTRAS[group]})]
    of_base = [r for r in declared if r.marker is None] if group == "core" else []
    return list({r.name: r for r in of_base + of_extra}.values())  # an extra may ask for more than the base


def pins(stack: Stack) -> dict[str, str]:
    """Return the version of each package in requirements/<stack>.txt. Example: pins("cpu")["torch"] is "2.13.0"."""
    exact = ((r.name, list(r.specifier)) for r in _read(f"{stack}.txt"))
    return {name: found[0].version for name, found in exact if len(found) == 1 and found[0].operator == "=="}


def check_required() -> Finding:
    """Check that every package that a run imports is installed."""
    if importlib.util.find_spec("packaging") is None:  # it reads the names of the others
        return Finding("packages", "error", "packaging is not installed", "pip install packaging")
    if installed_version("bapo-megatron") is None:
        return Finding("packages", "error", "bapo-megatron is not installed, so its needs are unknown", "pip install .")
    core = requirements("core")
    missing = [r for r in core if importlib.util.find_spec(_module(r)) is None]
    if missing:
        names = ", ".join(r.name for r in missing)
        what = f"{names} {'is' if len(missing) == 1 else 'are'} not installed"
        return Finding("packages", "error", what, _pip_install(missing))
    return Finding("packages", "ok", f"all {len(core)} packages that a run imports are installed")


def check_versions(stack: Stack) -> Finding:
    """Check the installed versions, SGLang's only if it is installed; `software_checks` checks megatron-core."""
    found = [c for c in compare_installed(stack) if c.requirement.name != "megatron-core"]
    wrong = [c for c in found if c.state == "not allowed"]
    other = [c for c in found if c.state == "allowed"]
    if wrong:
        core = requirements("core")
        verdict: Grade = "error" if any(c.requirement in core for c in wrong) else "warning"
        what = f"not allowed: {', '.join(map(str, wrong))}"
        return Finding("versions", verdict, what, _pip_install([c.requirement for c in wrong]))
    what = f"{len(found) - len(other)} of {len(found)} {_STACKS[stack]}"
    if other:
        what += f"; allowed, but different: {', '.join(map(str, other))}"
    return Finding("versions", "ok", what)


def compare_installed(stack: Stack) -> list[InstalledPackage]:
    """Compare every installed package; SGLang's packages only if SGLang is installed."""
    has_sglang = installed_version("sglang") is not None
    groups = [g for g in GROUPS if "sglang" not in g or has_sglang]
    pinned = pins(stack)
    found = [judge_version(r, pinned.get(r.name, "")) for group in groups for r in requirements(group)]
    return [c for c in found if c.state != "missing"]


def judge_version(requirement: Requirement, pinned: str) -> InstalledPackage:
    """Compare one package's installed version with its range and its pinned version ("" for none)."""
    from packaging.version import Version

    installed = installed_version(requirement.name)
    state: Compliance
    if installed is None:
        state = "missing"
    elif not requirement.specifier.contains(installed, prereleases=True):
        state = "not allowed"
    else:  # a local version such as 2.13.0+cpu is the same release
        state = "exact" if not pinned or Version(installed).public == Version(pinned).public else "allowed"
    return InstalledPackage(requirement, pinned, installed, state)


def table(stack: Stack) -> Iterator[str]:
    """Yield the lines of `bapo doctor --versions`, one for each package."""
    yield f"{'':<31}{'installed':<18}{stack + '.txt':<18}{'allowed':<14}"
    pinned = pins(stack)
    for group in GROUPS:
        yield f"[{group}]"
        for c in (judge_version(r, pinned.get(r.name, "")) for r in requirements(group)):
            r = c.requirement
            name = f"{r.name}[{','.join(r.extras)}]" if r.extras else r.name
            yield f"  {name:<29}{c.installed or '-':<18}{c.pinned or '-':<18}{_range(r) or 'any':<14}{c.state}"


def _read(file: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    text = (resources.files("bapo_megatron_requirements") / file).read_text(encoding="utf-8")
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return [r for r in lines if r.marker is None or r.marker.evaluate()]


def _range(requirement: Requirement) -> str:
    """Return the range, lower end first."""
    return ",".join(sorted(map(str, requirement.specifier), key=lambda text: text[0], reverse=True))


def _pip_install(requirements: list[Requirement]) -> str:
    return f"pip install {shlex.join(r.name + _range(r) for r in requirements)}"


def _module(requirement: Requirement) -> str:
    return _MODULES.get(requirement.name, requirement.name.replace("-", "_"))


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
