"""The versions of requirements/, and the files that repeat or read them."""

import re
from pathlib import Path

import pytest
from bapo_megatron_patches.megatron_core import SUPPORTED as MEGATRON_SUPPORTED
from bapo_megatron_patches.sglang import SUPPORTED as SGLANG_SUPPORTED
from packaging.requirements import Requirement

from bapo_megatron.preflight import packages
from bapo_megatron.preflight.packages import Stack, pins, requirements

ROOT = Path(__file__).parents[2]
STACKS: tuple[Stack, ...] = ("cpu", "gpu")


def test_every_pinned_version_is_allowed() -> None:
    for group in packages.GROUPS:
        for requirement in requirements(group):
            assert requirement.name == requirement.name.lower()
            for stack in STACKS:
                if version := pins(stack).get(requirement.name):
                    assert requirement.specifier.contains(version), requirement


def test_the_tested_versions_have_every_package_once() -> None:
    asked = {r.name for group in packages.GROUPS for r in requirements(group)}
    assert pins("cpu").keys() == asked - {"transformer-engine"}
    for file in ROOT.glob("requirements/*.txt"):
        names = re.findall(r"(?m)^[\w-]+", file.read_text())
        assert len(names) == len(set(names)), file


def test_the_patches_are_written_against_the_pinned_versions() -> None:
    for stack in STACKS:
        assert pins(stack)["megatron-core"] == MEGATRON_SUPPORTED
        assert pins(stack)["sglang"] == SGLANG_SUPPORTED


def test_setup_asks_for_what_the_doctor_reads() -> None:
    """The doctor reads the installed metadata, which an old installation may have from an older setup.py."""
    text = (ROOT / "setup.py").read_text()
    for group in ("core", "parquet", "gpu", "sglang-needs"):
        for requirement in requirements(group):
            ranges = re.findall(rf'"{re.escape(requirement.name)}(?:\[\w+\])?([^"]*)"', text)
            assert str(requirement.specifier) in {str(Requirement(f"x{r}").specifier) for r in ranges}, requirement


def test_no_version_is_written_where_it_can_be_read() -> None:
    readers = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("docker/Dockerfile.*")]
    assert len(readers) > 6
    found = {f.name: re.findall(r"[\w-]+(?:==|>=|<=|<)\d[\w.]*", code(f)) for f in readers}
    assert {name: pins for name, pins in found.items() if pins} == {}


def code(path: Path) -> str:
    return re.sub(r"(?m)(^|\s)#.*", "", path.read_text())


@pytest.mark.parametrize("stack", STACKS)
def test_prose_names_the_images_that_ours_start_from(stack: Stack) -> None:
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "docker" / f"Dockerfile.{stack}").read_text(), re.MULTILINE)
    assert base in (ROOT / "docker" / "README.md").read_text()


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docker/README.md", "docs/architecture.md"])
def test_prose_names_the_pinned_versions(path: str) -> None:
    text = (ROOT / path).read_text()
    known = {name: {pins("cpu").get(name), pins("gpu").get(name)} for name in pins("cpu").keys() | pins("gpu").keys()}
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
def test_an_installed_version_against_its_range_and_pin(
    installed: str | None, stack: Stack, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda name: installed)
    assert packages.compare(Requirement("torch>=2.7"), pins(stack)["torch"]).state == state


def fake(monkeypatch: pytest.MonkeyPatch, **other: str | None) -> None:
    """An environment with the tested versions, but for `other`."""
    installed: dict[str, str | None] = {r.name: pins("cpu")[r.name] for r in requirements("core")}
    installed |= {name.replace("_", "-"): version for name, version in other.items()}
    monkeypatch.setattr(packages, "installed_version", installed.get)


def test_the_doctors_line_on_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    num = len([r for r in requirements("core") if r.name != "megatron-core"])  # which has a check of its own
    assert (packages.check_versions("cpu").verdict, packages.check_versions("cpu").what) == (
        "ok",
        f"{num} of {num} as tested",
    )
    assert "allowed, but others: torch 2.13.0 (2.14.1)" in packages.check_versions("gpu").what

    fake(monkeypatch, numpy="2.0.0")
    line = packages.check_versions("cpu")
    assert (line.verdict, line.what) == (
        "ok",
        f"{num - 1} of {num} as tested; allowed, but others: numpy 2.0.0 (2.4.6)",
    )

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
    assert [line for line in lines if line.startswith("[")] == [f"[{group}]" for group in packages.GROUPS]
    assert len(lines) == 1 + sum(1 + len(requirements(group)) for group in packages.GROUPS)
    by_name = {line.split()[0]: line for line in reversed(lines)}
    assert by_name["numpy"].split()[1:] == ["2.0.0", "2.4.6", "any", "allowed"]
    assert by_name["sglang"].split()[1:] == ["-", "0.5.23", "==0.5.23", "missing"]
    assert by_name["torch"].endswith("exact")
