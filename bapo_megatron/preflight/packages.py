"""Compares the installed packages with what setup.py asks for, without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from typing import TYPE_CHECKING

from bapo_megatron.preflight.machine_checks import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement  # which may be missing too

_NAME = "packages"


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(extra: str) -> list[Requirement]:
    """Return what bapo-megatron asks for with this extra."""
    from packaging.requirements import Requirement

    declared = [Requirement(text) for text in importlib.metadata.requires("bapo-megatron") or []]
    here = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": extra})]
    return list({r.name: r for r in here}.values())  # the base comes first, and an extra may ask for more


def all_installed() -> bool:
    """Return whether every package that a run imports is installed, in whatever version."""
    is_known = importlib.util.find_spec("packaging") is not None and installed_version("bapo-megatron") is not None
    return is_known and all(installed_version(r.name) for r in requirements("train"))


def check_packages() -> Finding:
    """Check that a run's packages are installed in allowed versions, and the versions of the optional packages."""
    if importlib.util.find_spec("packaging") is None:  # it reads the names of the others
        return Finding(_NAME, "error", "packaging is not installed", "pip install packaging")
    if installed_version("bapo-megatron") is None:
        return Finding(_NAME, "error", "bapo-megatron is not installed, so its needs are unknown", "pip install .")
    core = requirements("train")
    if wrong := [r for r in core if _problem(r)]:
        return Finding(_NAME, "error", ", ".join(map(_problem, wrong)), _pip_install(wrong))
    extras = ["parquet", "gym", "gpu", *(["sglang"] if installed_version("sglang") else [])]
    optional = [r for extra in extras for r in requirements(extra) if installed_version(r.name)]
    if wrong := [r for r in optional if _problem(r)]:
        return Finding(_NAME, "warning", ", ".join(map(_problem, wrong)), _pip_install(wrong))
    return Finding(_NAME, "ok", f"all {len(core)} that a run imports, in allowed versions")


def _problem(requirement: Requirement) -> str:
    """Say what is wrong with a package; "" if nothing is. `check_megatron` judges the version of megatron-core."""
    installed = installed_version(requirement.name)
    if installed is None:
        return f"{requirement.name} is not installed"
    is_allowed = requirement.specifier.contains(installed, prereleases=True)
    return "" if is_allowed or requirement.name == "megatron-core" else f"{requirement.name} {installed} is not allowed"


def _pip_install(requirements: list[Requirement]) -> str:
    ranges = (r.name + ",".join(sorted(map(str, r.specifier), reverse=True)) for r in requirements)  # lower end first
    return f"pip install {shlex.join(ranges)}"
