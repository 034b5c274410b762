"""The versions in requirements/, and the files that repeat or read them."""

import ast
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from bapo_megatron_patches.megatron_core import ADVISED, TRIED
from bapo_megatron_patches.sglang import SUPPORTED as SGLANG_SUPPORTED
from packaging.requirements import Requirement

import bapo_megatron
from bapo_megatron.preflight import packages
from bapo_megatron.preflight.machine_checks import Finding
from tests.distributed import HANG_S
from tests.pinned import GROUPS, Stack, pins, requirements

ROOT = Path(__file__).parents[2]
STACKS: tuple[Stack, ...] = ("cpu", "gpu")


def test_every_pinned_version_is_allowed() -> None:
    for group in GROUPS:
        for requirement in requirements(group):
            assert requirement.name == requirement.name.lower()
            for stack in STACKS:
                if version := pins(stack).get(requirement.name):
                    assert requirement.specifier.contains(version), requirement


def test_the_tested_versions_have_every_package_once() -> None:
    asked = {r.name for group in GROUPS for r in requirements(group)}
    assert pins("cpu").keys() == asked - {"transformer-engine"}
    for file in ROOT.glob("requirements/*.txt"):
        names = re.findall(r"(?m)^[\w-]+(?!.*python_version >=)", file.read_text())
        assert len(names) == len(set(names)), file


LOCKED_PYTHON = "3.11"
LOCKS = {file.stem: file.read_text() for file in ROOT.glob("requirements/*.lock")}
LOCKED = {
    extra: dict(re.findall(r"(?m)^([\w.-]+)==([\w.]+) \\\n    --hash=sha256:[0-9a-f]{64}\b", text))
    for extra, text in LOCKS.items()
}
"""Version of each package that has a digest, by extra."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked(extras: set[str]) -> list[Requirement]:
    """Return what bapo-megatron itself needs on the machines of the locks."""
    declared = map(Requirement, importlib.metadata.requires("bapo-megatron") or [])
    machines = [{"extra": extra, "python_version": LOCKED_PYTHON} for extra in extras]
    return [r for r in declared if r.marker is None or any(map(r.marker.evaluate, machines))]


def versions_tested_there() -> dict[str, str]:
    """Return the tested version of each package on the machines of the locks."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonical(r.name): str(r.specifier).removeprefix("==")
        for r in found
        if r.marker is None or r.marker.evaluate({"python_version": LOCKED_PYTHON})
    }


def test_a_lock_has_a_digest_of_every_package() -> None:
    assert LOCKED.keys() == {"train", "dev", "docs", "gym", "sglang"}
    for extra, text in LOCKS.items():
        lines = [line for line in text.splitlines() if not line.startswith(("#", "    --hash=", "--no-binary="))]
        assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+ \\", line)] == [], extra
        assert len(lines) == len(LOCKED[extra]) > 10, extra
        assert not {name for name in LOCKED[extra] if re.match("torch|nvidia|cuda|triton", name)}, (
            "of torch's own index"
        )


@pytest.mark.parametrize("extra", LOCKED)
def test_a_lock_has_what_setup_asks_for_in_the_tested_versions(extra: str) -> None:
    locked = LOCKED["train"] | LOCKED[extra]
    assert not LOCKED[extra].keys() & LOCKED["train"].keys() or extra == "train"
    for requirement in asked({"train", extra}):
        if requirement.name != "torch":
            assert requirement.specifier.contains(locked[canonical(requirement.name)]), requirement
    for other in (versions_tested_there(), *LOCKED.values()):
        assert {name for name in other.keys() & locked.keys() if other[name] != locked[name]} == set()
    if extra == "sglang":
        assert {r.name for r in requirements("sglang")} <= locked.keys()


@pytest.mark.parametrize("extra", LOCKED)
def test_a_lock_has_what_its_packages_ask_for(extra: str) -> None:
    """Check the installed packages, whose metadata says what they need."""
    locked = LOCKED["train"] | LOCKED[extra]
    alone = {canonical(r.name) for r in requirements("sglang")}  # installed without their dependencies
    wanted = {(canonical(r.name), frozenset(r.extras)) for r in asked({"train", extra})}
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, extras = one = wanted.pop()
        seen.add(one)
        if name == "torch":
            continue
        assert name in locked, f"{name} is not in train.lock or {extra}.lock; run scripts/lock.sh"
        if packages.installed_version(name) == locked[name] and name not in alone:
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            environments = [{"extra": e} for e in extras | {""}]
            needed = [r for r in needs if r.marker is None or any(map(r.marker.evaluate, environments))]
            wanted |= {(canonical(r.name), frozenset(r.extras)) for r in needed} - seen
    assert len(seen) > 10


def common(folder: Path, script: str, python: str = sys.executable) -> tuple[int, str]:
    """Return exit code and output of a script that has sourced common.sh, for an environment in `folder`."""
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{ROOT}/scripts/common.sh"; PY="{python}"; {script}'],
        env={**os.environ, "VIRTUAL_ENV": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("holds", [True, False])
def test_the_scripts_install_from_the_locks_where_these_hold(holds: bool, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
        if [ "$1" = - ]; then exit {0 if holds else 1}; fi
        if [ "$1 $2" = "-m pip" ]; then echo "pip $*"; else exec {sys.executable} "$@"; fi
        """
    )
    python.chmod(0o755)
    code, output = common(tmp_path, "install_checkout dev,gym", str(python))
    assert code == 0
    calls = [line for line in output.splitlines() if line.startswith("pip ")]
    if not holds:
        (call,) = calls
        assert call.endswith(f" -c {tmp_path}/.bapo-constraints.txt -e {ROOT}[dev,gym]")
        return
    *from_locks, checkout = calls
    files = [
        call.rpartition(f" --require-hashes --only-binary :all: --no-build-isolation -r {ROOT}/") for call in from_locks
    ]
    assert [file for _, _, file in files] == [f"requirements/{extra}.lock" for extra in ("train", "dev", "gym")]
    assert checkout.endswith(f" --no-deps --no-build-isolation -e {ROOT}")


def test_the_locks_hold_for_one_python_and_the_tested_torch(tmp_path: Path) -> None:
    here = (sys.version_info[:2], platform.machine(), importlib.metadata.version("torch").partition("+")[0])
    holds = here == ((3, 11), "x86_64", pins("cpu")["torch"])
    script = "for extra in train dev,sglang dev,parquet; do use_locks $extra && echo yes || echo no; done"
    assert common(tmp_path, script)[1].split() == (["yes", "yes", "no"] if holds else ["no"] * 3)
    script = 'LOCKED_PYTHON="$("$PY" -c "import sys; print(*sys.version_info[:2], sep=chr(46))")0"; use_locks train'
    assert common(tmp_path, script)[0] != 0


def test_the_outcome_of_mypy_depends_on_no_package_beyond_train() -> None:
    """mypy does not follow imports of packages that may be missing."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    skipped = {
        module.removesuffix(".*")
        for part in config["overrides"]
        if part.get("follow_imports") == "skip"
        for module in part["module"]
    }
    of_train = {canonical(name) for name in ["torch", *LOCKED["train"]]}
    known = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if of_train & {canonical(name) for name in distributions}
    }
    files = [
        file for folder in config["files"] for file in (ROOT / folder).rglob("*.py*") if file.suffix in (".py", ".pyi")
    ]
    used = {module.partition(".")[0] for file in files for module in imports(ast.walk(ast.parse(file.read_text())))}
    ours = {"bapo_megatron", "bapo_megatron_patches", "studies", "benchmarks"}
    assert used - sys.stdlib_module_names - ours - known == skipped - {"megatron"}


def imports(nodes: Iterable[ast.AST]) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)


def test_the_patches_are_written_against_the_pinned_versions() -> None:
    for stack in STACKS:
        assert pins(stack)["megatron-core"] == ADVISED
        pinned = re.findall(r"(?m)^megatron-core==([\d.]+)", (ROOT / "requirements" / f"{stack}.txt").read_text())
        assert pinned == [*TRIED]
        assert pins(stack)["sglang"] == SGLANG_SUPPORTED


def test_setup_asks_for_what_the_doctor_reads() -> None:
    """The doctor reads the installed metadata, which an old installation may have from an older setup.py."""
    text = (ROOT / "setup.py").read_text()
    for group in ("core", "parquet", "gym", "gpu", "sglang-needs"):
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


def test_a_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == bapo_megatron.__version__


def test_prose_names_the_pinned_versions() -> None:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docker" / "README.md"} - {ROOT / "CHANGELOG.md"}
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))
    known = {name: {pins("cpu").get(name), pins("gpu").get(name)} for name in pins("cpu").keys() | pins("gpu").keys()}
    named = {
        "torch": re.findall(r"torch(?:==| )(\d+\.\d+\.\d+)", text),
        "sglang": re.findall(r"SGLang (\d+\.\d+\.\d+)", text),
        "megatron-core": re.findall(r"(?i)megatron-core (\d+\.\d+\.\d+)", text),
        "transformer-engine": re.findall(r"Transformer Engine (\d+\.\d+\.\d+)", text),
    }
    known["megatron-core"] = {*TRIED}
    assert [(name, version) for name, found in named.items() for version in set(found) - known[name]] == []


def fake(monkeypatch: pytest.MonkeyPatch, **other: str | None) -> None:
    """Fake an environment with the tested versions, except for `other`."""
    installed: dict[str, str | None] = {r.name: pins("cpu")[r.name] for r in requirements("core")}
    installed |= {"bapo-megatron": "1", **{name.replace("_", "-"): version for name, version in other.items()}}
    monkeypatch.setattr(packages, "installed_version", installed.get)


def test_the_doctors_line_on_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, numpy="2.0.0", torch="2.13.0+cpu", megatron_core="0.17.0")  # which has a line of its own
    num = len(requirements("core"))
    assert packages.check_packages() == Finding("packages", "ok", f"all {num} that a run imports, in allowed versions")

    fake(monkeypatch, transformers="4.57.1", tokenizers="0.1.0", torch=None)
    problems = {"transformers 4.57.1 is not allowed", "torch is not installed"}
    line = packages.check_packages()
    assert (line.verdict, set(line.what.split(", "))) == ("error", problems)
    assert "'transformers>=5'" in line.advice

    fake(monkeypatch, tokenizers="0.1.0")
    assert packages.check_packages().verdict == "ok", "only SGLang needs another one, and SGLang is not installed"
    fake(monkeypatch, tokenizers="0.1.0", sglang="0.5.23")
    assert packages.check_packages() == Finding(
        "packages", "warning", "tokenizers 0.1.0 is not allowed", "pip install tokenizers==0.23.2"
    )
