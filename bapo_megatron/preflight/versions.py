"""`versions.toml`, the lock file of versions. Reads no other module, so that setup.py and the scripts can use it too.

python bapo_megatron/preflight/versions.py requirements core           torch>=2.7, one a line
python bapo_megatron/preflight/versions.py requirements core gpu       torch==2.14.1 where the lock has a version
python bapo_megatron/preflight/versions.py pin torch cpu               torch==2.13.0
python bapo_megatron/preflight/versions.py apex                        git+https://...@commit
python bapo_megatron/preflight/versions.py document > docs/versions.md
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Stack = Literal["cpu", "gpu"]

FILE = Path(__file__).with_name("versions.toml")
GROUPS = ("core", "parquet", "gpu", "gpu-build", "sglang", "sglang-needs")


@dataclass(frozen=True, slots=True)
class Package:
    """One line of the lock file; `cpu` and `gpu` are empty where that stack has no version of its own.

    Example: Package("torch", ">=2.7", "2.13.0", "2.14.1").
    """

    requirement: str  # the name, with its extras
    allowed: str
    cpu: str = ""
    gpu: str = ""

    @property
    def name(self) -> str:
        """Of the distribution, without extras."""
        return self.requirement.partition("[")[0]

    def pinned(self, stack: Stack | None) -> str:
        """As pip takes it: the stack's own version, else what is allowed."""
        version = getattr(self, stack) if stack else ""
        return f"{self.requirement}=={version}" if version else f"{self.requirement}{self.allowed}"


def packages(group: str) -> list[Package]:
    return [Package(requirement, **fields) for requirement, fields in _read()[group].items()]


def requirements(group: str, stack: Stack | None = None) -> list[str]:
    """As pip takes them. Example: requirements("parquet", "cpu") is ["pyarrow==26.0.1"]."""
    return [package.pinned(stack) for package in packages(group)]


def pin(name: str, stack: Stack) -> str:
    """Example: pin("torch", "cpu") is "torch==2.13.0"."""
    return next(p.pinned(stack) for group in GROUPS for p in packages(group) if p.name == name)


def apex() -> str:
    """NVIDIA's apex, as pip takes it."""
    return "apex @ git+{repository}@{commit}".format(**_read()["apex"])


def image(stack: Stack) -> str:
    """That docker/Dockerfile.<stack> starts from."""
    return str(_read()["images"][stack])


def document() -> str:
    """docs/versions.md."""
    lines = [
        "# Versions",
        "",
        "Written from bapo_megatron/preflight/versions.toml, the lock file that setup.py, scripts/, docker/ and",
        "`bapo doctor` read (`python bapo_megatron/preflight/versions.py document > docs/versions.md`). It names what",
        "bapo-megatron asks for itself; what those packages ask for in turn is pip's choice.",
        "",
        "- **allowed**: what an installation may have. Empty: any version.",
        "- **cpu**: what the tests run with.",
        f"- **gpu**: what docker/Dockerfile.gpu installs, on {image('gpu')}.",
        f"- apex, in the GPU image: {_read()['apex']['repository']} at `{_read()['apex']['commit']}`.",
    ]
    for group in GROUPS:
        lines += ["", f"## {group}", "", "| package | allowed | cpu | gpu |", "|---|---|---|---|"]
        lines += [f"| {p.requirement} | {p.allowed} | {p.cpu} | {p.gpu} |" for p in packages(group)]
    return "\n".join(lines) + "\n"


def _read() -> dict[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["requirements", group]:
            print(*requirements(group), sep="\n")
        case ["requirements", group, ("cpu" | "gpu") as stack]:
            print(*requirements(group, stack), sep="\n")
        case ["pin", name, ("cpu" | "gpu") as stack]:
            print(pin(name, stack))
        case ["apex"]:
            print(apex())
        case ["document"]:
            print(document(), end="")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    _main(sys.argv[1:])
