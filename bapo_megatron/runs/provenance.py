"""The environment of an attempt: Python, machine, packages, and the state of this package's checkout."""

import contextlib
import platform
import re
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bapo_megatron.runtime import num_cores

_PACKAGES = (
    "bapo-megatron",
    "torch",
    "megatron-core",
    "transformers",
    "sglang",
    "transformer-engine",
    "numpy",
    "pydantic",
)
MAX_DIFF_BYTES = 1 << 20
GIT_TIMEOUT_S = 10.0


def describe_environment() -> dict[str, Any]:
    """Describe this process: Python, platform, cores, packages. Omits environment variables, which may be secret."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "working_directory": str(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "num_cores": num_cores(),
        "processor": _processor(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def git_state(folder: Path) -> tuple[str | None, str]:
    """Return commit and uncommitted changes of the checkout that holds this package, or (None, "") without one."""
    commit = ask_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, ""
    diff = ask_git(folder, "diff", "--no-color", "--no-ext-diff", "HEAD") or ""
    encoded = diff.encode()
    if len(encoded) > MAX_DIFF_BYTES:
        kept = encoded[:MAX_DIFF_BYTES].decode(errors="ignore")
        diff = f"{kept}\n[cut: the whole diff has {len(encoded)} bytes]\n"
    return commit.strip(), diff


def _processor() -> str:
    """Return the processor's name: its kind decides in which order sums are computed."""
    with contextlib.suppress(OSError):
        if named := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return named[1].strip()
    return platform.machine()


def ask_git(folder: Path, *args: str) -> str | None:
    """Return what git prints in a folder, or None if it fails, takes too long or is not there."""
    if shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, timeout=GIT_TIMEOUT_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
