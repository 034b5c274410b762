"""Which packages are installed, against the lock file. Imports none of them, so that it can say what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bapo_megatron.preflight import versions
from bapo_megatron.preflight.finding import Finding, Verdict
from bapo_megatron.preflight.versions import Package, Stack

State = Literal["exact", "allowed", "not allowed", "missing"]

_MODULES = {"megatron-core": "megatron"}  # else the distribution's name, with underscores
_SGLANG = ("sglang", "sglang-needs")
_GROUPS = ("core", "parquet", "gpu", *_SGLANG)  # not what the image compiles with
_STACKS = {"cpu": "as tested", "gpu": "as docker/Dockerfile.gpu has them, untested"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is installed of one package, against the lock file.

    exact: the stack's version (or an allowed one, where the stack has none of its own). allowed: another one, which
    setup.py takes. not allowed: one that it does not take.
    """

    package: Package
    locked: str
    installed: str | None
    state: State

    def __str__(self) -> str:
        wanted = self.package.allowed if self.state == "not allowed" else self.locked
        return f"{self.package.name} {self.installed} ({wanted})"


def check_required() -> Finding:
    """Whether all is there that a run imports."""
    core = versions.packages("core")
    missing = [p.name for p in core if importlib.util.find_spec(_module(p)) is None]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        return Finding("packages", "error", what, _pip_install([p for p in core if p.name in missing]))
    return Finding("packages", "ok", f"all {len(core)} that a run imports are installed")


def check_versions(stack: Stack) -> Finding:
    """Of what is installed: of SGLang's only where there is SGLang. `software_checks` has a line for megatron-core."""
    found = [c for c in compare_installed(stack) if c.package.name != "megatron-core"]
    wrong = [c for c in found if c.state == "not allowed"]
    other = [c for c in found if c.state == "allowed"]
    if wrong:
        verdict: Verdict = "error" if any(c.package in versions.packages("core") for c in wrong) else "warning"
        what = f"not allowed: {', '.join(map(str, wrong))}"
        return Finding("versions", verdict, what, _pip_install([c.package for c in wrong]))
    what = f"{len(found) - len(other)} of {len(found)} {_STACKS[stack]}"
    if other:
        what += f"; allowed, but others: {', '.join(map(str, other))}"
    return Finding("versions", "ok", what)


def compare_installed(stack: Stack) -> list[Comparison]:
    """Every package of the lock file that is there; SGLang's only where there is SGLang."""
    has_sglang = _installed("sglang") is not None
    groups = [g for g in _GROUPS if g not in _SGLANG or has_sglang]
    found = [compare(package, stack) for group in groups for package in versions.packages(group)]
    return [c for c in found if c.state != "missing"]


def compare(package: Package, stack: Stack) -> Comparison:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    locked = package.gpu if stack == "gpu" else package.cpu
    installed = _installed(package.name)
    state: State
    if installed is None:
        state = "missing"
    elif not SpecifierSet(package.allowed).contains(installed, prereleases=True):
        state = "not allowed"
    else:  # a local version such as 2.13.0+cpu is the same release
        state = "exact" if not locked or Version(installed).public == Version(locked).public else "allowed"
    return Comparison(package, locked, installed, state)


def table(stack: Stack) -> Iterator[str]:
    """`bapo doctor --versions`: a line for each package of the lock file."""
    yield f"{'':<31}{'installed':<18}{'lock (' + stack + ')':<18}{'allowed':<14}"
    for group in _GROUPS:
        yield f"[{group}]"
        for c in (compare(package, stack) for package in versions.packages(group)):
            have, locked, allowed = c.installed or "-", c.locked or "-", c.package.allowed or "any"
            yield f"  {c.package.requirement:<29}{have:<18}{locked:<18}{allowed:<14}{c.state}"


def _pip_install(packages: list[Package]) -> str:
    return f"pip install {shlex.join(p.pinned(None) for p in packages)}"


def _module(package: Package) -> str:
    return _MODULES.get(package.name, package.name.replace("-", "_"))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
