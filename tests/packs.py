"""Packs and wheels as small as they can be, for tests of scripts/gpu_packing.py."""

import hashlib
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_packing

HERE = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "torch": gpu_packing.installed_torch()}


def write_pack(folder: Path, files: Mapping[str, bytes], **other: str) -> Path:
    """Write a complete pack, for this Python and torch unless others are named; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"name": folder.name} | HERE | other | {"files": digests(files)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "pack.json").write_text(json.dumps(facts))
    return folder


def digests(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in files.items()}


def wheel(folder: Path, name: str, version: str, members: Mapping[str, bytes], *needs: str) -> Path:
    """Write a wheel of these files, and of the requirements in `needs`."""
    folder.mkdir(parents=True, exist_ok=True)
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {x}" for x in needs)]
    with zipfile.ZipFile(path, "w") as file:
        for member, content in members.items():
            file.writestr(member, content)
        file.writestr(f"{about}/METADATA", "\n".join([*lines, ""]))
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in file.namelist()))
    return path
