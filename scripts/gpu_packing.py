"""Packages that a GPU machine without a network needs besides torch: the list, the download, and what is missing.

    scripts/gpu_session.sh pack [FOLDER] [--python 3.12] [--without NAME ...]

Without FOLDER, this prints the list. With it, pip downloads the wheels, and Transformer Engine with the source of its
torch part, for Linux on x86-64. `scripts/gpu_session.sh` names what is missing before it starts (`gpu_packing.py
missing`). Naming needs nothing but Python; downloading needs pip, setuptools and packaging.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = Path(os.environ.get("BAPO_WHEELS", "/nonexistent"))
TESTS = ("hypothesis", "pytest")
WITH_SOURCE = ("ninja", "nvidia-ml-py", "setuptools", "wheel")  # to compile, and to ask the driver
CORE = "transformer-engine-cu13"  # Transformer Engine's library for CUDA 13
TORCH_PART = "transformer-engine-torch"
# What torch brings; typing-extensions and setuptools are packed, because other packages need newer ones.
OF_TORCH = ("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "torch")
PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_24", "_2_17", "2014"))
MIB = 2**20
FOLDER = Path(os.environ.get("BAPO_PACKS") or ROOT / ".packs").resolve()
OFFLINE = Path(os.environ.get("OFFLINE") or ROOT / ".bapo-offline").resolve()
TE_WHEELS = FOLDER / "te"
PACKS = ("serve", "kernels", "te", "nccl", "fla", "smollm2-1", "smollm2-2")
NCCL = "libnccl.so.2"

# In place of torch, which no package needs for being downloaded: resolving it would download gigabytes, and Transformer
# Engine's setup.py asks it for the version of CUDA.
_STAND_IN = {
    "torch/__init__.py": "class version: cuda = '13.0'",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "from setuptools import Extension as CppExtension\n"
    "from setuptools.command.build_ext import build_ext as BuildExtension\n",
    "torch-{version}.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
    "torch-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "torch-{version}.dist-info/RECORD": "",
}


def name_of(requirement: str) -> str:
    """Return a package's name in its normal form. Example: name_of("Tomli_W>=1.0") == "tomli-w"."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def source(folder: Path) -> Path | None:
    """Return the source of Transformer Engine's torch part in a folder."""
    return next(iter(sorted(folder.glob("transformer_engine_torch-*.tar.gz"))), None)


def needs(folder: Path) -> list[str]:
    """Return what a session imports, from setup.py, and what the source in the folder, if there is one, needs."""
    listed, archive = [*TESTS, *declared("BASE", "TRAIN")], source(folder)
    return listed if archive is None else [*listed, *WITH_SOURCE, *source_needs(archive)]


def declared(*variables: str) -> list[str]:
    """Return the requirements in these variables of setup.py."""
    listed: list[str] = []
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in variables:
            listed += ast.literal_eval(node.value)
    return listed


def source_needs(archive: Path) -> list[str]:
    """Return what the torch part needs besides Transformer Engine itself, of which it names the library for CUDA 12."""
    with tarfile.open(archive) as files:
        found = next(member for member in files if re.fullmatch(r"[^/]+/PKG-INFO", member.name))
        about = files.extractfile(found)
        assert about is not None
        lines = re.findall(r"^Requires-Dist: (.+)$", about.read().decode(), flags=re.MULTILINE)
    return [line for line in lines if not line.startswith("transformer_engine") and name_of(line) not in OF_TORCH]


class PackError(Exception):
    """A pack that cannot be used; the message is one line."""


def problem(name: str) -> str:
    """Return why a pack cannot be used by this Python and torch, in one line, or ""."""
    folder = FOLDER / name
    try:
        facts = json.loads((folder / "pack.json").read_text(encoding="utf-8"))
        made_for, files = (str(facts["python"]), str(facts["torch"])), dict(facts["files"])
    except FileNotFoundError:
        return f"pack {name} is missing: no {folder}/pack.json; run `scripts/gpu_session.sh pack {name}`"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"pack {name} is broken: {folder}/pack.json cannot be read ({error})"
    here = (".".join(map(str, sys.version_info[:2])), importlib.metadata.version("torch").partition("+")[0])
    if made_for != here:
        return f"pack {name} is for Python {made_for[0]} and torch {made_for[1]}, but here are {here[0]} and {here[1]}"
    for file, its in files.items():
        content = (folder / file).read_bytes() if (folder / file).is_file() else b""
        if len(content) != its["bytes"] or hashlib.sha256(content).hexdigest() != its["sha256"]:
            return f"pack {name} is incomplete: {file} is missing or damaged"
    return ""


def install(names: Iterable[str]) -> None:
    """Put packs where Python finds them. Raises PackError."""
    for name in names:
        if why := problem(name):
            raise PackError(why)
        wheels = [str(wheel) for wheel in (FOLDER / name).glob("*.whl") if not wheel.name.startswith("transformer_eng")]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(OFFLINE)]
        if wheels:
            subprocess.run([*command, *wheels], check=True)


def missing(wanted: Iterable[str]) -> tuple[list[str], int]:
    """Return the packages that are not installed, of these and of all that they need, and how many were asked for."""
    asked: set[str] = set()
    absent, queue = [], [name_of(text) for text in wanted]
    while queue:
        name = queue.pop()
        if name in asked:
            continue
        asked.add(name)
        try:
            queue += needs_of(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    return sorted(absent), len(asked)


def needs_of(name: str) -> list[str]:
    """Return the packages that an installed one needs on this machine; none for torch, and none without `packaging`."""
    listed = importlib.metadata.requires(name) or []
    if name == "torch" or importlib.util.find_spec("packaging") is None:  # some builds of torch bring what they list
        return []
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in listed]
    return [name_of(r.name) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def report_missing() -> int:
    """Print one line; return 2 if a package is missing."""
    absent, num_asked = missing(needs(WHEELS))
    if not absent:
        print(f"imports: done, all {num_asked} packages are installed")
        return 0
    python = ".".join(map(str, sys.version_info[:2]))
    mend = f"`scripts/gpu_session.sh pack FOLDER --python {python}`, and here `export BAPO_WHEELS=FOLDER`"
    what = f"{len(absent)} of {num_asked} packages are missing: {', '.join(absent)}"
    print(f"imports: {what}; on a machine with a network run {mend}", file=sys.stderr)
    return 2


def pins(python: str) -> dict[str, str]:
    """Return the tested version of each package, for example {"torch": "==2.14.1"}; gpu.txt is for 3.12 and newer."""
    files = ("cpu.txt", "gpu.txt") if tuple(map(int, python.split("."))) >= (3, 12) else ("gpu.txt", "cpu.txt")
    lines = [line for file in files for line in (ROOT / "requirements" / file).read_text().splitlines()]
    found = [re.fullmatch(r"([\w.-]+)([=<>!~].*)", line) for line in lines]
    return {name_of(match[1]): match[2] for match in found if match}


def stand_in(folder: Path, version: str) -> Path:
    """Write a wheel of a torch without contents and needs."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in _STAND_IN.items():
            wheel.writestr(name.format(version=version), text.format(version=version))
    return path


def pack(folder: Path, python: str, without: Sequence[str]) -> None:
    """Download the list into a folder, and print its sizes."""
    from packaging.requirements import Requirement

    folder.mkdir(parents=True, exist_ok=True)
    pinned, there = pins(python), {*OF_TORCH, *map(name_of, without)}
    of_engine = pinned["transformer-engine"]
    target = ("--only-binary", ":all:", "--python-version", python, "--implementation", "cp")
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as scratch:
        torch = stand_in(Path(scratch), pinned.pop("torch").removeprefix("=="))
        sealed = ("--no-deps", "--no-build-isolation", "--no-binary", TORCH_PART)
        download(folder, (*sealed, TORCH_PART + of_engine), os.environ | {"PYTHONPATH": str(torch)})
        constraints = Path(scratch, "constraints.txt")
        lines = [f"torch @ {torch.as_uri()}", *(name + versions for name, versions in pinned.items())]
        constraints.write_text("\n".join(lines))
        wanted = [Requirement(text) for text in (*needs(folder), *declared("FLA"))]
        fitting = [r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": python})]
        for requirement in fitting:
            requirement.marker = None  # pip would evaluate it for the Python that runs here
        named = (*map(str, fitting), f"transformer-engine{of_engine}", CORE + of_engine)
        download(folder, (*target, *platforms, "--constraint", str(constraints), *named), os.environ)
    for wheel in folder.glob("*.whl"):
        if name_of(wheel.name.partition("-")[0]) in there:
            wheel.unlink()
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_size, reverse=True)
    for file in files[:8]:
        print(f"{file.stat().st_size / MIB:7.1f} MiB  {file.name}")
    total = sum(file.stat().st_size for file in files)
    print(f"{total / MIB:7.1f} MiB  in {len(files)} files for Python {python}; there: export BAPO_WHEELS={folder}")


def download(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *arguments]
    if subprocess.run(command, env=environment).returncode:
        sys.exit("error: pip could not download the list: see above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_session.sh", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("missing")
    installing = commands.add_parser("install")
    installing.add_argument("names", nargs="+", metavar="NAME")
    packing = commands.add_parser("pack")
    packing.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    packing.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    packing.add_argument("--without", nargs="+", default=(), metavar="NAME", help="packages that the machine has")
    options = parser.parse_args()
    if options.command == "missing":
        return report_missing()
    if options.command == "install":
        try:
            install(options.names)
        except PackError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    if options.folder is None:
        print(*dict.fromkeys([*needs(WHEELS), *WITH_SOURCE, "transformer-engine", CORE, TORCH_PART]), sep="\n")
    else:
        pack(options.folder.resolve(), options.python, options.without)
    return 0


if __name__ == "__main__":
    sys.exit(main())
