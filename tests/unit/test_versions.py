"""The lock file of versions, what reads it, and what has to repeat it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bapo_megatron_patches.megatron_core import SUPPORTED as MEGATRON_SUPPORTED
from bapo_megatron_patches.sglang import SUPPORTED as SGLANG_SUPPORTED
from packaging.requirements import Requirement

from bapo_megatron.preflight import packages, versions
from bapo_megatron.preflight.versions import Package

ROOT = Path(__file__).parents[2]
TORCH = Package("torch", ">=2.7", "2.13.0", "2.14.1")


def test_every_line_is_a_requirement_whose_known_versions_are_allowed() -> None:
    for group in versions.GROUPS:
        for package in versions.packages(group):
            requirement = Requirement(package.pinned(None))
            assert requirement.name == package.name
            for version in filter(None, (package.cpu, package.gpu)):
                assert requirement.specifier.contains(version), package


def test_what_the_groups_share_has_one_version() -> None:
    for stack in ("cpu", "gpu"):
        known: dict[str, set[str]] = {}
        for group in versions.GROUPS:
            for package in versions.packages(group):
                known.setdefault(package.name, set()).update(filter(None, [getattr(package, stack)]))
        assert {name: found for name, found in known.items() if len(found) > 1} == {}


def test_the_patches_are_written_against_the_locked_versions() -> None:
    assert versions.pin("megatron-core", "cpu") == f"megatron-core=={MEGATRON_SUPPORTED}"
    assert versions.pin("sglang", "cpu") == f"sglang=={SGLANG_SUPPORTED}"


def test_the_document_is_up_to_date() -> None:
    command = [sys.executable, "-I", "bapo_megatron/preflight/versions.py", "document"]  # as the scripts run it
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert (ROOT / "docs" / "versions.md").read_text() == done.stdout, " ".join(command[2:]) + " > docs/versions.md"


def test_no_version_is_written_where_it_can_be_read() -> None:
    readers = [ROOT / "setup.py", *ROOT.glob("scripts/*.sh"), *ROOT.glob("docker/Dockerfile.*")]
    assert len(readers) > 6
    found = {f.name: re.findall(r"[\w-]+(?:==|>=|<=|<)\d[\w.]*", code(f)) for f in readers}
    assert {name: pins for name, pins in found.items() if pins} == {"setup.py": ["pytest>=8"]}


def code(path: Path) -> str:
    return re.sub(r"(?m)(^|\s)#.*", "", path.read_text())


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_the_images_start_from_the_locked_ones(stack: versions.Stack) -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "docker" / f"Dockerfile.{stack}").read_text(), re.MULTILINE)
    assert base == versions.image(stack)


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docker/README.md", "docs/architecture.md"])
def test_prose_names_the_locked_versions(path: str) -> None:
    text = (ROOT / path).read_text()
    known = {p.name: {p.cpu, p.gpu} for group in versions.GROUPS for p in versions.packages(group)}
    named = {
        "torch": re.findall(r"torch(?:==| )(\d+\.\d+\.\d+)", text),
        "sglang": re.findall(r"SGLang (\d+\.\d+\.\d+)", text),
        "megatron-core": re.findall(r"(?i)megatron-core (\d+\.\d+\.\d+)", text),
        "transformer-engine": re.findall(r"Transformer Engine (\d+\.\d+\.\d+)", text),
    }
    assert any(named.values()), "nothing to compare: take this file off the list"
    assert [(name, version) for name, found in named.items() for version in set(found) - known[name]] == []


@pytest.mark.parametrize(
    ("installed", "stack", "state"),
    [
        ("2.13.0", "cpu", "exact"),
        ("2.13.0+cpu", "cpu", "exact"),
        ("2.13.0+cpu", "gpu", "allowed"),
        ("2.15.0.dev20260818+cu134", "gpu", "allowed"),
        ("2.6.0", "cpu", "not allowed"),
        (None, "cpu", "missing"),
    ],
)
def test_an_installed_version_against_the_lock(
    installed: str | None, stack: versions.Stack, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_installed", lambda name: installed)
    assert packages.compare(TORCH, stack).state == state


def fake(monkeypatch: pytest.MonkeyPatch, **other: str | None) -> None:
    """An environment with the tested versions, but for `other`."""
    installed: dict[str, str | None] = {p.name: p.cpu for p in versions.packages("core")}
    installed |= {name.replace("_", "-"): version for name, version in other.items()}
    monkeypatch.setattr(packages, "_installed", installed.get)


def test_the_doctors_line_on_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    assert (packages.check_versions("cpu").verdict, packages.check_versions("cpu").what) == ("ok", "14 of 14 as tested")
    assert "allowed, but others: torch 2.13.0 (2.14.1)" in packages.check_versions("gpu").what

    fake(monkeypatch, numpy="2.0.0")
    line = packages.check_versions("cpu")
    assert (line.verdict, line.what) == ("ok", "13 of 14 as tested; allowed, but others: numpy 2.0.0 (2.4.6)")

    fake(monkeypatch, transformers="4.57.1")
    line = packages.check_versions("cpu")
    assert line.verdict == "error"
    assert line.what == "not allowed: transformers 4.57.1 (>=5)"
    assert line.advice == "pip install 'transformers>=5'"

    fake(monkeypatch, tokenizers="0.1.0")
    assert packages.check_versions("cpu").verdict == "ok", "it is SGLang that needs another, and SGLang is not there"
    fake(monkeypatch, tokenizers="0.1.0", sglang="0.5.23")
    line = packages.check_versions("cpu")
    assert (line.verdict, "tokenizers 0.1.0 (==0.23.2)" in line.what) == ("warning", True)


def test_the_table_of_versions_has_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, numpy="2.0.0")
    lines = list(packages.table("cpu"))
    groups = [group for group in versions.GROUPS if group != "gpu-build"]
    assert [line for line in lines if line.startswith("[")] == [f"[{group}]" for group in groups]
    assert len(lines) == 1 + sum(1 + len(versions.packages(group)) for group in groups)
    by_name = {line.split()[0]: line for line in reversed(lines)}
    assert by_name["numpy"].split()[1:] == ["2.0.0", "2.4.6", "any", "allowed"]
    assert by_name["sglang"].split()[1:] == ["-", "0.5.23", "==0.5.23", "missing"]
    assert by_name["torch"].endswith("exact")
