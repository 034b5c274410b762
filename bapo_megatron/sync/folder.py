"""The folder of the disk channel's weights: in the run's folder, at `sync.folder`, or in memory.

A folder outside the run's is `<parent>/bapo-<user id>-<run id>`, mode 0700. The launcher makes it, holds a lock on it,
and removes it at the end. A killed launcher's is removed by the next run of the same user, whose lock shows that nobody
holds it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import explaining_os_errors

MEMORY = Path("/dev/shm")
_LOCK, _WEIGHTS = "lock", "weights"
_PATIENCE_S = 10.0  # others hold the lock of an abandoned folder while they count or remove it
_POLL_S = 0.1


def weights_parent(config: Config) -> Path | None:
    """Return the folder that `weights_folder` is in, if that is not the run's own; None also without a disk channel."""
    if config.sync_channel != "disk":
        return None
    if config.sync.folder is not None:
        return Path(config.sync.folder).expanduser().absolute()
    return MEMORY if config.shares_gpus else None


def weights_folder(config: Config, run_dir: RunDir) -> Path:
    """Return the folder in which a run's disk channel keeps versions of the weights."""
    parent = weights_parent(config)
    return (run_dir.path if parent is None else _own_folder(parent, run_dir)) / _WEIGHTS


@contextlib.contextmanager
def kept_weights_folder(config: Config, run_dir: RunDir) -> Iterator[None]:
    """Make the folder for the weights, if it is outside the run's, and remove it at the end.

    Folders that killed launchers have left are removed first.

    Raises:
        UserError: it cannot be made, is not this user's alone, or another process of the same run holds it.
    """
    parent = weights_parent(config)
    if parent is None:
        yield
        return
    folder = _own_folder(parent, run_dir)
    with explaining_os_errors(folder, "set sync.folder to a folder that you can write"):
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        lock = _make(folder)
    if lock is None:
        raise UserError(f"{folder} is in use: another process trains this run on this machine")
    try:
        yield
    finally:
        _remove(folder)
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for folder in _named_as_ours(parent):
        with _locked(folder) as is_abandoned:
            if is_abandoned:
                _remove(folder)


def _make(folder: Path) -> int | None:
    """Make a folder and return the descriptor of its lock, which this process then holds; None if another one does."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            _check_owned(folder)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # another launcher has just removed the folder as abandoned
            continue
        except BlockingIOError:
            os.close(lock)
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
            continue
        if _is_present(lock, folder):
            return lock
        os.close(lock)  # the folder was removed between opening and locking


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Yield whether the folder's launcher is gone; its lock is then held within the block."""
    lock, is_abandoned = None, False
    try:
        with contextlib.suppress(OSError, UserError):
            _check_owned(folder)
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_abandoned = _is_present(lock, folder)  # otherwise it was removed, and perhaps made again
        yield is_abandoned
    finally:
        if lock is not None:
            os.close(lock)


def _is_present(lock: int, folder: Path) -> bool:
    """Return whether this is still the lock of the folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), (folder / _LOCK).stat())
    return False


def free_bytes(parent: Path) -> int:
    """Return the bytes that a run may write below `parent`: free ones, and those that abandoned folders take."""
    free = shutil.disk_usage(next(path for path in (parent, *parent.parents) if path.is_dir())).free
    for folder in _named_as_ours(parent):
        with _locked(folder) as is_abandoned:
            if is_abandoned:
                free += sum(path.lstat().st_size for path in folder.rglob("*"))
    return free


def _named_as_ours(parent: Path) -> list[Path]:
    return list(parent.glob(f"bapo-{os.getuid()}-*"))


def _own_folder(parent: Path, run_dir: RunDir) -> Path:
    assert run_dir.run_id is not None, "a run that has begun"
    return parent / f"bapo-{os.getuid()}-{run_dir.run_id}"


def _check_owned(folder: Path) -> None:
    """Check that a folder is this user's alone: others may have made one of this name, or a link. Raises UserError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder that only you can use; remove it, or set sync.folder")


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last, so that one that is cut off is found again."""
    shutil.rmtree(folder / _WEIGHTS, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
