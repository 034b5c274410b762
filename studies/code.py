"""The code of a study: a commit with a tag, in a worktree of its own, so that the checkout may change meanwhile."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from bapo_megatron.errors import ConfigError, UserError, plural
from bapo_megatron.runs.provenance import ask_git

ROOT = Path(__file__).parents[1]
_CODE = ("bapo_megatron", "patches", "studies/*.py", "studies/base.toml")  # what a run's results depend on, for git
_CODE_FILES = ("bapo_megatron/**/*", "patches/**/*", "studies/*.py", "studies/base.toml")  # the same, for pathlib
_FILES = "files-"
_SHOWN = 3
_GIT_TIMEOUT_S = 300.0  # a worktree on a slow disk
# Names that a worktree lacks: packages that setup.py maps, and models, which git ignores.
_LINKS = {"bapo_megatron_patches": "patches", "bapo_megatron_configs": "configs"}
_SHARED = ("models",)


@cache
def code_here() -> str:
    """Return the commit of this checkout; if its code is not committed, "files-" and a digest of the code's files."""
    if not uncommitted() and (commit := _ask(ROOT, "rev-parse", "HEAD")):
        return commit
    digest = hashlib.sha256()
    for file in sorted(path for pattern in _CODE_FILES for path in ROOT.glob(pattern) if path.is_file()):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"{_FILES}{digest.hexdigest()[:16]}"


def is_commit(code: str) -> bool:
    """Return whether `code_here` returned a commit."""
    return not code.startswith(_FILES)


def uncommitted() -> str:
    """Say in a few words which of the code is not committed; "" if all of it is."""
    if _ask(ROOT, "rev-parse", "--show-toplevel") != str(ROOT.resolve()):
        return "this folder is not a git checkout"
    if (status := _ask(ROOT, "status", "--porcelain", "--", *_CODE)) is None:
        return "git status failed in this checkout"
    changed = [line[3:] for line in status.splitlines()]
    others = f" and {plural(len(changed) - _SHOWN, 'other file')}" if len(changed) > _SHOWN else ""
    return f"{', '.join(changed[:_SHOWN])}{others}: not committed" if changed else ""


def commit_of(revision: str) -> str:
    """Return the commit that a name, such as a tag, stands for.

    Raises:
        ConfigError: this clone has no such commit.
    """
    if commit := _ask(ROOT, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"):
        return commit
    raise ConfigError(
        f"this clone has no commit {revision}; fetch it (`git fetch --tags`, with --unshallow in a shallow clone), or "
        "begin again with the code of another commit: --at HEAD"
    )


def worktree(commit: str, folder: Path) -> Path:
    """Return a worktree of the commit in `folder`, made if it is missing. A tag, study-..., keeps the commit.

    Raises:
        ConfigError: the commit has no studies that run from a worktree.
        UserError: git cannot make it, or its code was changed.
    """
    place = (folder / commit[:12]).absolute()
    if not (place / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _do("worktree", "add", "--force", "--force", "--detach", str(place), commit)
    if _ask(place, "rev-parse", "HEAD") != commit or _ask(place, "status", "--porcelain", "--", *_CODE) != "":
        raise UserError(f"{place} is no longer the code of commit {commit[:12]}; delete the folder, and run this again")
    if not (place / "studies" / "code.py").is_file():
        raise ConfigError(f"commit {commit[:12]} is too old for --at; check it out, and use its own `bapo reproduce`")
    if not _ask(ROOT, "tag", "--points-at", commit):
        _do("tag", f"study-{commit[:12]}", commit)
    targets = {name: place / target for name, target in _LINKS.items()} | {name: ROOT / name for name in _SHARED}
    for name, target in targets.items():
        if target.exists() and not (place / name).exists():
            (place / name).symlink_to(target)
    return place


def run_in(place: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `bapo reproduce` with the code in a worktree.

    The working folder stays, unless it is in this checkout: then it is the same folder of the worktree, so that
    everything that git knows comes from the commit.
    """
    here = Path.cwd().resolve()
    if here.is_relative_to(ROOT.resolve()):
        there = place / here.relative_to(ROOT.resolve())
        there.mkdir(parents=True, exist_ok=True)
        os.chdir(there)
    python_path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "bapo_megatron", "reproduce", *arguments]  # -P: the worktree's code
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": python_path})


def _ask(folder: Path, *arguments: str) -> str | None:
    said = ask_git(folder, *arguments)
    return None if said is None else said.rstrip("\n")


def _do(*arguments: str) -> None:
    """Let git change something in this checkout. Raises UserError."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise UserError(f"git {arguments[0]} failed: {reason[-1]}; --in-place needs no worktree") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"git {arguments[0]} failed: {error}; --in-place needs no worktree") from None
