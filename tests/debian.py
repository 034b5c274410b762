"""Programs from Debian's packages that some tests need; with CI=true and as root, missing ones are installed."""

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest

_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:/sbin"
_TIMEOUT_S = 600.0
_OPTIONS = ("DPkg::Lock::Timeout=300", "Acquire::Retries=3", "Acquire::http::Timeout=30", "Dpkg::Use-Pty=0")


def which(program: str) -> str | None:
    """Find a program, including daemons."""
    return shutil.which(program, path=_PATH)


def require(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Make sure that the programs are there; skip the test if they are missing and may not be installed.

    Raises:
        RuntimeError: with CI=true, they could not be installed; holds the output of apt-get.
    """
    if not _missing(programs):
        return
    if os.environ.get("CI") != "true" or os.geteuid() != 0:
        pytest.skip(f"{', '.join(_missing(programs))}: not installed (apt-get install {' '.join(packages)})")
    options = [word for option in _OPTIONS for word in ("-o", option)]
    output = _apt_get("update", *options)  # may fail for a repository that has none of these packages
    output += _apt_get("install", "--yes", "--no-install-recommends", *options, *packages)
    if _missing(programs):
        raise RuntimeError(f"still not installed: {', '.join(_missing(programs))}\n{output}")


def _missing(programs: Sequence[str]) -> list[str]:
    return [program for program in programs if which(program) is None]


def _apt_get(*arguments: str) -> str:
    command = ["apt-get", *arguments]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as problem:
        raise RuntimeError(f"{' '.join(command)}: {problem}") from problem
    return f"$ {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}\nexit code {done.returncode}\n"
